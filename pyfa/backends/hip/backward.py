"""Backward: delta of every row, then one kernel twice, owning keys (dK, dV) and owning rows (dQ).

No atomics: the same bits on every run, for two more matrix products a tile than one pass needs.
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
from . import plans

SUM_ROWS = 16  # rows of a workgroup of row_sums.hip
KERNEL = "hip/attn_bwd.hip"
KEYS, ROWS = 0, 1
THREADS = 256
WAVES = THREADS // 64


class Columns(NamedTuple):
    """What a wavefront owns, in 32 keys or rows, and wavefronts on a SIMD."""

    columns: int
    per_simd: int


# By head dims: of plain scores owning keys and rows, then of general ones. Two columns read LDS
# half as often; two wavefronts on a SIMD hide each other's vector instructions. The rest spills.
TILES: dict[tuple[int, int], tuple[Columns, Columns, Columns, Columns]] = {
    (64, 64): (Columns(1, 2), Columns(1, 2), Columns(1, 1), Columns(1, 2)),
    (96, 96): (Columns(2, 1), Columns(1, 2), Columns(1, 1), Columns(1, 2)),
    (128, 128): (Columns(2, 1), Columns(1, 2), Columns(1, 1), Columns(1, 1)),
    (192, 128): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
    (192, 192): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
    (256, 256): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
}


def plans_of(
    backend: str, pair: tuple[int, int], dtype: int, general: bool
) -> tuple[Plan, Plan, Plan]:
    """row_sums, and attn_bwd owning keys and owning rows."""
    sums = plans.plan_of(backend, "row_sums", dtype)
    keys, rows = (_plan(backend, pair, dtype, owner, int(general)) for owner in (KEYS, ROWS))
    return sums, keys, rows


def plans_for(problem: Problem) -> tuple[Plan, Plan, Plan]:
    """The kernels of a problem's backward."""
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    dtype = calls.DTYPE_CODES[problem.dtype]
    return plans_of("hip", pair, dtype, is_general_problem(problem))


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
    }
    return Plan(backend, KERNEL, tuple(constants.items()))


def all_plans(backend: str) -> list[Plan]:
    found = [
        plan
        for pair in TILES
        for dtype in calls.DTYPE_CODES.values()
        for general in (False, True)
        for plan in plans_of(backend, pair, dtype, general)
    ]
    return list(dict.fromkeys(found))


def bind(
    launch: Launcher,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> RunBackward:
    """``Backend.bind_backward``."""
    pair = calls.bucket_of(TILES, call.q.shape[-1], call.v.shape[-1])
    sums, keys, rows = plans_of("hip", pair, calls.dtype_code(call.q), is_general(call))

    def kernels_of(call: Call) -> Kernels:
        heads, heads_k = call.q.shape[-2], call.k.shape[-2]
        return Kernels(
            [
                Kernel(sums, -(-call.max_seqlen_q // SUM_ROWS) * heads, THREADS),
                Kernel(keys, -(-call.max_seqlen_k // _owned(keys)) * heads_k, THREADS),
                Kernel(rows, -(-call.max_seqlen_q // _owned(rows)) * heads, THREADS),
            ]
        )

    return common.bind(launch, call, out, lse, dout, dlse, kernels_of)


def _owned(plan: Plan) -> int:
    """Keys or rows of a workgroup."""
    return WAVES * 32 * int(dict(plan.constants)["COLUMNS"])
