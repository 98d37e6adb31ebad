"""Hopper's forward of float8 inputs: which problems it takes, and its tiles.

The kernel is ``forward_sm90``'s. P is rounded to float8 too, as a multiple of its row's 2⁻⁸, and
keys are visited from last to first; so no tile has more than 128 of them, as many as may be lost
in front of a first key that takes nearly all of the attention.

The matrix unit keeps 14 bits of a sum of float8 products (pyfa/conformance/float8.py). So the
products with V are summed over one tile of keys, and the scores over all of the head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from . import plans
from .forward_sm90 import ELSEWHERE, ROWS, STAGES, TOLD, Tiles, plan_of, runs_on

DTYPE = "float8_e4m3fn"
CODE = 2  # E4M3 in kernels/cuda/format.h
_PER_HEAD, _PER_BLOCK = range(2)  # of scales

# By head dims: plain; with score terms; with scales per block of rows.
TILES: dict[tuple[int, int], tuple[Tiles, Tiles, Tiles]] = {
    (64, 64): (Tiles(3, 128), Tiles(2, 128), Tiles(2, 128)),
    (128, 128): (Tiles(3, 128), Tiles(2, 128), Tiles(2, 128)),
    (256, 256): (Tiles(2, 128), Tiles(2, 96), Tiles(2, 64)),
}


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int) -> int:
    """Of a block: as ``forward_sm90.shared_bytes``, with V once more, turned, and the scales."""
    queries = tiles.groups * ROWS * head_dim
    stages = STAGES * tiles.block_k * (head_dim + 2 * head_dim_v)
    barriers = (2 * tiles.groups + 6 * STAGES + 2 * TOLD) * 8
    return -(-(queries + stages + barriers) // 16) * 16 + TOLD * 64


def why_not(problem: Problem) -> list[str]:
    """Why the kernel does not take ``problem``, which has float8 and too many rows for decode."""
    reasons = []
    if problem.dtype in calls.DTYPE_CODES:
        reasons.append(f"float8 keys under {problem.dtype} queries are for a few rows (decode)")
    if not runs_on(problem.arch):
        reasons.append(f"{problem.arch} has no kernel for float8, which is Hopper's (sm_90a)")
    return reasons + lacking(problem.features)


def lacking(features: frozenset[str]) -> list[str]:
    """Those of ``features`` that no forward here has with float8."""
    return [
        f"float8 with {words} is not implemented"
        for feature, words in ELSEWHERE.items()
        if feature in features
    ]


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    notes = ["float8: P is rounded to it too", *plans.notes_of(problem, pair)]
    general = calls.score_class(problem) != PLAIN
    dtype = calls.DTYPE_CODES[problem.dtype_out]
    return _plan(pair, dtype, general, bool(problem.scales), notes)


def _plan(
    pair: tuple[int, int], dtype: int, general: bool, blocks: bool, notes: Sequence[str] = ()
) -> Plan:
    tiles = TILES[pair][2 if blocks else general]
    score = GENERAL if general or blocks else PLAIN
    scales = _PER_BLOCK if blocks else _PER_HEAD
    shared = shared_bytes(tiles, *pair)
    return plan_of(tiles, pair, dtype, score, shared, notes, INPUTS=CODE, SCALES=scales)


def all_plans() -> list[Plan]:
    kinds = ((False, False), (True, False), (True, True))
    return [
        _plan(pair, dtype, *kind)
        for dtype in calls.DTYPE_CODES.values()
        for pair in TILES
        for kind in kinds
    ]
