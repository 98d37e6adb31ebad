"""Backward: delta of every row, then the gradients, in one pass over the scores or in two.

One pass makes five matrix products a tile and adds dQ up in float32 by atomics, in any order. Two
passes, owning keys (dK, dV) and owning rows (dQ), make seven, and the same bits on every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...plan import Plan
from ...problem import Call, Problem
from ..base import RunBackward
from ..common import backward as common
from ..common import calls
from ..common.backward import Kernel, Kernels, is_general, is_general_problem
from ..common.launch import Launcher
from ..common.program import like

SUM_ROWS = 16  # rows of a workgroup of row_sums.hip
KERNEL = "hip/attn_bwd.hip"
ONE_PASS = "hip/attn_bwd_onepass.hip"
BIAS_GRAD = "hip/bias_grad.hip"
BIAS_TILE = 64, 128  # rows and keys of its workgroups
CONVERT_ROWS = 64  # rows of a workgroup of dq_convert.hip
KEYS, ROWS = 0, 1
THREADS = 256
WAVES = THREADS // 64


class Columns(NamedTuple):
    """What a wavefront owns, in 32 keys or rows, and wavefronts on a SIMD."""

    columns: int
    per_simd: int
    slots: int = 0


# By head dims: of plain scores owning keys and rows, then of general ones. Two columns read LDS
# half as often; two wavefronts on a SIMD hide each other's vector instructions. The rest spills.
# Slots (kernels/hip/bwd_slots.h) keep the matrix unit busy where the vector unit has less to do
# than it; with score terms it has more, and fragments read ahead spilled. Owning 256 elements of
# keys and values there are no registers to read ahead: 0.25 of the matrix unit, without slots 0.33.
TILES: dict[tuple[int, int], tuple[Columns, Columns, Columns, Columns]] = {
    (64, 64): (Columns(1, 2, 1), Columns(1, 2, 1), Columns(1, 1), Columns(1, 2)),
    (96, 96): (Columns(1, 1, 1), Columns(1, 2, 1), Columns(1, 1), Columns(1, 2)),
    (128, 128): (Columns(1, 1, 1), Columns(1, 2, 1), Columns(1, 1), Columns(1, 1)),
    (192, 128): (Columns(1, 1, 1), Columns(1, 1, 1), Columns(1, 1), Columns(1, 1)),
    (192, 192): (Columns(1, 1, 1), Columns(1, 1, 1), Columns(1, 1), Columns(1, 1)),
    (256, 256): (Columns(1, 1), Columns(1, 1, 1), Columns(1, 1), Columns(1, 1)),
}


# One pass over plain scores, by head dims: 16s of keys that a wavefront owns, in registers with
# their gradients (7 head_dim / 8 registers for each). Which leaves room for what a step needs, by
# the figures in kernels/README.md.
ONE_PASS_TILES: dict[tuple[int, int], int] = {
    (64, 64): 4,
    (96, 96): 4,
    (128, 128): 3,
}


def _why_two_passes(pair: tuple[int, int], general: bool, deterministic: bool) -> str | None:
    """Why backward takes two passes over the scores; None where it takes one."""
    if deterministic:
        return "deterministic: atomics would add dQ in any order"
    if general:
        return "the one-pass kernel has no score terms, sinks or dropout"
    if pair not in ONE_PASS_TILES:
        return "wider than 128, the one-pass kernel's tiles do not fit 64 KB of LDS"
    return None


def notes_of(problem: Problem) -> list[str]:
    """What ``explain`` adds to the plan of a problem with a backward."""
    if "backward" not in problem.features:
        return []
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    deterministic = "deterministic" in problem.features
    why = _why_two_passes(pair, is_general_problem(problem), deterministic)
    if why is None:
        notes = ["backward in one pass: five products a tile, dQ added in float32 by atomics"]
    else:
        notes = [f"backward in two passes, seven products a tile: {why}"]
    if "bias_grad" in problem.features:
        notes.append("the gradient of bias in a pass of its own, two products a tile, no atomics")
    return notes


def plans_of(
    backend: str, pair: tuple[int, int], dtype: int, general: bool, deterministic: bool
) -> tuple[Plan, Plan, Plan]:
    """row_sums, then the two kernels that follow.

    In one pass that is attn_bwd_onepass, and dq_convert behind it; in two attn_bwd twice, owning
    keys and owning rows.
    """
    if _why_two_passes(pair, general, deterministic):
        sums = _of_rows(backend, "row_sums", dtype, 0)
        keys, rows = (_plan(backend, pair, dtype, owner, int(general)) for owner in (KEYS, ROWS))
        return sums, keys, rows
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "TILES": ONE_PASS_TILES[pair],
    }
    return (
        _of_rows(backend, "row_sums", dtype, pair[0]),
        Plan(backend, ONE_PASS, tuple(constants.items())),
        _of_rows(backend, "dq_convert", dtype, pair[0]),
    )


def _of_rows(backend: str, kernel: str, dtype: int, head_dim: int) -> Plan:
    return Plan(backend, f"hip/{kernel}.hip", (("DTYPE", dtype), ("HEAD_DIM", head_dim)))


def plans_for(problem: Problem) -> tuple[Plan, Plan, Plan]:
    """The kernels of a problem's backward."""
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    dtype = calls.DTYPE_CODES[problem.dtype]
    deterministic = "deterministic" in problem.features
    return plans_of("hip", pair, dtype, is_general_problem(problem), deterministic)


def bias_plan(backend: str, pair: tuple[int, int], dtype: int) -> Plan:
    """What makes the gradient of the bias, behind the others."""
    constants = {"DTYPE": dtype, "HEAD_DIM": pair[0], "HEAD_DIM_V": pair[1]}
    return Plan(backend, BIAS_GRAD, tuple(constants.items()))


def bias_plan_for(problem: Problem) -> Plan:
    """The same of a problem."""
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    return bias_plan("hip", pair, calls.DTYPE_CODES[problem.dtype])


def _plan(backend: str, pair: tuple[int, int], dtype: int, owner: int, general: int) -> Plan:
    tiles = TILES[pair][2 * general + owner]
    constants = {
        "COLUMNS": tiles.columns,
        "DTYPE": dtype,
        "GENERAL": general,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "OWNS": owner,
        "PER_SIMD": tiles.per_simd,
        "SLOTS": tiles.slots,
    }
    return Plan(backend, KERNEL, tuple(constants.items()))


def all_plans(backend: str) -> list[Plan]:
    found = [
        plan
        for pair in TILES
        for dtype in calls.DTYPE_CODES.values()
        for general in (False, True)
        for deterministic in (False, True)
        for plan in plans_of(backend, pair, dtype, general, deterministic)
    ]
    codes = calls.DTYPE_CODES.values()
    found += [bias_plan(backend, pair, dtype) for pair in TILES for dtype in codes]
    return list(dict.fromkeys(found))


def bind(
    launch: Launcher,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool = False,
) -> RunBackward:
    """``Backend.bind_backward``."""
    pair = calls.bucket_of(TILES, call.q.shape[-1], call.v.shape[-1])
    dtype = calls.dtype_code(call.q)
    chain = plans_of("hip", pair, dtype, is_general(call), call.deterministic)

    def kernels_of(call: Call) -> Kernels:
        kernels = []
        for kernel in chain:
            rows, keys = owned(kernel)
            if rows:
                blocks = -(-call.max_seqlen_q // rows) * call.q.shape[-2]
            else:
                blocks = -(-call.max_seqlen_k // keys) * call.k.shape[-2]
            kernels.append(Kernel(kernel, blocks, THREADS))
        of_bias = None
        if bias_grad and call.bias is not None:
            of_bias = Kernel(bias_plan("hip", pair, dtype), _bias_blocks(call.bias), THREADS)
        if chain[1].kernel != ONE_PASS:
            return Kernels(kernels, bias=of_bias)
        # row_sums begins it with 0.
        sums = like((sums_of(call) * pair[0],), torch.float32)
        return Kernels(kernels, {"dq_accum": sums}, of_bias)

    return common.bind(launch, call, out, lse, dout, dlse, kernels_of, bias_grad)


def _bias_blocks(bias: torch.Tensor) -> int:
    """Workgroups of bias_grad.hip: one for all rows or keys where there is one of them."""
    batches, heads, rows, keys = bias.shape
    return batches * heads * -(-rows // BIAS_TILE[0]) * -(-keys // BIAS_TILE[1])


def sums_of(call: Call) -> int:
    """Rows of all heads that dQ's float32 sums have: each sequence begins at a tile of its own."""
    if call.cu_seqlens_q is not None:
        tiles = call.q.shape[0] // SUM_ROWS + call.batch
    else:
        tiles = -(-call.max_seqlen_q // SUM_ROWS) * call.batch
    return tiles * SUM_ROWS * call.q.shape[-2]


def owned(plan: Plan) -> tuple[int, int]:
    """Rows and keys of a workgroup, one of them 0."""
    constants = {name: int(value) for name, value in plan.constants}
    if plan.kernel == ONE_PASS:
        return 0, WAVES * 16 * constants["TILES"]
    if plan.kernel == KERNEL:
        columns = WAVES * 32 * constants["COLUMNS"]
        return (0, columns) if constants["OWNS"] == KEYS else (columns, 0)
    return (CONVERT_ROWS if plan.kernel.endswith("dq_convert.hip") else SUM_ROWS), 0
