"""Decode: what it takes beyond ``native/decode.py``, tiles, the number of parts, the launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...plan import Plan
from ...problem import Append, Call, Problem
from ..base import Run
from ..common import calls
from ..native import attend
from ..native import decode as common
from ..native.decode import GROUP, forced_parts, keys_seen, lines
from ..native.launch import Launcher
from ..native.plans import notes_of
from .forward import FLOAT8_CODE

FEATURES = common.FEATURES | {"fp8"}
KERNEL = "hip/attn_decode.hip"
THREADS = 256
COLUMNS = 16  # lines of a matrix product: a line is a query row of one head


class Tiles(NamedTuple):
    """Groups of keys on their way to a wavefront, and how many wavefronts a SIMD holds."""

    stages: int
    occupancy: int


# (head_dim, head_dim_v) to products of 16 lines to tiles. The stages are what 256 registers hold,
# or 512 where 256 would leave less than 32 KB on their way to a compute unit's one workgroup: at
# 5.3 TB/s and a latency of 1 to 2 µs an MI300X has 17 to 35 KB on their way to each.
TILES = {
    (64, 64): {1: Tiles(4, 2), 2: Tiles(4, 2), 4: Tiles(4, 1)},
    (96, 96): {1: Tiles(4, 2), 2: Tiles(3, 2), 4: Tiles(3, 1)},
    (128, 128): {1: Tiles(4, 2), 2: Tiles(3, 1), 4: Tiles(2, 1)},
    (192, 128): {1: Tiles(2, 2), 2: Tiles(3, 1)},
    (192, 192): {1: Tiles(2, 2), 2: Tiles(2, 1)},
    (256, 256): {1: Tiles(2, 1), 2: Tiles(2, 1)},
}
# Of float8 keys and values, which take half the bytes and registers: with twice the stages at 64
# there are 48 KB and more on their way to each workgroup.
FLOAT8_TILES = {
    (64, 64): {1: Tiles(8, 2), 2: Tiles(8, 2), 4: Tiles(8, 1)},
    (96, 96): {1: Tiles(4, 2), 2: Tiles(4, 2), 4: Tiles(4, 1)},
    (128, 128): {1: Tiles(4, 2), 2: Tiles(4, 1), 4: Tiles(4, 1)},
    (192, 128): {1: Tiles(4, 2), 2: Tiles(4, 1)},
    (192, 192): {1: Tiles(4, 2), 2: Tiles(4, 1)},
    (256, 256): {1: Tiles(4, 1), 2: Tiles(4, 1)},
}
MOST_SPLITS = 512


def takes(problem: Problem) -> bool:
    """Whether decode rather than forward is the plan.

    It is of all 16-bit queries over float8 keys: the forward has one format for both.
    """
    if problem.dtype_k:
        return problem.features <= FEATURES
    return common.takes(problem, FEATURES)


def plan(backend: str, problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    sizes = TILES[pair]
    columns = next((n for n in sizes if n * COLUMNS >= lines(problem)), max(sizes))
    dtype = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
    float8 = "fp8" in problem.features
    return _plan(backend, pair, dtype, columns, float8, notes_of(problem, pair))


def _plan(
    backend: str,
    pair: tuple[int, int],
    dtype: int,
    columns: int,
    float8: bool,
    notes: Sequence[str] = (),
) -> Plan:
    stages, occupancy = (FLOAT8_TILES if float8 else TILES)[pair][columns]
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "OCCUPANCY": occupancy,
        "STAGES": stages,
        "TILES": columns,
    }
    if float8:
        constants["KEY_DTYPE"] = FLOAT8_CODE
    return Plan(backend, KERNEL, tuple(sorted(constants.items())), tuple(notes))


def all_plans(backend: str) -> list[Plan]:
    return [
        _plan(backend, pair, dtype, columns, float8)
        for float8 in (False, True)
        for pair, sizes in TILES.items()
        for columns in sizes
        for dtype in calls.DTYPE_CODES.values()
    ]


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """``Backend.bind``."""
    columns = int(dict(plan.constants)["TILES"]) * COLUMNS

    def grid_of(call: Call) -> attend.Grid:
        heads_k = call.k.shape[-2]
        rows = call.max_seqlen_q * call.q.shape[-2] // heads_k
        blocks = -(-rows // columns) * heads_k * call.batch
        units = launch.device_at(call.q.device).units
        return attend.Grid(blocks, THREADS, _splits(call, blocks, units))

    return attend.bind(launch, plan, call, append, with_lse, common.readable, grid_of)


def _splits(call: Call, workgroups: int, units: int) -> int:
    """Into how many parts the keys of ``call`` go."""
    return forced_parts(call) or splits_for(workgroups, keys_seen(call), units)


@functools.lru_cache(4096)
def splits_for(workgroups: int, keys: int, units: int) -> int:
    """Into how many parts to cut ``keys`` so that ``workgroups`` busy a device of ``units`` CUs.

    The fewest parts that busy 85 % of the CUs or nine tenths of what the best choice does, since
    each is more to combine. No part is shorter than 64 keys, one step of each wavefront, and no
    more workgroups are made than two for each CU.
    """
    groups = -(-keys // GROUP)
    units = max(1, units)
    most = max(1, min(MOST_SPLITS, -(-groups // 4), 2 * units // max(1, workgroups)))
    busy = {}
    for parts in range(1, most + 1):
        share = -(-groups // parts)
        total = workgroups * -(-groups // share) if groups else workgroups
        rounds = total / units
        busy[parts] = rounds / -(-total // units)
    best = max(busy.values())
    return next(parts for parts, part in busy.items() if part >= 0.85 or part >= 0.9 * best)
