"""Hopper's forward: which problems it takes, and what it is compiled with."""

from __future__ import annotations

from collections.abc import Iterable

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from ..native.plans import plan_with
from ..native.tiles import Pair, constants_of
from ..native.tiles.sm90 import FORWARD, STAGES, Own
from . import plans

KERNEL = "cuda/sm90/attn_fwd.cu"
# What is left to sm80's kernel, with the words for ``explain``.
ELSEWHERE = {
    "dropout": "dropout", "paged": "page table", "bias": "bias", "score_mod": "score_mod",
    "mask_mod": "mask_mod",
}  # fmt: skip
_FULL, _MASKED, _TERMS = range(3)


def why_not(problem: Problem) -> list[str]:
    """Why the plan is sm80's on a device that has this kernel."""
    return [
        f"sm80's kernel: sm90's has no {words}"
        for feature, words in ELSEWHERE.items()
        if feature in problem.features
    ]


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(FORWARD, problem.head_dim, problem.head_dim_v)
    kind = _TERMS if calls.score_class(problem) != PLAIN else _FULL
    if kind == _FULL and problem.features & {"causal", "window"}:
        kind = _MASKED
    return _plan(pair, kind, calls.DTYPE_CODES[problem.dtype], plans.notes_of(problem, pair))


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
    return list(dict.fromkeys(found))
