"""Puts together the partial results of a kernel that cut the keys into parts."""

from __future__ import annotations

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call
from . import calls
from .launch import Launch

THREADS = 256


def launch_parts(
    launch: Launch,
    plan: Plan,
    workgroups: int,
    threads: int,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: int,
) -> None:
    """Run a forward kernel with the keys cut into ``parts``, and what puts them together.

    ``workgroups`` are those of one part; out and lse are from ``calls.results``.
    """
    dies = launch.device_at(call.q.device).dies
    values = abi.forward_values(call, out, lse) | {"dies": dies, "num_splits": parts}
    tensors = calls.tensors_of(call)
    if parts == 1:
        launch(plan, workgroups, threads, values, tensors | {"out": out, "lse": lse})
        return
    partial_out, partial_lse = partials(out, parts)
    if call.cu_seqlens_q is not None or call.seqused_q is not None:
        partial_lse.fill_(-torch.inf)
    partial = {"partial_out": partial_out, "partial_lse": partial_lse}
    values |= {name: x.data_ptr() for name, x in partial.items()}
    launch(plan, workgroups * parts, threads, values, tensors | partial)
    run(launch, call, out, lse, partial_out, partial_lse, parts)


def partials(out: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """partial_out and partial_lse for ``run``, not initialised: (rows, heads, splits[, Dv]).

    Rows are those of ``out``, (B, S, H, Dv) or (total, H, Dv), one sequence after the other.
    """
    heads, dim = out.shape[-2:]
    rows = out.shape[:-2].numel()
    shape = (rows, heads, num_splits)
    return (
        out.new_empty((*shape, dim), dtype=torch.float32),
        out.new_empty(shape, dtype=torch.float32),
    )


def run(
    launch: Launch,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    num_splits: int,
) -> None:
    """Write out and lse of ``call`` from every row's parts, each a normalised output and its LSE.

    A part that saw nothing has the LSE −inf, and its output may be anything. That holds for every
    row of ``out``: where nobody writes some of them, fill ``partial_lse`` with −inf first.
    """
    if lse.numel() == 0:
        return
    packed = call.cu_seqlens_q is not None
    values = {
        "out": out.data_ptr(),
        "out_batch": 0 if packed else out.stride(0),
        "out_row": out.stride(-3),
        "out_head": out.stride(-2),
        "lse": lse.data_ptr(),
        "lse_batch": 0 if packed else lse.stride(0),
        "lse_head": lse.stride(-2),
        "partial_out": partial_out.data_ptr(),
        "partial_lse": partial_lse.data_ptr(),
        "batch": 1 if packed else out.shape[0],
        "heads_q": out.shape[-2],
        "seqlen_q": out.shape[-3],
        "head_dim_v": out.shape[-1],
        "num_splits": num_splits,
    }
    tensors = {"out": out, "lse": lse, "partial_out": partial_out, "partial_lse": partial_lse}
    plan = launch.plan("combine", calls.dtype_code(out))
    launch(plan, -(-lse.numel() // lines_of(num_splits, out.shape[-1])), THREADS, values, tensors)


def lines_of(parts: int, dim: int) -> int:
    """Lines, rows of one head, of a workgroup: ``kernels/common/combine.h`` says how."""
    of_part = threads_of_part(dim)
    return THREADS // of_part // min(THREADS // of_part, _fours(parts))


def threads_of_part(dim: int) -> int:
    """Threads that take one part's output of a line."""
    return _fours(dim)


def _fours(count: int) -> int:
    """So many, in fours, rounded up to a power of two."""
    return 1 << (-(-count // 4) - 1).bit_length()
