"""Forward: sm80's tiles for every pair of head dims, the grid, and the launch, also of sm90's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ... import device
from ...plan import Plan
from ...problem import FEATURES as FEATURE_NAMES
from ...problem import Append, Call, Problem
from ..base import Run
from ..common import calls
from ..common.calls import DROPOUT, GENERAL, PLAIN
from ..native import attend
from ..native.launch import Launcher
from . import forward_sm90, forward_sm90_fp8, plans

KERNEL = "cuda/sm80/attn_fwd.cu"
FEATURES = frozenset(FEATURE_NAMES) - {"bias_grad", "backward", "dlse", "deterministic"}


class Tiles(NamedTuple):
    """A warp owns ``rows`` query rows, and K and V pass in tiles of ``block_k`` keys, two of each.

    ``held``: the queries stay in registers. ``blocks`` are to fit on an SM.
    """

    rows: int
    warps: int
    block_k: int
    held: bool
    blocks: int


STAGES = 2  # places for a tile of K and V


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int, paged: bool) -> int:
    """Of a block: the stages, the queries where they do not pass through them, warps' notes."""
    stage = tiles.block_k * (head_dim + head_dim_v) * 2
    queries = tiles.rows * tiles.warps * head_dim * 2
    passing = tiles.held and queries <= stage
    notes = tiles.warps * (80 if paged else 64)
    return STAGES * stage + (0 if passing else queries) + notes


PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# By how much shared memory a block may have: 227, 163 or 99 KB.
_LARGE, _MIDDLE, _SMALL = range(3)
_SIZES = {
    "sm_80": _MIDDLE,
    "sm_86": _SMALL,
    "sm_89": _SMALL,
    "sm_90": _LARGE,
    "sm_100": _LARGE,
    "sm_120": _SMALL,
}
SMALL_GRID_PAIRS = ((64, 64), (128, 128))


def small_grid(arch: str, pair: tuple[int, int]) -> Tiles:
    """Half the rows, for where the usual tiles leave SMs without a block. Plain and dense only."""
    one = _SIZES[arch] == _SMALL and pair == (128, 128)
    return Tiles(16, 4, 64, True, 1 if one else 2)


# What ptxas spills of the usual tiles on archs that are compiled for and were never run on.
_WITHOUT_SPILLS = {
    ("sm_100", (128, 128), PLAIN): Tiles(32, 4, 48, False, 2),
    ("sm_100", (256, 256), DROPOUT): Tiles(16, 8, 32, False, 1),
    ("sm_120", (96, 96), PLAIN): Tiles(32, 4, 32, False, 2),
}


def tiles_for(arch: str, pair: tuple[int, int], score: int, paged: bool) -> Tiles:
    """Of a grid that fills the device.

    A warp of 32 rows reads K and V from shared memory half as often as two of 16 do: at a head_dim
    of 128 1.22 times as fast. Plain tiles of 64, 128 and 256 are the fastest on an H200 of those in
    kernels/cuda/README.md; the others are the first that spill nothing and fit.
    """
    if (arch, pair, score) in _WITHOUT_SPILLS:
        return _WITHOUT_SPILLS[arch, pair, score]
    size = _SIZES[arch]
    if pair == (64, 64):
        if score == DROPOUT:
            return Tiles(32, 4, 32, True, 2)
        return Tiles(32, 4, 64, not (paged and score == GENERAL), 2)
    if pair == (96, 96):
        if score != PLAIN:
            return Tiles(32, 4, 32, False, 2)
        return Tiles(32, 4, 64, size == _SMALL, 2)
    if pair == (128, 128):
        if size == _SMALL or score == DROPOUT:
            return Tiles(16, 8, 64, True, 1)
        return Tiles(32, 4, 64 if size == _LARGE and score == PLAIN else 48, False, 2)
    if pair == (192, 128) and size == _LARGE and score != DROPOUT:
        return Tiles(32, 4, 32, False, 2)
    if pair[0] == 192:
        return Tiles(16, 8, 32 if size == _SMALL else 64, False, 1)
    return (
        Tiles(16, 8, 64, False, 1),
        Tiles(16, 8, 32, False, 1),
        Tiles(16, 4, 32, False, 1),
    )[size]


def plan(problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    if "fp8" in problem.features:
        return forward_sm90_fp8.plan(problem)
    arch, left = plans.tiles_of(problem.arch), []
    if forward_sm90.runs_on(problem.arch):
        left = forward_sm90.why_not(problem)
        if not left:
            return forward_sm90.plan(problem)
    pair = calls.bucket_of(PAIRS, problem.head_dim, problem.head_dim_v)
    dtype, paged = calls.DTYPE_CODES[problem.dtype], "paged" in problem.features
    score = calls.score_class(problem)
    if paged:
        score = max(score, GENERAL)
    tiles = tiles_for(arch, pair, score, paged)
    blocks = -(-problem.seqlen_q // (tiles.rows * tiles.warps)) * problem.heads_q * problem.batch
    alone = score == PLAIN and pair in SMALL_GRID_PAIRS
    if alone and blocks < tiles.blocks * problem.device.units:
        tiles = small_grid(arch, pair)
    return _plan(tiles, pair, dtype, score, paged, left + plans.notes_of(problem, pair))


def _plan(
    tiles: Tiles,
    pair: tuple[int, int],
    dtype: int,
    score: int,
    paged: bool,
    notes: Sequence[str] = (),
) -> Plan:
    constants = {
        "BLOCKS": tiles.blocks,
        "BLOCK_K": tiles.block_k,
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PAGED": int(paged),
        "Q_IN_REGISTERS": int(tiles.held),
        "ROWS": tiles.rows,
        "SCORE": score,
        "SHARED_BYTES": shared_bytes(tiles, *pair, paged),
        "STAGES": STAGES,
        "WARPS": tiles.warps,
    }
    return Plan("cuda", KERNEL, tuple(constants.items()), tuple(notes))


def all_plans(arch: str) -> list[Plan]:
    own = forward_sm90.runs_on(arch)
    found = forward_sm90.all_plans() + forward_sm90_fp8.all_plans() if own else []
    for dtype in calls.DTYPE_CODES.values():
        for pair in PAIRS:
            for paged, score in ((False, PLAIN), *product((False, True), (GENERAL, DROPOUT))):
                if own and not paged and score == PLAIN:
                    continue
                tiles = tiles_for(arch, pair, score, paged)
                found.append(_plan(tiles, pair, dtype, score, paged))
        if own:
            continue
        found += [
            _plan(small_grid(arch, pair), pair, dtype, PLAIN, False) for pair in SMALL_GRID_PAIRS
        ]
    return found


# What is worth a part of its own when the keys are split: below it, merging costs more.
MIN_PART_KEYS = 256


def _grid(plan: Plan, call: Call) -> tuple[int, int]:
    """Blocks of one part, and parts."""
    constants = {name: int(value) for name, value in plan.constants}
    lines = call.max_seqlen_q * call.q.shape[-2] * call.batch
    blocks = -(-call.max_seqlen_q // rows_of(constants)) * call.q.shape[-2] * call.batch
    units = device.of(call.q.device).units
    return blocks, call.num_splits or parts_of(constants, blocks, call.max_seqlen_k, units, lines)


def rows_of(constants: Mapping[str, int]) -> int:
    """Query rows of a block."""
    if "GROUPS" in constants:
        return forward_sm90.ROWS * constants["GROUPS"]
    return constants["ROWS"] * constants["WARPS"]


# On an H200: 64 keys of a block of 128 rows (8 heads of 8192, causal: 351 µs, of which the longest
# block has 128 such tiles), and a line of ``combine`` (16,384 of them: 54 µs), which starts 3 µs
# late.
_TILE_US, _LINE_US, _COMBINE_US = 2.7, 0.0033, 3.0
_SM90_TILE_US = 0.85  # 650 TFLOP/s on 132 SMs, one block on each


def parts_of(constants: Mapping[str, int], blocks: int, keys: int, units: int, lines: int) -> int:
    """``splits`` for a plan of these constants on so many SMs."""
    if "GROUPS" in constants:
        return splits(blocks, keys, units, lines, _SM90_TILE_US)
    return splits(blocks, keys, units * constants["BLOCKS"], lines)


def splits(blocks: int, keys: int, places: int, lines: int, tile_us: float = _TILE_US) -> int:
    """Parts that the keys are cut into so that ``blocks`` fill ``places`` of the device, where that
    gains more than putting ``lines`` (rows of all heads) together costs."""
    parts = max(1, min(places // max(blocks, 1), keys // MIN_PART_KEYS))
    gain = keys / 64 * (1 - 1 / parts) * tile_us
    return parts if gain > _COMBINE_US + lines * _LINE_US else 1


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """``Backend.bind``."""

    def grid_of(call: Call) -> attend.Grid:
        blocks, num_splits = _grid(plan, call)
        return attend.Grid(blocks, plans.threads_of(plan), num_splits)

    return attend.bind(launch, plan, call, append, with_lse, calls.with_readable, grid_of)
