"""Calls as the kernels take them: formats, score classes, rows in 16-byte units, results."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from ...problem import Call, Problem
from ..base import Gradients

DTYPES = ("float16", "bfloat16")
DTYPE_CODES = {"float16": 0, "bfloat16": 1}
# Score classes: what a forward is compiled for, beyond masks, which every one has.
PLAIN, GENERAL, DROPOUT = range(3)
MAX_ROW_STRIDE = 1 << 23  # elements: offsets inside a tile are 32-bit


def tensors_of(call: Call) -> dict[str, torch.Tensor]:
    """The tensors that ``call`` came with, by name: what kernels may read."""
    return {name: x for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}


def dtype_code(x: torch.Tensor) -> int:
    """The DTYPE that kernels for ``x`` are compiled with."""
    return DTYPE_CODES[str(x.dtype).removeprefix("torch.")]


def bucket_of(pairs: Iterable[tuple[int, int]], head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest compiled pair of head dims that holds this one."""
    return min(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)


def score_class(problem: Problem) -> int:
    """``PLAIN``, ``GENERAL`` or ``DROPOUT``: what lies between products and softmax."""
    if "dropout" in problem.features:
        return DROPOUT
    general = problem.features & {"softcap", "alibi", "bias"}
    return GENERAL if general or not problem.positive else PLAIN


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in 16-byte units: rows without gaps, a multiple of 8 long, bases and strides too."""
    short = -x.shape[-1] % 8
    if short:
        return pad(x, (0, short))
    *strides, last = x.stride()
    row = x.stride(-3)
    if (
        last != 1
        or x.data_ptr() % 16
        or any(stride % 8 for stride in strides)
        or not x.shape[-1] <= row < MAX_ROW_STRIDE
    ):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def with_readable(call: Call) -> Call:
    """``call`` with q, k and v as the kernels read them."""
    return call._replace(q=readable(call.q), k=readable(call.k), v=readable(call.v))


def results(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, not initialised but where rows belong to no sequence, or lie beyond one's."""
    out = call.q.new_empty(call.out_shape())
    lse = call.q.new_empty(call.lse_shape(), dtype=torch.float32)
    if call.cu_seqlens_q is not None or call.seqused_q is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def is_general(call: Call) -> bool:
    """Whether backward has more to do between products and softmax than scale and masks."""
    terms = (call.alibi_slopes, call.bias, call.sinks)
    return bool(call.softcap or call.dropout_p or any(x is not None for x in terms))


def gradients(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """What backward's kernels read and write, by name; for ``abi.backward_values``.

    The gradients are 0 where nobody writes them: in rows of no sequence, or beyond one's length.
    """
    gaps_q = call.cu_seqlens_q is not None or call.seqused_q is not None
    gaps_k = call.cu_seqlens_k is not None or call.seqused_k is not None
    tensors = {
        "out": out,
        "lse": lse.contiguous(),
        "dout": dout,
        "dq": _like(call.q, gaps_q),
        "dk": _like(call.k, gaps_k),
        "dv": _like(call.v, gaps_k),
        "delta": torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device),
    }
    if dlse is not None:
        tensors["dlse"] = dlse.contiguous()
    if call.sinks is not None:
        tensors["dsinks"] = torch.zeros_like(tensors["lse"])
    return tensors


def _like(x: torch.Tensor, gaps: bool) -> torch.Tensor:
    make = torch.zeros if gaps else torch.empty
    return make(x.shape, dtype=x.dtype, device=x.device)


def finished(
    call: Call, tensors: dict[str, torch.Tensor], head_dim: int, head_dim_v: int
) -> Gradients:
    """What the kernels left in the tensors of ``gradients``, of heads as they were given."""
    dsinks = None
    if call.sinks is not None:
        dsinks = tensors["dsinks"].sum((0, 2) if tensors["lse"].dim() == 3 else 1)
    dq, dk, dv = (tensors[name] for name in ("dq", "dk", "dv"))
    return Gradients(dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v], None, dsinks)
