"""Checks that read the values of tensors: offsets, lengths, page numbers, scales, boolean masks.

The checks of ``validate`` run first. These run on the tensors that a backend gets.
"""

from __future__ import annotations

import itertools

import torch

from . import validate_cache
from .problem import Append, Call, counted
from .validate import wrong


def check(call: Call, append: Append | None = None) -> None:
    """Raise ``ValueError`` for offsets, lengths and page numbers that point outside their tensors,
    including those of the append, and for booleans whose bytes are not 0 or 1.

    This reads tensor values, which is cheap on the CPU and waits for a GPU (where it runs only with
    ``PYFA_CHECK=1``).
    """
    if append is not None:
        if append.cu_seqlens is not None and append.k is not None:
            longest = ("the cache's length", call.max_seqlen_k)
            _check_offsets("cu_seqlens_new", append.cu_seqlens, append.k, longest[1], longest[0])
        # Before the new keys are counted: −1 and two new keys are a length of 1.
        if call.seqused_k is not None:
            validate_cache.room(call.seqused_k, _new_keys(append), call.max_seqlen_k)
        _check_rotary(call, append)
        call = counted(call, append)
    for name, scales in zip("qkv", (call.q_descale, call.k_descale, call.v_descale), strict=True):
        if scales is not None:
            _check_scales(f"descale ({name})", scales, call)
    _check_bytes("tree_mask" if call.tree else "bias", call.bias)
    _check_offsets("cu_seqlens_q", call.cu_seqlens_q, call.q, call.max_seqlen_q, "max_seqlen_q")
    _check_offsets("cu_seqlens_k", call.cu_seqlens_k, call.k, call.max_seqlen_k, "max_seqlen_k")
    _check_range("seqused_q", call.seqused_q, _room(call.cu_seqlens_q, call.max_seqlen_q))
    room = _room(call.cu_seqlens_k, call.max_seqlen_k)
    if call.page_table is not None:
        room = min(call.max_seqlen_k, call.page_table.shape[1] * call.k.shape[1])
    name = _name_of_used(call)
    if call.seqused_k is not None and name == "cache_seqlens" and isinstance(room, int):
        validate_cache.room(call.seqused_k, 0, room)
    _check_range(name, call.seqused_k, room)
    stored = call.seqused_k.tolist() if call.seqused_k is not None else call.max_seqlen_k
    _check_range("cache_leftpad", call.cache_leftpad, stored)
    if call.cache_batch_idx is not None:
        _check_range("cache_batch_idx", call.cache_batch_idx, call.k.shape[0] - 1)
    if call.page_table is not None:
        page_size = call.k.shape[1]
        columns = call.page_table.shape[1]
        whole = [columns * page_size] * call.batch
        used = call.seqused_k.tolist() if call.seqused_k is not None else whole
        for row, keys in zip(call.page_table.tolist(), used, strict=True):
            for page in row[: -(-keys // page_size)]:
                if not 0 <= page < call.k.shape[0]:
                    wrong("page_table", f"pages from 0 to {call.k.shape[0] - 1}", page)


def _check_rotary(call: Call, append: Append) -> None:
    start = call.seqused_k if append.start is None else append.start
    if append.cos is None or start is None:
        return
    rows: int | torch.Tensor = call.max_seqlen_q
    if call.cu_seqlens_q is not None:
        rows = call.cu_seqlens_q.diff()
    validate_cache.positions(start, rows if append.moving else rows > 0, append.cos)
    if append.k is not None:
        validate_cache.positions(start, _new_keys(append), append.cos)


def _new_keys(append: Append) -> int | torch.Tensor:
    if append.k is None:
        return 0
    return append.k.shape[1] if append.cu_seqlens is None else append.cu_seqlens.diff()


def _name_of_used(call: Call) -> str:
    """Return the caller's name for ``seqused_k``. For packed queries over pages it may be either
    name."""
    if call.page_table is not None and call.cu_seqlens_q is not None:
        return "seqused_k (cache_seqlens)"
    return "seqused_k" if call.cu_seqlens_q is not None and call.k.dim() == 3 else "cache_seqlens"


def _check_scales(name: str, scales: torch.Tensor, call: Call) -> None:
    bad = ~((scales > 0.0) & (scales < torch.inf))
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.page_table
    places = call.cache_batch_idx, call.cache_leftpad
    if scales.dim() == 3 and any(x is not None for x in (*lengths, *places)):
        bad &= ~scales.isnan()  # a block of which no row is anybody's may have any scale
    if bad.any():
        wrong(name, "positive numbers", scales[bad][0].item())


def _check_bytes(name: str, mask: torch.Tensor | None) -> None:
    """Check a boolean mask: some kernels put the bits of neighboring bytes side by side."""
    if mask is None or mask.dtype is not torch.bool:
        return
    values = mask.view(torch.uint8)
    bad = values[values > 1]
    if bad.numel():
        wrong(name, "bytes that are 0 or 1", bad[0].item())


def _room(offsets: torch.Tensor | None, longest: int) -> int | list[int]:
    return longest if offsets is None else offsets.diff().tolist()


def _check_offsets(
    name: str, offsets: torch.Tensor | None, packed: torch.Tensor, longest: int, longest_name: str
) -> None:
    if offsets is None:
        return
    values = offsets.tolist()
    if values[0] != 0:
        wrong(name, "0 as its first value", values[0])
    if values[-1] > packed.shape[0]:
        wrong(name, f"at most {packed.shape[0]} (the packed rows) as its last value", values[-1])
    for before, after in itertools.pairwise(values):
        if after < before:
            wrong(name, "values that do not decrease", f"{after} after {before}")
        if after - before > longest:
            wrong(name, f"sequences of at most {longest_name}={longest}", after - before)


def _check_range(name: str, values: torch.Tensor | None, most: int | list[int]) -> None:
    if values is None:
        return
    numbers = values.tolist()
    limits = most if isinstance(most, list) else [most] * len(numbers)
    for number, limit in zip(numbers, limits, strict=True):
        if not 0 <= number <= limit:
            wrong(name, f"values from 0 to {limit}", number)
