"""Backward: delta of every row, then the gradients, in one pass over the scores or in two.

One pass makes five matrix products per tile and adds up dQ with float32 atomics, in any order. Two
passes, one that owns keys (dK, dV) and one that owns rows (dQ), make seven products per tile and
give the same bits on every run.
"""

from __future__ import annotations

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..native import lists
from ..native.plans import plan_with, values_of
from ..native.tiles import constants_of
from ..native.tiles.gfx942 import Tiles
from .plans import EMULATED, tiles_of

SUM_ROWS = 16  # rows of a workgroup of row_sums.hip
KERNEL = "hip/attn_bwd.hip"
ONE_PASS = "hip/attn_bwd_onepass.hip"
BIAS_GRAD = "hip/bias_grad.hip"
CONVERT_ROWS = 64  # rows of a workgroup of dq_convert.hip
KEYS, ROWS = 0, 1
# Score terms that, without others, have plans of the one-pass kernel of their own: their codes
# (kernels/hip/bwd_terms.h).
TERMS = {
    "sinks": 1,
    "alibi": 2,
    "softcap": 3,
    "dropout": calls.DROPOUT_TERM,
    "bias": 5,
    "float32_bias": 6,
    "bool_bias": 7,
}
# What leaves the gradient of a bias as it is: of sinks, only the LSE knows.
_OF_NO_GRADIENT = {"bias_tiles", "float32_bias", "other_bias", "sinks"}
THREADS = 256
WAVES = THREADS // 64


def _why_two_passes(
    tiles: Tiles, pair: tuple[int, int], deterministic: bool, mods: str
) -> str | None:
    """Return why backward takes two passes over the scores; None if it takes one."""
    if deterministic:
        return "deterministic: atomics would add dQ in no fixed order"
    if mods:
        return "the one-pass kernel has no score_mod and mask_mod"
    if pair not in tiles.one_pass:
        return "above head_dim 192, the one-pass kernel's tiles do not fit in 64 KB of LDS"
    return None


def notes_of(problem: Problem) -> list[str]:
    """Return what ``explain`` adds to the plan of a problem with a backward."""
    tiles = tiles_of(problem.arch)
    pair = calls.bucket_of(tiles.two_passes, problem.head_dim, problem.head_dim_v)
    deterministic = "deterministic" in problem.features
    why = _why_two_passes(tiles, pair, deterministic, problem.mods)
    if why is None:
        notes = ["backward in one pass: five products per tile; float32 atomics add dQ"]
    else:
        notes = [f"backward in two passes, seven products per tile: {why}"]
    if "bias_grad" in problem.features:
        notes.append("the gradient of bias in a separate pass, two products per tile, no atomics")
    return notes


def plans_of(
    backend: str,
    pair: tuple[int, int],
    dtype: int,
    general: bool,
    deterministic: bool,
    arch: str = EMULATED,
    mods: str = "",
    terms: frozenset[str] = frozenset(),
) -> tuple[Plan, Plan, Plan]:
    """Return the plans of row_sums and of the kernels that follow it. ``terms``: the names of the
    score terms.

    In one pass these are attn_bwd_onepass and dq_convert; in two passes attn_bwd twice, first
    owning keys, then owning rows.
    """
    tiles = tiles_of(arch)
    two_passes = bool(_why_two_passes(tiles, pair, deterministic, mods))
    alone = 0 if mods else _alone(tiles, pair, two_passes, terms)
    general = general and not alone
    if two_passes:
        sums = _of_rows(backend, "row_sums", dtype, 0)
        keys, rows = (
            _plan(backend, tiles, pair, dtype, owner, int(general), alone, mods)
            for owner in (KEYS, ROWS)
        )
        return sums, keys, rows
    constants = {
        "DTYPE": dtype,
        "GENERAL": int(general),
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "TILES": tiles.one_pass[pair][general],
        **({"TERM": alone} if alone else {}),
    }
    return (
        _of_rows(backend, "row_sums", dtype, pair[0]),
        plan_with(backend, ONE_PASS, constants),
        _of_rows(backend, "dq_convert", dtype, pair[0]),
    )


def _alone(tiles: Tiles, pair: tuple[int, int], two_passes: bool, terms: frozenset[str]) -> int:
    """Return the code of the one score term if there are plans for it alone, else 0."""
    terms -= {"bias_tiles"}  # of Hopper's kernel
    if terms & {"float32_bias", "bool_bias"}:
        terms -= {"bias"}
    (term,) = terms if len(terms) == 1 else ("",)
    having = tiles.two_pass_terms if two_passes else tiles.one_pass_terms
    return TERMS[term] if pair in having.get(term, ()) else 0


def _of_rows(backend: str, kernel: str, dtype: int, head_dim: int) -> Plan:
    return Plan(backend, f"hip/{kernel}.hip", (("DTYPE", dtype), ("HEAD_DIM", head_dim)))


def _plan(
    backend: str, tiles: Tiles, pair: tuple[int, int], dtype: int, owner: int, general: int,
    alone: int, mods: str,
) -> Plan:  # fmt: skip
    constants = {
        "DTYPE": dtype,
        "GENERAL": general,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "OWNS": owner,
        **constants_of(tiles.two_passes[pair][2 * general + owner]),
        **({"TERM": alone} if alone else {}),
    }
    return lists.listed(plan_with(backend, KERNEL, constants, digest=mods))


def bias_plan(
    backend: str,
    pair: tuple[int, int],
    dtype: int,
    mods: str = "",
    terms: frozenset[str] = frozenset(),
) -> Plan:
    """Return the plan of the gradient of the bias, which runs after the others."""
    constants = {"DTYPE": dtype, "HEAD_DIM": pair[0], "HEAD_DIM_V": pair[1]}
    if not mods and terms - _OF_NO_GRADIENT == {"bias"}:
        constants["TERM"] = TERMS["bias"]  # whatever its format
    return plan_with(backend, BIAS_GRAD, constants, digest=mods)


def bias_tile(plan: Plan) -> tuple[int, int]:
    """Return the rows and keys of a workgroup of the gradient of the bias."""
    return (128 if "TERM" in values_of(plan) else 64), 128


def all_plans(backend: str, arch: str = EMULATED) -> list[Plan]:
    found = [
        plan
        for pair in tiles_of(arch).two_passes
        for dtype in calls.DTYPE_CODES.values()
        for general in (False, True)
        for deterministic in (False, True)
        for terms in ((), *((term,) for term in TERMS if general))
        for plan in plans_of(
            backend, pair, dtype, general, deterministic, arch, terms=frozenset(terms)
        )
    ]
    pairs, codes = tiles_of(arch).two_passes, calls.DTYPE_CODES.values()
    found += [
        bias_plan(backend, pair, dtype, terms=frozenset(terms))
        for pair in pairs
        for dtype in codes
        for terms in ((), ("bias",))
    ]
    return list(dict.fromkeys(found))


def owned(plan: Plan) -> tuple[int, int]:
    """Return the rows and keys that a workgroup owns, one of them 0."""
    constants = values_of(plan)
    if plan.kernel == ONE_PASS:
        return 0, WAVES * 16 * constants["TILES"]
    if plan.kernel == KERNEL:
        columns = WAVES * 32 * constants["COLUMNS"]
        return (0, columns) if constants["OWNS"] == KEYS else (columns, 0)
    return (CONVERT_ROWS if plan.kernel.endswith("dq_convert.hip") else SUM_ROWS), 0
