"""The forward kernel: which problems it takes, with which tiles, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ... import traffic
from ...plan import Plan
from ...problem import FEATURES as FEATURE_NAMES
from ...problem import Append, Call, Problem
from ..base import Run
from ..common import calls
from ..common.calls import DROPOUT, GENERAL, PLAIN, score_class
from ..native import attend
from ..native.launch import Launcher
from ..native.plans import notes_of

KERNEL = "hip/attn_fwd.hip"
FEATURES = frozenset(FEATURE_NAMES) - {"bias_grad", "backward", "dlse", "deterministic"}
FLOAT8 = "float8_e4m3fnuz"
FLOAT8_CODE = 2


class Tiles(NamedTuple):
    """Keys of a tile, wavefronts of 32 query rows, rows of a matrix product."""

    block_k: int
    waves: int
    mma: int = 32


# (head_dim, head_dim_v) to its tiles. LDS holds two of K and two of V: 65,536 B at 128 and 256. At
# 256 the accumulators alone are 128 registers: one wavefront on a SIMD, with twice as many.
TILES = {
    (64, 64): Tiles(64, 8),
    (96, 96): Tiles(64, 8),
    (128, 128): Tiles(64, 8),
    (192, 128): Tiles(32, 8),
    (192, 192): Tiles(32, 8),
    (256, 256): Tiles(32, 4),
}
# Where the generator's registers do not fit beside two wavefronts on a SIMD (58 spilled).
DROPOUT_TILES = {(192, 192): Tiles(32, 4)}
PAGED_PAIRS = ((64, 64), (128, 128), (256, 256))
# Of float8, in half the bytes: 65,536 B at 256. What scales of single keys add does not fit beside
# scores of 64 keys at 192 (36 vector registers spilled, or 1 scalar), nor at 128 beside the offsets
# of pages (17). At 256, 32 loads with pages are a loop that the compiler does not unroll.
FLOAT8_TILES = {pair: tiles._replace(block_k=64) for pair, tiles in TILES.items()}
FLOAT8_GENERAL_TILES = FLOAT8_TILES | {(192, 128): Tiles(32, 8), (192, 192): Tiles(32, 8)}
FLOAT8_PAGED_TILES = FLOAT8_TILES | {(128, 128): Tiles(32, 8), (256, 256): Tiles(32, 4)}
ROWS = 32  # of a wavefront
LANES = 64
# What is worth a part of its own when the keys are split: below it, merging costs more.
MIN_PART_KEYS = 256


def why_not(problem: Problem) -> list[str]:
    """What the kernel lacks for ``problem``, beyond features and dtypes."""
    features, reasons = problem.features, []
    if features >= {"paged", "dropout"}:
        reasons.append("dropout with a paged cache is not implemented")
    if features >= {"fp8", "dropout"}:
        reasons.append("dropout with float8 is not implemented")
    return reasons


def plan(backend: str, problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    paged = "paged" in problem.features
    pair = calls.bucket_of(PAGED_PAIRS if paged else TILES, problem.head_dim, problem.head_dim_v)
    out = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
    dtype = FLOAT8_CODE if "fp8" in problem.features else out
    score = GENERAL if paged or _tiles_have_scales(problem, pair) else score_class(problem)
    return _plan(backend, pair, dtype, out, score, paged, notes_of(problem, pair))


def _tiles_have_scales(problem: Problem, pair: tuple[int, int]) -> bool:
    """Whether a tile of keys may lie in more than one block that has a float8 scale."""
    apart = problem.features & {"varlen", "leftpad"}  # from where the blocks start
    return problem.scales > 0 and (bool(apart) or problem.scales < FLOAT8_TILES[pair].block_k)


def _plan(
    backend: str,
    pair: tuple[int, int],
    dtype: int,
    out: int,
    score: int,
    paged: bool,
    notes: Sequence[str] = (),
) -> Plan:
    table = TILES | DROPOUT_TILES if score == DROPOUT else TILES
    if dtype == FLOAT8_CODE and paged:
        table = FLOAT8_PAGED_TILES
    elif dtype == FLOAT8_CODE:
        table = FLOAT8_TILES if score == PLAIN else FLOAT8_GENERAL_TILES
    tiles = table[pair]
    constants = {
        "BLOCK_K": tiles.block_k,
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "MMA": tiles.mma,
        "PAGED": int(paged),
        "SCORE": score,
        "WAVES": tiles.waves,
    }
    if out != dtype:
        constants["OUT_DTYPE"] = out
    return Plan(backend, KERNEL, tuple(sorted(constants.items())), tuple(notes))


def all_plans(backend: str) -> list[Plan]:
    return [
        _plan(backend, pair, FLOAT8_CODE if float8 else out, out, score, paged)
        for float8 in (False, True)
        for paged, pairs in ((False, tuple(TILES)), (True, PAGED_PAIRS))
        for pair in pairs
        for out in calls.DTYPE_CODES.values()
        for score in ((GENERAL,) if paged else (PLAIN, GENERAL, DROPOUT))
        if not (float8 and score == DROPOUT)
    ]


def is_float8(plan: Plan) -> bool:
    return dict(plan.constants).get("DTYPE") == FLOAT8_CODE


def requested_bytes(plan: Plan, shape: traffic.Shape, parts: int = 1) -> traffic.Requested:
    """What the kernel and, where the keys are split, ``combine`` ask of the memory system."""
    constants = {name: int(value) for name, value in plan.constants}
    tiling = traffic.Tiling(ROWS * constants["WAVES"], constants["BLOCK_K"], parts)
    return traffic.requested_bytes(shape, tiling)


def splits(workgroups: int, keys: int, units: int) -> int:
    """Parts that the keys are cut into so that ``workgroups`` fill ``units`` compute units."""
    return max(1, min(units // max(workgroups, 1), keys // MIN_PART_KEYS))


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """``Backend.bind``."""
    waves = int(dict(plan.constants)["WAVES"])

    def grid_of(call: Call) -> attend.Grid:
        blocks = -(-call.max_seqlen_q // (ROWS * waves)) * call.q.shape[-2] * call.batch
        units = launch.device_at(call.q.device).units
        num_splits = call.num_splits or splits(blocks, call.max_seqlen_k, units)
        return attend.Grid(blocks, waves * LANES, num_splits)

    return attend.bind(launch, plan, call, append, with_lse, calls.with_readable, grid_of)
