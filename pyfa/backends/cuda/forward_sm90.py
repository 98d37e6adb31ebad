"""Hopper's forward: which problems it takes, and its tiles for every pair of head dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from . import plans

KERNEL = "cuda/sm90/attn_fwd.cu"
ROWS = 64  # of a warpgroup
# What is left to sm80's kernel, with the words for ``explain``.
ELSEWHERE = {"dropout": "dropout", "paged": "page table", "bias": "bias"}


class Tiles(NamedTuple):
    """``groups`` warpgroups of 64 query rows each, tiles of ``block_k`` keys, two of K and of V."""

    groups: int
    block_k: int


STAGES = 2  # places for a tile of K, and for one of V
TOLD = 2  # pieces of work that the copying warp may be ahead by


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int) -> int:
    """Of a block: queries, the stages, barriers of 8 bytes, and what is told of two pieces."""
    queries = tiles.groups * ROWS * head_dim * 2
    stages = STAGES * tiles.block_k * (head_dim + head_dim_v) * 2
    barriers = (2 * tiles.groups + 4 * STAGES + 2 * TOLD) * 8
    return -(-(queries + stages + barriers) // 16) * 16 + TOLD * 48


# By head dims: where every row sees all keys; with a causal mask or a window; with score terms. On
# an H200 those of 64 and 128 are the fastest of the ones in kernels/cuda/README.md. Of 256 no other
# was tried; those of 96 and 192 are of FlashAttention-3's size, as far as nothing is spilled.
TILES: dict[tuple[int, int], tuple[Tiles, Tiles, Tiles]] = {
    (64, 64): (Tiles(3, 128), Tiles(3, 128), Tiles(2, 128)),
    (96, 96): (Tiles(2, 176), Tiles(2, 128), Tiles(2, 128)),
    (128, 128): (Tiles(2, 128), Tiles(2, 128), Tiles(2, 128)),
    (192, 128): (Tiles(2, 128), Tiles(2, 128), Tiles(2, 112)),
    (192, 192): (Tiles(2, 112), Tiles(2, 96), Tiles(2, 80)),
    (256, 256): (Tiles(2, 80), Tiles(2, 80), Tiles(2, 80)),
}
_FULL, _MASKED, _TERMS = range(3)


def runs_on(arch: str) -> bool:
    """Whether this kernel is for ``arch``: Hopper's instructions are on no other."""
    return arch.removesuffix("a") == "sm_90" and plans.tiles_of(arch) == "sm_90"


def why_not(problem: Problem) -> list[str]:
    """Why the plan is sm80's on a device that has this kernel."""
    return [
        f"sm80's kernel: sm90's has no {words}"
        for feature, words in ELSEWHERE.items()
        if feature in problem.features
    ]


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    kind = _TERMS if calls.score_class(problem) != PLAIN else _FULL
    if kind == _FULL and problem.features & {"causal", "window"}:
        kind = _MASKED
    dtype = calls.DTYPE_CODES[problem.dtype]
    return _plan(pair, kind, dtype, plans.notes_of(problem, pair))


def _plan(pair: tuple[int, int], kind: int, dtype: int, notes: Sequence[str] = ()) -> Plan:
    tiles = TILES[pair][kind]
    score = GENERAL if kind == _TERMS else PLAIN
    return plan_of(tiles, pair, dtype, score, shared_bytes(tiles, *pair), notes)


def plan_of(
    tiles: Tiles, pair: tuple[int, int], dtype: int, score: int, shared: int,
    notes: Sequence[str], **more: int,
) -> Plan:  # fmt: skip
    """The kernel with these tiles, ``shared`` bytes, and ``more`` constants for other inputs."""
    constants = {
        "BLOCK_K": tiles.block_k,
        "DTYPE": dtype,
        "GROUPS": tiles.groups,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SCORE": score,
        "SHARED_BYTES": shared,
        "STAGES": STAGES,
    }
    return Plan("cuda", KERNEL, tuple(sorted((constants | more).items())), tuple(notes))


def all_plans() -> list[Plan]:
    found = [
        _plan(pair, kind, dtype)
        for dtype in calls.DTYPE_CODES.values()
        for pair in TILES
        for kind in (_FULL, _MASKED, _TERMS)
    ]
    return list(dict.fromkeys(found))
