"""Forward by Ampere's kernel, on every arch; the Hopper kernel is preferred where it supports the
problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import DROPOUT, GENERAL, PLAIN
from ..native.plans import modified, plan_with
from ..native.tiles import Pair, constants_of
from ..native.tiles.sm80 import STAGES, Forward
from ..native.tiles.sm80 import Tiles as AllTiles
from . import forward_sm90, forward_sm90_fp8, latent_sm90, plans

KERNEL = "cuda/sm80/attn_fwd.cu"


def plan(problem: Problem) -> Plan:
    """Return the plan of ``problem``: its kernel and what it is compiled with."""
    if "fp8" in problem.features:
        return forward_sm90_fp8.plan(problem)
    left, invariant = [], "batch_invariant" in problem.features
    if plans.runs_sm90(problem.arch):
        left = forward_sm90.why_not(problem)
        if not left:
            return forward_sm90.plan(problem)
    table = plans.tiles_of(problem.arch)
    pair = calls.bucket_of(table.forward, problem.head_dim, problem.head_dim_v)
    dtype, paged = calls.DTYPE_CODES[problem.dtype], "paged" in problem.features
    score = calls.score_class(problem)
    if paged or invariant:
        score = max(score, GENERAL)
    tiles = _tiles_for(table, pair, score, paged)
    blocks = -(-problem.seqlen_q // (tiles.rows * tiles.warps)) * problem.heads_q * problem.batch
    alone = score == PLAIN and pair in table.small_grid
    if alone and blocks < tiles.blocks * problem.device.units:
        tiles = table.small_grid[pair]
    found = _plan(tiles, pair, dtype, score, paged, left + plans.notes_of(problem, pair))
    return modified(found, problem.mods) if problem.mods else found


def _tiles_for(table: AllTiles, pair: Pair, score: int, paged: bool) -> Forward:
    """Return the tiles for a grid that fills the device."""
    if paged and score == GENERAL and pair in table.forward_paged:
        return table.forward_paged[pair]
    return table.forward[pair][score]


def _plan(
    tiles: Forward, pair: Pair, dtype: int, score: int, paged: bool, notes: Sequence[str] = ()
) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PAGED": int(paged),
        "SCORE": score,
        "SHARED_BYTES": tiles.shared_bytes(pair, paged),
        "STAGES": STAGES,
        **constants_of(tiles),
    }
    return plan_with("cuda", KERNEL, constants, notes)


def all_plans(arch: str) -> list[Plan]:
    own, table = plans.runs_sm90(arch), plans.tiles_of(arch)
    found = []
    if own:
        found = forward_sm90.all_plans() + forward_sm90_fp8.all_plans() + latent_sm90.all_plans()
    for dtype in calls.DTYPE_CODES.values():
        for pair in table.forward:
            for paged, score in ((False, PLAIN), *product((False, True), (GENERAL, DROPOUT))):
                if own and not paged and score == PLAIN:
                    continue
                tiles = _tiles_for(table, pair, score, paged)
                found.append(_plan(tiles, pair, dtype, score, paged))
        if not own:
            found += [
                _plan(tiles, pair, dtype, PLAIN, False) for pair, tiles in table.small_grid.items()
            ]
    return found
