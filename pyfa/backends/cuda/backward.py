"""Backward: which kernels run, and what they are compiled with.

The first kernel computes delta of every row and sets dQ to zero. In the second,
each block owns some keys and adds its part of dQ to a float32 buffer. The third rounds dQ. Most
calls on Hopper need no zeros (``DQ_UNSET``): the first block that reaches a tile of dQ sets it.
With ``deterministic``, blocks wait for their turn to add. Otherwise the last bits of dQ may differ
from run to run, but never those of dK and dV.
"""

from __future__ import annotations

from ...arch import ARCHS
from ...plan import Plan
from ...problem import TERMS, Problem
from ..common import calls
from ..native.lists import listed
from ..native.plans import modified, plan_with
from ..native.target import BackwardGrid
from ..native.tiles import Pair, constants_of, sm90
from . import backward_grid, plans, tensor_maps

KERNEL = "cuda/sm80/attn_bwd.cu"


SM90 = "cuda/sm90/attn_bwd.cu"


def plans_of(arch: str, pair: Pair, dtype: int, general: bool) -> tuple[Plan, Plan, Plan]:
    """Return the plans of row_sums, attn_bwd and dq_convert."""
    tiles = plans.tiles_of(arch).backward[pair][general]
    constants = {
        "DTYPE": dtype,
        "GENERAL": int(general),
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SHARED_BYTES": tiles.shared_bytes(pair, general),
        **constants_of(tiles),
        "CHUNK_Q": tiles.chunk_q or tiles.block_q // tiles.warps_q,
    }
    return around(plan_with("cuda", KERNEL, constants), transposed=False)


def around(over_keys: Plan, transposed: bool) -> tuple[Plan, Plan, Plan]:
    """Return row_sums, ``over_keys`` (the plan of attn_bwd) and dq_convert, all with the same
    BLOCK_Q."""
    constants = dict(over_keys.constants)
    tile = tuple((name, constants[name]) for name in ("BLOCK_Q", "DTYPE", "HEAD_DIM"))
    if constants.get("DQ_UNSET"):
        tile = (*tile, ("DQ_UNSET", 1))
    of_sums = (*tile, ("HEAD_DIM_V", constants["HEAD_DIM_V"]))
    if over_keys.kernel == SM90:
        of_sums = (*of_sums, ("OWNED_KEYS", constants["BLOCK_K"]))
    return (
        Plan("cuda", "cuda/row_sums.cu", of_sums),
        over_keys,
        Plan("cuda", "cuda/sm80/dq_convert.cu", (*tile, ("TRANSPOSED", int(transposed)))),
    )


# ``TERMS`` of Hopper's kernel: a plan for each term alone, with what that term needs, and one for
# several, which asks at run time (``kernels/cuda/sm90/bwd_shape.h``). A plan with mods is for
# exactly the terms of its call, because it is compiled for that call anyway.
TERM_BITS = {"softcap": 1, "alibi": 2, "bias": 4, "dropout": 8, "sinks": 16}
ALL_TERMS = sum(TERM_BITS.values())
OF_TILES = TERM_BITS["bias"] | tensor_maps.BIAS_TILES
_SINKS, _DROPOUT = TERM_BITS["sinks"], TERM_BITS["dropout"]
# ``TERMS`` of plans whose tiles follow from the grid.
OF_GRID = (0, _SINKS)
# Terms for which dS is of other weights than dV.
_TWO_WEIGHTS = TERM_BITS["softcap"] | TERM_BITS["dropout"]


def bits_of(terms: frozenset[str], general: bool, mods: str = "") -> int:
    """Return ``TERMS`` for a call with these terms."""
    bits = sum(bit for name, bit in TERM_BITS.items() if name in terms)
    if mods:
        return bits
    if bits == TERM_BITS["bias"] and "bias_tiles" in terms:
        return OF_TILES
    alone = bits in TERM_BITS.values() and "large_softcap" not in terms
    return bits if alone else ALL_TERMS if general else 0


def sm90_plans_of(
    pair: Pair,
    dtype: int,
    deterministic: bool,
    bits: int = 0,
    score_mod: bool = False,
    mods: bool = False,
    chosen: sm90.OwnBackward | None = None,
) -> tuple[Plan, Plan, Plan]:
    """Return the plans of row_sums, Hopper's own attn_bwd, and dq_convert. ``chosen``: tiles in
    place of the general ones."""
    plain, of_terms = sm90.BACKWARD[pair], sm90.BACKWARD_TERMS[pair]
    several = score_mod or (bits and bits not in (*TERM_BITS.values(), OF_TILES))
    two_weights = plain.roles and bits & _TWO_WEIGHTS
    sinks = bool(bits & _SINKS)
    candidates = (of_terms,) if several or two_weights else (plain, of_terms)
    if mods and dtype == calls.DTYPE_CODES["float16"] and not bits & (_SINKS | _DROPOUT):
        candidates = (sm90.BACKWARD_FLOAT16_MODS.get(pair, candidates[0]), *candidates[1:])
    for tiles in (chosen,) if chosen else candidates:
        if deterministic and not tiles.roles:
            tiles = tiles._replace(one_sender=True)
        if tiles.shared_bytes(pair, sinks) <= ARCHS["sm_90a"].shared_bytes_per_block:
            break
    # The general plan, persistent, would take 1.03 of its time (D = 64).
    persistent = not (tiles.roles or bits == ALL_TERMS)
    # With lists of tiles, blocks with roles might all wait for the zeros of one tile.
    unset = tiles.one_sender or not (deterministic or (tiles.roles and mods))
    constants = {
        "BLOCK_K": tiles.block_k,
        "DETERMINISTIC": int(deterministic),
        "DQ_UNSET": int(unset),
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PERSISTENT": int(persistent),
        "SHARED_BYTES": tiles.shared_bytes(pair, sinks),
        "TERMS": bits,
        **constants_of(tiles),
    }
    return around(plan_with("cuda", SM90, constants), transposed=True)


# Terms whose slope is not always 1.
_STEEP = frozenset({"softcap", "score_mod"})
NARROW = 128  # of heads: what a warpgroup has S and dP of


def why_not_sm90(dims: Pair, terms: frozenset[str]) -> str | None:
    """Return why backward is sm80's kernel on a device that has sm90's; None if it is not."""
    if "sinks" in terms and max(dims) > NARROW and terms & _STEEP:
        return "sm90's has no sinks with softcap or score_mod above head_dim 128"
    return None


def plans_for(
    arch: str,
    dims: Pair,
    dtype: int,
    general: bool,
    deterministic: bool,
    mods: str = "",
    terms: frozenset[str] = frozenset(),
    grid: BackwardGrid | None = None,
) -> tuple[Plan, Plan, Plan]:
    """Return the plans of row_sums, attn_bwd and dq_convert for these head dims on ``arch``."""
    if plans.runs_sm90(arch) and why_not_sm90(dims, terms) is None:
        pair = calls.bucket_of(sm90.BACKWARD, *dims)
        bits = bits_of(terms, general, mods)
        plain = grid is not None and bits in OF_GRID and not deterministic and not mods
        chosen = backward_grid.tiles_for(grid, pair) if plain else None
        sums, gradients, convert = sm90_plans_of(
            pair, dtype, deterministic, bits, "score_mod" in terms, bool(mods), chosen
        )
    else:
        pair = calls.bucket_of(plans.tiles_of(arch).backward, *dims)
        sums, gradients, convert = plans_of(arch, pair, dtype, general)
    if mods:
        gradients = modified(gradients, mods)
        if gradients.kernel == SM90 and not deterministic:
            # In turn, blocks that leave out a tile would be waited for.
            gradients = listed(gradients)
    return sums, gradients, convert


def notes_of(problem: Problem) -> list[str]:
    """Return what ``explain`` adds to the plan of a problem with a backward."""
    if "backward" not in problem.features or not plans.runs_sm90(problem.arch):
        return []
    dims, features = (problem.head_dim, problem.head_dim_v), problem.features
    why = why_not_sm90(dims, features & TERMS)
    return [f"backward is sm80's kernel: {why}"] if why else []


def all_plans(arch: str) -> list[Plan]:
    found: list[Plan] = []
    own, table = plans.runs_sm90(arch), plans.tiles_of(arch).backward
    for dtype in calls.DTYPE_CODES.values():
        if own:
            for bits in (0, *TERM_BITS.values(), OF_TILES, ALL_TERMS):
                for pair in sm90.BACKWARD:
                    for deterministic in (False, True):
                        found += sm90_plans_of(pair, dtype, deterministic, bits)
                    for tiles in backward_grid.all_tiles(pair) if bits in OF_GRID else ():
                        found += sm90_plans_of(pair, dtype, False, bits, chosen=tiles)
        for general in (False, True):
            if general or not own:
                for pair in table:
                    found += plans_of(arch, pair, dtype, general)
    return list(dict.fromkeys(found))
