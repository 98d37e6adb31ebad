"""Hopper's forward: which problems it takes, and what it is compiled with."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from ..native.plans import plan_with
from ..native.tiles import Pair, constants_of
from ..native.tiles.sm90 import FORWARD, FORWARD_INVARIANT, STAGES, Own
from . import plans

KERNEL = "cuda/sm90/attn_fwd.cu"
# What is left to sm80's kernel, with the words for ``explain``.
ELSEWHERE = {
    "dropout": "dropout", "paged": "page table", "bias": "bias", "score_mod": "score_mod",
    "mask_mod": "mask_mod",
}  # fmt: skip
_FULL, _MASKED, _TERMS = range(3)
_SWIZZLED = 8  # rows that make a whole swizzle: pages have a multiple


def why_not(problem: Problem) -> list[str]:
    """Why the plan is sm80's on a device that has this kernel."""
    # Pages must not change a bit: with batch_invariant they are read here, too.
    other = {"paged"} if "batch_invariant" in problem.features else set()
    return [
        f"sm80's kernel: sm90's has no {words}"
        for feature, words in ELSEWHERE.items()
        if feature in problem.features - other
    ]


def why_not_invariant(problem: Problem) -> list[str]:
    """Why neither this kernel nor sm80's takes ``problem`` with the bits of one without pages."""
    if not problem.features >= {"paged", "batch_invariant"} or why_not(problem):
        return []
    reasons = []
    if problem.page_size % _SWIZZLED:
        reasons.append(f"batch invariance wants pages of a multiple of {_SWIZZLED} keys here")
    if "leftpad" in problem.features:
        reasons.append("batch invariance with cache_leftpad and pages is not implemented")
    return reasons


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(FORWARD, problem.head_dim, problem.head_dim_v)
    kind = _TERMS if calls.score_class(problem) != PLAIN else _FULL
    if kind == _FULL and problem.features & {"causal", "window", "chunk"}:
        kind = _MASKED
    dtype, notes = calls.DTYPE_CODES[problem.dtype], plans.notes_of(problem, pair)
    if "batch_invariant" in problem.features:
        return _invariant(pair, kind, dtype, problem.page_size, notes)
    return _plan(pair, kind, dtype, notes)


def _invariant(
    pair: Pair, kind: int, dtype: int, page_size: int, notes: Iterable[str] = ()
) -> Plan:
    """The kernel whose rows do not depend on each other; ``page_size`` is 0 without pages."""
    tiles = FORWARD_INVARIANT[pair][kind]
    rows = math.gcd(page_size, tiles.block_k) if page_size else 0
    score, shared = GENERAL if kind == _TERMS else PLAIN, tiles.shared_bytes(pair)
    return plan_of(tiles, pair, dtype, score, shared, notes, INVARIANT=1, PAGE_ROWS=rows)


def _plan(pair: Pair, kind: int, dtype: int, notes: Iterable[str] = ()) -> Plan:
    tiles = FORWARD[pair][kind]
    score = GENERAL if kind == _TERMS else PLAIN
    return plan_of(tiles, pair, dtype, score, tiles.shared_bytes(pair), notes)


def plan_of(
    tiles: Own, pair: Pair, dtype: int, score: int, shared: int, notes: Iterable[str], **more: int
) -> Plan:
    """The kernel with these tiles, ``shared`` bytes, and ``more`` constants for other inputs."""
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SCORE": score,
        "SHARED_BYTES": shared,
        "STAGES": STAGES,
        **constants_of(tiles),
        **more,
    }
    return plan_with("cuda", KERNEL, constants, notes)


def all_plans() -> list[Plan]:
    found = [
        _plan(pair, kind, dtype)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD
        for kind in (_FULL, _MASKED, _TERMS)
    ]
    found += [
        _invariant(pair, kind, dtype, page_size)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD
        for kind in (_MASKED, _TERMS)
        for page_size in (0, 16)
    ]
    return list(dict.fromkeys(found))
