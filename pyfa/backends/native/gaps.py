"""Rows of no sequence: after the last sequence of a packed batch, or beyond a sequence's length.

A kernel writes these rows (``kernels/common/gaps.h``) and no others. Clearing whole tensors took
two to five launches by PyTorch, and 72 of the 860 µs of a packed forward.
"""

from __future__ import annotations

from ... import abi
from ...problem import Call
from ...sizes import Extent
from ..common.program import Like, Params, Program
from .launch import Launcher

THREADS, ROWS = 256, 16


def add_forward(
    launch: Launcher, program: Program, call: Call, out: Like, lse: Like | None
) -> None:
    """Add to ``program`` the kernel that zeroes rows of out and lse that belong to no sequence."""
    pointers = {"out": "out"}
    values: abi.Values = {**_heads(out, "q", "_v"), **abi.strides_of("out", out[1])}
    if lse is not None:
        pointers["lse"] = "lse"
        values |= {"lse_batch": lse[1][0] if len(lse[1]) == 3 else 0, "lse_head": lse[1][-2]}
    _add(launch, program, call, out, values, pointers, "q")


def add_backward(
    launch: Launcher, program: Program, call: Call, dq: Like, dk: Like, dv: Like
) -> None:
    """Add to ``program`` the kernels that zero rows of the gradients that belong to no
    sequence."""
    if call.has_spare_q:
        values: abi.Values = {**_heads(dq, "q", "_v"), **abi.strides_of("out", dq[1])}
        _add(launch, program, call, dq, values, {"out": "dq"}, "q")
    if call.has_spare_k:
        values = {**_heads(dk, "q", "_v"), **_heads(dv, "k", "")}
        values |= abi.strides_of("out", dk[1]) | abi.strides_of("dv", dv[1])
        _add(launch, program, call, dk, values, {"out": "dk", "dv": "dv"}, "k")


def _heads(x: Like, side: str, which: str) -> dict[str, Extent]:
    return {f"heads_{side}": x[0][-2], f"head_dim{which}": x[0][-1]}


def _add(
    launch: Launcher, program: Program, call: Call, x: Like, values: abi.Values,
    pointers: dict[str, str], side: str,
) -> None:  # fmt: skip
    """Add the kernel. ``side``: whose offsets and lengths say which rows of ``x`` are in use."""
    rows = x[0][-3]
    entries = x[0][0] if len(x[0]) == 4 else 1
    for name in ("cu_seqlens", "seqused"):
        if getattr(call, f"{name}_{side}") is not None:
            pointers[f"{name}_q"] = f"{name}_{side}"
    if call.cu_seqlens_k is not None and call.cu_seqlens_k is call.cu_seqlens_q:
        pointers["cu_seqlens_q"] = "cu_seqlens_q"  # the two are one tensor, which is listed once
    values = {**values, "batch": call.batch, "seqlen_q": rows}
    blocks = -(-rows * entries // ROWS)
    program.add(launch.plan("gaps"), blocks, THREADS, Params(values, pointers))
