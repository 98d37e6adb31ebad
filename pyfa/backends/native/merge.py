"""``pyfa.merge`` as one launch of ``combine``, with the caller's tensors as its splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ... import abi
from ...plan import Plan
from ..base import Run
from ..common.program import Params, Program, like, run_of
from .combine import THREADS, rows_of, threads_of_part
from .launch import Launcher

MOST_PARTS = 4  # kAtOnce in kernels/common/combine.h
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 3}
_MOST_STRIDE = 2**31


def takes(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor | None
) -> bool:
    """Return whether the kernel can merge these parts. ``out`` must not share memory with a
    part."""
    given = (*outs, *lses) if out is None else (*outs, *lses, out)
    return (
        2 <= len(outs) <= MOST_PARTS
        and outs[0].numel() > 0
        and threads_of_part(outs[0].shape[-1]) <= THREADS
        and all(stride < _MOST_STRIDE for x in given for stride in x.stride())
        and not any(x.is_neg() for x in given)
        and (out is None or out.stride(-1) == 1)
    )


def plan_of(launch: Launcher, dtype: torch.dtype) -> Plan:
    """Return the plan of ``combine`` for parts of any dtype, with an output of ``dtype``."""
    plan = launch.plan("combine", _CODES[dtype])
    more = {**dict(plan.constants), "MERGED": 1, "MOD_CAPTURED": 2 * MOST_PARTS}
    return replace(plan, constants=tuple(sorted(more.items())))


def bind(
    launch: Launcher,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | torch.dtype,
    with_lse: bool,
) -> Run:
    """Bind a launch for parts with these shapes, strides and dtypes. The inputs of the launch are
    the output and LSE of each part in turn, followed by ``out`` if that is a tensor. The launch
    returns the output if it allocated one, and the LSE if ``with_lse``."""
    names = [f"captured{number}" for number in range(2 * len(outs))]
    tensors = [x for pair in zip(outs, lses, strict=True) for x in pair]
    shape, packed = outs[0].shape, outs[0].dim() == 3
    values: abi.Values = {
        "batch": 1 if packed else shape[0],
        "heads_q": shape[-2],
        "seqlen_q": shape[-3],
        "head_dim_v": shape[-1],
        "num_splits": len(outs),
    }
    for number, x in enumerate(tensors):
        strides = (0, *x.stride()) if packed else x.stride()
        for dim, stride in enumerate(strides):
            values[f"captured{number}_stride{dim}"] = stride
        values[f"captured{number}_size0"] = _CODES[x.dtype]
    pointers = {name: name for name in (*names, "out")}
    if isinstance(out, torch.Tensor):
        names.append("out")
        tensors.append(out)
        dtype = out.dtype
        values |= abi.strides_of("out", out.stride())
    program = Program(names, outs[0])
    if not isinstance(out, torch.Tensor):
        made, dtype = like(shape, out), out
        program.make("out", made)
        values |= abi.strides_of("out", made[1])
    if with_lse:
        sums = like(lses[0].shape, torch.float32)
        program.make("lse", sums)
        pointers["lse"] = "lse"
        values |= {"lse_batch": 0 if packed else sums[1][0], "lse_head": sums[1][-2]}
    rows = torch.Size(shape[:-1]).numel()
    blocks = -(-rows // rows_of(len(outs), shape[-1]))
    program.add(plan_of(launch, dtype), blocks, THREADS, Params(values, pointers))
    with launch.on(outs[0].device):
        return run_of(program, launch.launch_of(program, tuple(tensors)), launch.empty, None)(None)
