"""The forward kernel: which problems it supports, and what it is compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import DROPOUT, GENERAL, PLAIN, score_class
from ..native import lists
from ..native.plans import modified, notes_of, plan_with
from ..native.tiles import constants_of
from ..native.tiles.gfx942 import Tiles
from .plans import EMULATED, tiles_of

KERNEL = "hip/attn_fwd.hip"
FLOAT8 = "float8_e4m3fnuz"
FLOAT8_CODE = 2
ROWS = 32  # of a wavefront
LANES = 64


def why_not(problem: Problem) -> list[str]:
    """Return what the kernel lacks for ``problem``, beyond features and dtypes."""
    features, reasons = problem.features, []
    if features >= {"paged", "dropout"}:
        reasons.append("dropout with a paged cache is not implemented")
    if features >= {"fp8", "dropout"}:
        reasons.append("dropout with float8 is not implemented")
    if "fp8" in features and problem.mods:
        reasons.append("score_mod and mask_mod with float8 are not implemented")
    if features >= {"fp8", "batch_invariant"}:
        reasons.append("float8 with batch invariance is not implemented")
    return reasons


def plan(backend: str, problem: Problem) -> Plan:
    """Return the plan of ``problem``: its kernel and what it is compiled with."""
    paged = "paged" in problem.features
    tiles = tiles_of(problem.arch)
    invariant = "batch_invariant" in problem.features
    # Whether there are pages must not tell: their pairs and score class are everybody's.
    pairs = tiles.paged_pairs if paged or invariant else tiles.forward
    pair = calls.bucket_of(pairs, problem.head_dim, problem.head_dim_v)
    out = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
    dtype = FLOAT8_CODE if "fp8" in problem.features else out
    # A mask_mod alone is a branch of the tiles that it cuts, as causal is.
    score = score_class(replace(problem, features=problem.features - {"mask_mod"}))
    if paged or invariant or _tiles_have_scales(problem, pair):
        score = max(score, GENERAL)
    found = _plan(backend, tiles, pair, dtype, out, score, paged, notes_of(problem, pair))
    return lists.listed(modified(found, problem.mods)) if problem.mods else found


def _tiles_have_scales(problem: Problem, pair: tuple[int, int]) -> bool:
    """Return whether a tile of keys may lie in more than one block with its own float8 scale."""
    apart = problem.features & {"varlen", "leftpad"}  # from where the blocks start
    return problem.scales > 0 and (
        bool(apart) or problem.scales < tiles_of(problem.arch).forward_float8[pair].block_k
    )


def _plan(
    backend: str,
    tiles: Tiles,
    pair: tuple[int, int],
    dtype: int,
    out: int,
    score: int,
    paged: bool,
    notes: Sequence[str] = (),
) -> Plan:
    table = tiles.forward_dropout if score == DROPOUT else tiles.forward
    if dtype == FLOAT8_CODE and paged:
        table = tiles.forward_float8_paged
    elif dtype == FLOAT8_CODE:
        table = tiles.forward_float8 if score == PLAIN else tiles.forward_float8_general
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PAGED": int(paged),
        "SCORE": score,
        **constants_of(table[pair]),
    }
    if out != dtype:
        constants["OUT_DTYPE"] = out
    return plan_with(backend, KERNEL, constants, notes)


def all_plans(backend: str, arch: str = EMULATED) -> list[Plan]:
    tiles = tiles_of(arch)
    return [
        _plan(backend, tiles, pair, FLOAT8_CODE if float8 else out, out, score, paged)
        for float8 in (False, True)
        for paged, pairs in ((False, tuple(tiles.forward)), (True, tiles.paged_pairs))
        for pair in pairs
        for out in calls.DTYPE_CODES.values()
        for score in ((GENERAL,) if paged else (PLAIN, GENERAL, DROPOUT))
        if not (float8 and score == DROPOUT)
    ]
