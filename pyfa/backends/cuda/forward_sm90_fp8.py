"""Hopper's forward of float8 inputs: which problems it takes, and what it is compiled with.

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
from ..native.tiles.sm90 import FORWARD_FLOAT8
from . import plans
from .forward_sm90 import ELSEWHERE, plan_of

DTYPE = "float8_e4m3fn"
CODE = 2  # E4M3 in kernels/cuda/format.h
_PER_HEAD, _PER_BLOCK = range(2)  # of scales


def why_not(problem: Problem) -> list[str]:
    """Why the kernel does not take ``problem``, which has float8 and too many rows for decode."""
    reasons = []
    if problem.dtype in calls.DTYPE_CODES:
        reasons.append(f"float8 keys under {problem.dtype} queries are for a few rows (decode)")
    if not plans.runs_sm90(problem.arch):
        reasons.append(f"{problem.arch} has no kernel for float8, which is Hopper's (sm_90a)")
    return reasons + lacking(problem.features)


def lacking(features: frozenset[str]) -> list[str]:
    """Those of ``features`` that no forward here has with float8."""
    return [
        f"float8 with {words} is not implemented"
        for feature, words in (*ELSEWHERE.items(), ("batch_invariant", "batch invariance"))
        if feature in features
    ]


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(FORWARD_FLOAT8, problem.head_dim, problem.head_dim_v)
    notes = ["float8: P is rounded to it too", *plans.notes_of(problem, pair)]
    general = calls.score_class(problem) != PLAIN
    dtype = calls.DTYPE_CODES[problem.dtype_out]
    return _plan(pair, dtype, general, bool(problem.scales), notes)


def _plan(
    pair: tuple[int, int], dtype: int, general: bool, blocks: bool, notes: Sequence[str] = ()
) -> Plan:
    tiles = FORWARD_FLOAT8[pair][2 if blocks else general]
    score = GENERAL if general or blocks else PLAIN
    scales = _PER_BLOCK if blocks else _PER_HEAD
    shared = tiles.shared_bytes_of_float8(pair)
    return plan_of(tiles, pair, dtype, score, shared, notes, INPUTS=CODE, SCALES=scales)


def all_plans() -> list[Plan]:
    kinds = ((False, False), (True, False), (True, True))
    return [
        _plan(pair, dtype, *kind)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD_FLOAT8
        for kind in kinds
    ]
