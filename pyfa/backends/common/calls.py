"""Calls in the form that kernels take: formats, score classes, rows in 16-byte units, results."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...problem import Call, Problem

DTYPES = ("float16", "bfloat16")
DTYPE_CODES = {"float16": 0, "bfloat16": 1}
# Score classes: what a forward is compiled for, beyond masks, which every one has.
PLAIN, GENERAL, DROPOUT = range(3)
DROPOUT_TERM = 4  # the code of dropout alone in a HIP backward plan (``TERM``)
MAX_ROW_STRIDE = 1 << 23  # elements: offsets inside a tile are 32-bit


def dtype_code(x: torch.Tensor) -> int:
    """Return the DTYPE constant that kernels for ``x`` are compiled with."""
    return DTYPE_CODES[str(x.dtype).removeprefix("torch.")]


def bucket_of(pairs: Iterable[tuple[int, int]], head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return the smallest compiled pair of head dims that fits the given pair."""
    return min(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)


def score_class(problem: Problem) -> int:
    """Return ``PLAIN``, ``GENERAL`` or ``DROPOUT``: what is computed between the two products."""
    if "dropout" in problem.features:
        return DROPOUT
    general = problem.features & {"softcap", "alibi", "bias", "score_mod", "mask_mod"}
    return GENERAL if general or not problem.positive else PLAIN


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in 16-byte units: contiguous rows of whole units, with aligned base and
    strides."""
    unit = 16 // x.element_size()
    short = -x.shape[-1] % unit
    if short:
        return padded(x, short)
    *strides, last = x.stride()
    row = x.stride(-3)
    if (
        last != 1
        or x.data_ptr() % 16
        or any(stride % unit for stride in strides)
        or not x.shape[-1] <= row < MAX_ROW_STRIDE
    ):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, with float8 as bytes, because PyTorch cannot fill and index every float8 format
    on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def padded(x: torch.Tensor, more: int) -> torch.Tensor:
    """Return a contiguous copy of ``x`` with ``more`` zeros after the elements of each row."""
    # PyTorch's ``pad`` would not do: it keeps the memory order of a tensor that looks like a
    # channels-last image, and does not support float8. The integer 0 is also the float8 0.
    bits = as_bits(x)
    whole = bits.new_zeros((*x.shape[:-1], x.shape[-1] + more))
    whole[..., : x.shape[-1]] = bits
    return whole.view(x.dtype)


def with_readable(call: Call) -> Call:
    """Return ``call`` with q, k and v as the kernels read them."""
    return call._replace(q=readable(call.q), k=readable(call.k), v=readable(call.v))
