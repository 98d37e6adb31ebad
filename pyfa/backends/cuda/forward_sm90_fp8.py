"""Hopper's forward of float8 inputs: which problems it supports, and what it is compiled with.

The kernel is that of ``forward_sm90``. P is also rounded to float8, as a multiple of 2⁻⁸ of its
row, and keys are visited from last to first. Therefore no tile has more than 128 keys: that many
may be lost if the first key takes nearly all of the attention.

The matrix unit keeps 14 bits of a sum of float8 products (pyfa/conformance/float8.py). So the
products with V are summed over one tile of keys, and the scores over all of the head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from ..native.tiles.sm90 import FORWARD_FLOAT8
from . import plans
from .forward_sm90 import (
    ELSEWHERE,
    PAGE_SIZES,
    fewest_rows,
    page_rows,
    plan_of,
    without_pages,
)

_LACKING = {
    **ELSEWHERE, "score_mod": "score_mod", "mask_mod": "mask_mod",
    "batch_invariant": "batch invariance",
}  # fmt: skip

DTYPE = "float8_e4m3fn"
CODE = 2  # E4M3 in kernels/cuda/format.h
_PER_HEAD, _PER_BLOCK = range(2)  # of scales


def why_not(problem: Problem) -> list[str]:
    """Return why the kernel cannot run ``problem``, which has float8 and too many rows for
    decode."""
    reasons = []
    if problem.dtype in calls.DTYPE_CODES:
        reasons.append(f"float8 keys with {problem.dtype} queries need few query rows (decode)")
    if not plans.runs_sm90(problem.arch):
        reasons.append(f"float8 prefill is implemented for sm_90a, not for {problem.arch}")
    reasons += lacking(problem.features)
    pair = calls.bucket_of(FORWARD_FLOAT8, problem.head_dim, problem.head_dim_v)
    without = without_pages(problem, fewest_rows(pair, 1))
    return reasons + [f"float8 with {words} is not implemented" for words in without]


def lacking(features: frozenset[str]) -> list[str]:
    """Return those of ``features`` that no forward kernel here supports with float8."""
    return [
        f"float8 with {words} is not implemented"
        for feature, words in _LACKING.items()
        if feature in features
    ]


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(FORWARD_FLOAT8, problem.head_dim, problem.head_dim_v)
    notes = ["float8: P is also rounded to float8", *plans.notes_of(problem, pair)]
    general = calls.score_class(problem) != PLAIN
    dtype = calls.DTYPE_CODES[problem.dtype_out]
    return _plan(pair, dtype, general, bool(problem.scales), problem.page_size, notes)


def _plan(
    pair: tuple[int, int], dtype: int, general: bool, blocks: bool, page_size: int,
    notes: Sequence[str] = (),
) -> Plan:  # fmt: skip
    tiles = FORWARD_FLOAT8[pair][2 if blocks else general]
    score = GENERAL if general or blocks else PLAIN
    scales = _PER_BLOCK if blocks else _PER_HEAD
    shared = tiles.shared_bytes_of_float8(pair)
    more = {"INPUTS": CODE, "SCALES": scales, **page_rows(page_size, tiles)}
    return plan_of(tiles, pair, dtype, score, shared, notes, **more)


def all_plans() -> list[Plan]:
    kinds = ((False, False), (True, False), (True, True))
    return [
        _plan(pair, dtype, *kind, page_size)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD_FLOAT8
        for kind in kinds
        for page_size in PAGE_SIZES
    ]
