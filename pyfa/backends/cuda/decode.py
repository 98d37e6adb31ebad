"""Decode: tiles, the number of parts, and the launch. What it takes: ``native/decode.py``."""

from __future__ import annotations

import functools
import math
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
from . import forward_sm90_fp8, plans

FEATURES = common.FEATURES | {"fp8"}
KERNEL = "cuda/sm80/attn_decode.cu"
LINES = 8  # of a matrix product: a line is a query row of one head
MOST_PARTS = 512


class Tiles(NamedTuple):
    """A warp has ``products`` of 8 lines; ``team`` warps share keys and differ in lines.

    Each team of a block's ``warps`` has ``stages`` slots of 16 keys on their way.
    """

    products: int
    team: int
    warps: int
    stages: int


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int, float8: bool) -> int:
    """Of a block: page offsets, rows' states, and the rings, where the teams' sums meet; of float8
    scales of rows, and of as many keys as are on their way."""
    teams, rows = tiles.warps // tiles.team, LINES * tiles.products * tiles.team
    ring = teams * tiles.stages * GROUP * (1 if float8 else 2) * (head_dim + head_dim_v)
    sums = teams * rows * (head_dim_v + 4) * 4
    states = tiles.warps * 512 + rows * 12 + 2 * teams * rows * 4
    scales = rows * 4 + 8 + tiles.warps * (tiles.stages // 2 + 1) * 256 if float8 else 0
    return _in_lines(states) + _in_lines(max(ring, sums)) + scales


def _in_lines(size: int) -> int:
    return -(-size // 128) * 128


# (head_dim, head_dim_v) to tiles of blocks of 8, 16, 32 and 64 lines. Heads of 128 are measured;
# the others have about as many bytes on their way, of what registers and shared memory hold.
_LARGE: dict[tuple[int, int], tuple[Tiles, ...]] = {
    (64, 64): (
        Tiles(1, 1, 8, 3),
        Tiles(2, 1, 8, 3),
        Tiles(4, 1, 8, 3),
        Tiles(4, 2, 8, 6),
    ),
    (96, 96): (
        Tiles(1, 1, 8, 2),
        Tiles(2, 1, 8, 2),
        Tiles(4, 1, 8, 2),
        Tiles(4, 2, 8, 5),
    ),
    (128, 128): (
        Tiles(1, 1, 8, 2),
        Tiles(2, 1, 8, 2),
        Tiles(4, 1, 8, 2),
        Tiles(4, 2, 8, 4),
    ),
    (192, 128): (
        Tiles(1, 1, 6, 2),
        Tiles(2, 1, 6, 2),
        Tiles(2, 2, 8, 3),
        Tiles(2, 4, 8, 6),
    ),
    (192, 192): (
        Tiles(1, 1, 6, 2),
        Tiles(2, 1, 6, 2),
        Tiles(2, 2, 8, 3),
        Tiles(2, 4, 8, 6),
    ),
    (256, 256): (
        Tiles(1, 1, 4, 2),
        Tiles(2, 1, 4, 2),
        Tiles(2, 2, 8, 2),
        Tiles(2, 4, 8, 4),
    ),
}
_SMALL: dict[tuple[int, int], tuple[Tiles, ...]] = {
    (64, 64): (
        Tiles(1, 1, 8, 2),
        Tiles(2, 1, 8, 2),
        Tiles(4, 1, 8, 2),
        Tiles(4, 2, 8, 4),
    ),
    (96, 96): (
        Tiles(1, 1, 6, 2),
        Tiles(2, 1, 6, 2),
        Tiles(4, 1, 6, 2),
        Tiles(4, 2, 4, 5),
    ),
    (128, 128): (
        Tiles(1, 1, 4, 2),
        Tiles(2, 1, 4, 2),
        Tiles(4, 1, 4, 2),
        Tiles(2, 4, 8, 5),
    ),
    (192, 128): (
        Tiles(1, 1, 4, 2),
        Tiles(2, 1, 4, 2),
        Tiles(2, 2, 4, 4),
        Tiles(2, 4, 4, 8),
    ),
    (192, 192): (
        Tiles(1, 1, 3, 2),
        Tiles(2, 1, 3, 2),
        Tiles(2, 2, 4, 3),
        Tiles(2, 4, 4, 6),
    ),
    (256, 256): (
        Tiles(1, 1, 2, 2),
        Tiles(2, 1, 2, 2),
        Tiles(2, 2, 4, 2),
        Tiles(2, 4, 4, 5),
    ),
}
# Of float8 keys and values: as many bytes on their way, which are twice the keys. Heads of 96 and
# 192 run in the next tiles, whose copies leave out what is not there. At 128, 4 products a warp
# would spill.
_LARGE_FLOAT8: dict[tuple[int, int], tuple[Tiles, ...]] = {
    (64, 64): (
        Tiles(1, 1, 8, 6),
        Tiles(2, 1, 8, 6),
        Tiles(4, 1, 8, 6),
        Tiles(4, 2, 8, 12),
    ),
    (128, 128): (
        Tiles(1, 1, 8, 4),
        Tiles(2, 1, 8, 4),
        Tiles(2, 2, 8, 8),
        Tiles(2, 4, 8, 16),
    ),
    (256, 256): (
        Tiles(1, 1, 8, 3),
        Tiles(2, 1, 6, 4),
        Tiles(2, 2, 8, 4),
        Tiles(2, 4, 8, 8),
    ),
}
_SMALL_FLOAT8: dict[tuple[int, int], tuple[Tiles, ...]] = {
    (64, 64): (
        Tiles(1, 1, 8, 4),
        Tiles(2, 1, 8, 4),
        Tiles(4, 1, 8, 4),
        Tiles(4, 2, 8, 8),
    ),
    (128, 128): (
        Tiles(1, 1, 4, 4),
        Tiles(2, 1, 4, 4),
        Tiles(2, 2, 8, 4),
        Tiles(2, 4, 8, 8),
    ),
    (256, 256): (
        Tiles(1, 1, 4, 2),
        Tiles(2, 1, 4, 2),
        Tiles(2, 2, 4, 4),
        Tiles(2, 4, 4, 8),
    ),
}
# By how much shared memory a block may have: 163 KB and more, or 99. Of 16-bit keys, and of float8.
TILES = {
    "sm_80": (_LARGE, _LARGE_FLOAT8),
    "sm_86": (_SMALL, _SMALL_FLOAT8),
    "sm_89": (_SMALL, _SMALL_FLOAT8),
    "sm_90": (_LARGE, _LARGE_FLOAT8),
    "sm_100": (_LARGE, _LARGE_FLOAT8),
    "sm_120": (_SMALL, _SMALL_FLOAT8),
}


def takes(problem: Problem) -> bool:
    """Whether decode rather than forward is the plan."""
    return common.takes(problem, FEATURES) and not _cannot_widen(problem)


def why_not(problem: Problem) -> list[str]:
    """Why a few rows over float8 keys, which no forward here takes, are not decode's either."""
    reasons = common.why_not(problem)
    if _cannot_widen(problem):
        reasons.append(f"{problem.arch} has no instruction that widens float8 (sm_89 has)")
    return reasons + forward_sm90_fp8.lacking(problem.features - FEATURES)


def _cannot_widen(problem: Problem) -> bool:
    return "fp8" in problem.features and not plans.widens_float8(problem.arch)


def plan(problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    float8 = "fp8" in problem.features
    by_pair = TILES[plans.tiles_of(problem.arch)][float8]
    pair = calls.bucket_of(by_pair, problem.head_dim, problem.head_dim_v)
    fitting = (tiles for tiles in by_pair[pair] if _rows(tiles) >= lines(problem))
    tiles = next(fitting, by_pair[pair][-1])
    dtype = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
    return _plan(pair, dtype, tiles, float8, plans.notes_of(problem, pair))


def _rows(tiles: Tiles) -> int:
    """Lines of a block."""
    return LINES * tiles.products * tiles.team


def _plan(
    pair: tuple[int, int], dtype: int, tiles: Tiles, float8: bool, notes: Sequence[str] = ()
) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SHARED_BYTES": shared_bytes(tiles, *pair, float8),
        "STAGES": tiles.stages,
        "TEAM": tiles.team,
        "TILES": tiles.products,
        "WARPS": tiles.warps,
    }
    if float8:
        constants["KEY_DTYPE"] = forward_sm90_fp8.CODE
    return Plan("cuda", KERNEL, tuple(sorted(constants.items())), tuple(notes))


def all_plans(arch: str) -> list[Plan]:
    return [
        _plan(pair, dtype, tiles, float8)
        for float8 in ((False, True) if plans.widens_float8(arch) else (False,))
        for pair, sizes in TILES[arch][float8].items()
        for tiles in sizes
        for dtype in calls.DTYPE_CODES.values()
    ]


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """``Backend.bind``."""
    constants = {name: int(value) for name, value in plan.constants}
    of_block = LINES * constants["TILES"] * constants["TEAM"]

    def grid_of(call: Call) -> attend.Grid:
        heads_k = call.k.shape[-2]
        rows = call.max_seqlen_q * call.q.shape[-2] // heads_k
        blocks = -(-rows // of_block) * heads_k * call.batch
        units = launch.device_at(call.q.device).units
        key_bytes = call.k.element_size() * (call.k.shape[-1] + call.v.shape[-1])
        parts = forced_parts(call) or splits_for(blocks, keys_seen(call), units, key_bytes)
        return attend.Grid(blocks, plans.threads_of(plan), parts)

    return attend.bind(launch, plan, call, append, with_lse, common.readable, grid_of)


@functools.lru_cache(4096)
def splits_for(blocks: int, keys: int, units: int, key_bytes: int) -> int:
    """Into how many parts ``keys`` go so that ``blocks`` take the least time on ``units`` SMs.

    Blocks run in rounds of one an SM. Time counts in keys that one of ``units`` busy SMs reads,
    ``key_bytes`` of a key and its value: a round costs its start and end, 100 KB, and its keys;
    fewer blocks than SMs read faster each, up to 1.8 times (30 % of the time is latency); combining
    costs 100 KB and 1 KB a part. Fitted to times on an H200 (kernels/cuda/README.md).
    """
    groups = max(1, -(-keys // GROUP))
    units = max(1, units)
    start = 102400 / key_bytes
    best, least = 1, math.inf
    for parts in range(1, max(1, min(MOST_PARTS, groups // 4)) + 1):
        share = -(-groups // parts)
        full, rest = divmod(blocks * -(-groups // share), units)
        time = full * (start + share * GROUP)
        if parts > 1:
            time += start + parts * 1024 / key_bytes
        if rest:
            time += start + share * GROUP * math.sqrt(0.3 + 0.7 * (rest / units) ** 2)
        if time < least:
            best, least = parts, time
    return best
