"""Combine the partial results of a kernel whose keys were split."""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import abi, sizes
from ...plan import Plan
from ...problem import Call
from ..common import calls
from ..common.program import Like, Params, Program, count, like
from .launch import Launcher

THREADS = 256


def chunked(plan: Plan) -> Plan:
    """Return ``plan``, of ``combine``, for splits that are chunks (``target.Block``)."""
    return replace(plan, constants=tuple(sorted((*plan.constants, ("CHUNKED", 1)))))


def partials(call: Call, num_splits: int, chunks: bool = False) -> dict[str, Like]:
    """Make partial_out and partial_lse: (rows, heads, splits[, Dv]), with packed sequences. Chunks
    have a base and a sum in place of an LSE."""
    *rows, heads, dim = sizes.out_shape(call)
    shape = (count(rows), heads, num_splits)
    return {
        "partial_out": like((*shape, dim), torch.float32),
        "partial_lse": like((*shape, 2) if chunks else shape, torch.float32),
    }


def add(
    launch: Launcher, program: Program, call: Call, out: Like, lse: Like | None, num_splits: int,
    chunks: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel that computes out and lse from each row's splits, each with a normalized
    output and its LSE.

    A split without keys has LSE −inf and an undefined output. Splits of rows that no sequence uses
    are undefined.
    """
    packed = call.cu_seqlens_q is not None
    shape, strides, _ = out
    values: abi.Values = {
        **abi.strides_of("out", strides),
        "batch": call.batch,
        "heads_q": shape[-2],
        "seqlen_q": shape[-3],
        "head_dim_v": shape[-1],
        "num_splits": num_splits,
    }
    pointers = {name: name for name in ("out", "partial_out", "partial_lse")}
    for name in ("cu_seqlens_q", "seqused_q"):
        if getattr(call, name) is not None:
            pointers[name] = name
    if lse is not None:
        pointers["lse"] = "lse"
        values |= {"lse_batch": 0 if packed else lse[1][0], "lse_head": lse[1][-2]}
    plan = launch.plan("combine", calls.DTYPE_CODES[str(out[2]).removeprefix("torch.")])
    of_block = rows_of(num_splits, call.v.shape[-1])
    if chunks:
        plan, of_block = chunked(plan), THREADS // threads_of_part(call.v.shape[-1])
        if call.sinks is not None:
            pointers["sinks"], values["use_sinks"] = "sinks", 1
    blocks = -(-count(shape[:-1]) // of_block)
    program.add(plan, blocks, THREADS, Params(values, pointers))


def rows_of(num_splits: int, dim: int) -> int:
    """Return how many rows, each of one head, a workgroup combines; see
    ``kernels/common/combine.h``."""
    of_part = threads_of_part(dim)
    return THREADS // of_part // min(THREADS // of_part, _fours(num_splits))


def threads_of_part(dim: int) -> int:
    """Return the threads for one split's output of a row."""
    return _fours(dim)


def _fours(count: int) -> int:
    """Return the number of groups of four elements, rounded up to a power of two."""
    return 1 << (-(-count // 4) - 1).bit_length()
