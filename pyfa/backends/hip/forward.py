"""The forward kernel: which problems it supports, and what it is compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...plan import Plan
from ...problem import Problem, steps_of
from ..common import calls, splits
from ..common.calls import DROPOUT, GENERAL, PLAIN, score_class
from ..native import lists
from ..native.plans import modified, notes_of, plan_with
from ..native.tiles import Pair, constants_of
from ..native.tiles.gfx942 import SMALL_KEYS, Forward, Small, Tiles
from .plans import EMULATED, device_of, tiles_of

KERNEL = "hip/attn_fwd.hip"
FLOAT8 = "float8_e4m3fnuz"
FLOAT8_CODE = 2
ROWS = 32  # of a wavefront
LANES = 64
# Where keys lie (``PAGED``): in rows, in pages of any size, in pages of whole groups of keys.
UNPAGED, ANY_PAGES, WHOLE_GROUPS = 0, 1, 2
_GROUP = 16  # keys of a group (``kGroup`` of ``kernels/hip/load.h``)
# The score classes of a term alone (``kernels/hip/fwd_tile.h``).
BIAS, ALIBI, SCORE_MOD, BOOL_BIAS, SOFTCAP, FLOAT32_BIAS = 3, 4, 5, 6, 7, 8
_OF_BIAS = {"bool": BOOL_BIAS, "float32": FLOAT32_BIAS}  # of a bias of another dtype than q's
# Plain calls with other features do not use workgroups of 4 wavefronts: their plans are others, or
# (``batch_invariant``) their bits must not depend on the grid. With other features, pages and terms
# alone have general plans.
_SIMPLE = frozenset(
    ("causal", "window", "negative_edge", "sinks", "varlen", "seqused", "leftpad", "batch_idx",
     "gqa", "dv", "backward", "dlse", "deterministic")
)  # fmt: skip

_MODS = frozenset({"score_mod", "mask_mod", "captured_grad"})


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
    if invariant or _tiles_have_scales(problem, pair):
        score = max(score, GENERAL)
    if paged and not problem.features <= _SIMPLE | {"paged"}:
        score = max(score, GENERAL)
    if score == GENERAL and problem.positive:
        score = _alone(problem, tiles, pair)
    of_mods = problem.features <= _SIMPLE | _MODS
    if score == GENERAL and of_mods and "score_mod" in problem.features:
        score = SCORE_MOD
    chosen = _general(tiles, pair, dtype, score, paged)
    if score == PLAIN and problem.mods:
        chosen = tiles.forward_mask[pair]
    if score == PLAIN and problem.features <= _SIMPLE and pair in tiles.forward_small:
        chosen = _chosen(problem, chosen, tiles.forward_small[pair])
    paging = _paging(problem, score)
    found = _plan(backend, chosen, pair, dtype, out, score, paging, notes_of(problem, pair))
    return lists.listed(modified(found, problem.mods)) if problem.mods else found


def _paging(problem: Problem, score: int) -> int:
    """Return where the keys of ``problem`` lie (``PAGED``). Only plain plans have groups of keys,
    which begin where pages do."""
    if "paged" not in problem.features:
        return UNPAGED
    has_groups = score == PLAIN and "leftpad" not in problem.features
    return WHOLE_GROUPS if has_groups and problem.page_size % _GROUP == 0 else ANY_PAGES


def with_score(plan: Plan, score: int) -> Plan:
    """Return ``plan`` with another score class."""
    constants = {**dict(plan.constants), "SCORE": score}
    return replace(plan, constants=tuple(constants.items()))


def fallbacks(plan: Plan) -> list[Plan]:
    """Return ``plan`` and then others with the same result, in the order in which they are tried if
    a user's mod does not leave enough registers: the general plan, and a plan that receives block
    lists and visits every tile."""
    found = [plan]
    if plan.kernel == KERNEL and dict(plan.constants)["SCORE"] == SCORE_MOD:
        found.append(with_score(plan, GENERAL))
    found += [lists.unlisted(each) for each in found]
    return list(dict.fromkeys(found))


def _alone(problem: Problem, tiles: Tiles, pair: Pair) -> int:
    """Return the score class of a term alone that ``pair`` has a plan of, else ``GENERAL``."""
    if problem.features <= _SIMPLE | {"softcap"}:
        fits = problem.low_softcap and pair in tiles.softcap_pairs
        return SOFTCAP if fits else GENERAL
    if pair not in tiles.added_pairs:
        return GENERAL
    if problem.features - {"bias_grad"} <= _SIMPLE | {"bias"}:
        return {problem.dtype: BIAS, **_OF_BIAS}.get(problem.bias_fours, GENERAL)
    return ALIBI if problem.features <= _SIMPLE | {"alibi"} else GENERAL


def _tiles_have_scales(problem: Problem, pair: tuple[int, int]) -> bool:
    """Return whether a tile of keys may lie in more than one block with its own float8 scale."""
    apart = problem.features & {"varlen", "leftpad"}  # from where the blocks start
    return problem.scales > 0 and (
        bool(apart) or problem.scales < tiles_of(problem.arch).forward_float8[pair].block_k
    )


def _chosen(problem: Problem, general: Forward, small: Small) -> Forward:
    """Return the tiles of ``small`` for few rows, small windows and short sequences, else the
    ``general`` ones.

    A workgroup of half as many rows leaves fewer rows empty and visits fewer masked keys, and small
    grids fill twice as many CUs. K and V are read once for half as many rows, so the limits exclude
    calls with many keys, unless they have no more rows than such a workgroup.
    """
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if rows <= ROWS * small.tiles.waves:
        return small.tiles
    if "window" in problem.features:
        return small.tiles if 0 < problem.window <= small.window else general
    lines, device = problem.batch * problem.heads_q, device_of(problem)
    before, after = (-(-rows // (ROWS * tiles.waves)) * lines for tiles in (general, small.tiles))
    parts = (splits.within_a_round(n, keys, device.units, 0, splits.FREE) for n in (before, after))
    if len(set(parts)) > 1:  # the keys would be split less
        return general
    is_causal = "causal" in problem.features
    if is_causal and problem.square:
        is_large = before >= 2 * device.units
        shares = "varlen" in problem.features and _heads_beside(problem, device.dies) > 1
        if keys <= (small.packed if is_large and shares else small.causal):
            return small.tiles
    if steps_of(problem.features) == 1:
        fits = not is_causal and keys <= small.uneven
    else:
        fits = keys <= SMALL_KEYS and _is_faster(before, after, device.units, small.on_unit)
    return small.tiles if fits else general


def _is_faster(before: int, after: int, units: int, on_unit: int) -> bool:
    """Return whether ``after`` workgroups of 4 wavefronts end sooner than ``before`` of 8, if both
    kinds visit as many keys."""
    if after <= units:
        return True
    if on_unit > 1:
        return after < 2 * before
    # A workgroup with a CU of its own takes 0.6 of the time of one of 8 wavefronts, not a half.
    rounds_before, rounds_after = -(-before // units), -(-after // units)
    return 2 * after <= 3 * before and 2 * rounds_after <= 3 * rounds_before


def _heads_beside(problem: Problem, dies: int) -> int:
    """Return how many query heads of a KV head run side by side on an XCD in a packed batch
    (``kernels/hip/packed.h``), so that they share K and V in L2."""
    group, of_die = problem.heads_q // problem.heads_k, problem.heads_q // dies
    if of_die == 0 or (of_die % group and group % of_die):
        return 1
    return min(group, of_die)


def _general(tiles: Tiles, pair: Pair, dtype: int, score: int, paged: bool) -> Forward:
    """Return the tiles of calls of any size."""
    table = tiles.forward_dropout if score == DROPOUT else tiles.forward
    if dtype == FLOAT8_CODE and paged:
        table = tiles.forward_float8_paged
    elif dtype == FLOAT8_CODE:
        table = tiles.forward_float8 if score == PLAIN else tiles.forward_float8_general
    return table[pair]


def _plan(
    backend: str,
    tiles: Forward,
    pair: Pair,
    dtype: int,
    out: int,
    score: int,
    paging: int,
    notes: Sequence[str] = (),
) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PAGED": paging,
        "SCORE": score,
        **constants_of(tiles),
    }
    if out != dtype:
        constants["OUT_DTYPE"] = out
    return plan_with(backend, KERNEL, constants, notes)


def _scores_of(tiles: Tiles, pair: Pair, float8: bool, paging: int) -> tuple[int, ...]:
    """Return the score classes that plans of ``pair`` have."""
    if paging == WHOLE_GROUPS:
        return () if float8 else (PLAIN,)
    if float8 and paging == ANY_PAGES:
        return (GENERAL,)
    if float8 or paging == ANY_PAGES:
        return (PLAIN, GENERAL)
    alone = (BIAS, ALIBI, BOOL_BIAS, FLOAT32_BIAS) if pair in tiles.added_pairs else ()
    capped = (SOFTCAP,) if pair in tiles.softcap_pairs else ()
    return (PLAIN, GENERAL, DROPOUT, *alone, *capped)


def all_plans(backend: str, arch: str = EMULATED) -> list[Plan]:
    tiles = tiles_of(arch)
    general = [
        _plan(
            backend, _general(tiles, pair, dtype, score, paging != UNPAGED), pair, dtype, out,
            score, paging,
        )
        for float8 in (False, True)
        for paging in (UNPAGED, ANY_PAGES, WHOLE_GROUPS)
        for pair in (tiles.forward if paging == UNPAGED else tiles.paged_pairs)
        for out in calls.DTYPE_CODES.values()
        for dtype in (FLOAT8_CODE if float8 else out,)
        for score in _scores_of(tiles, pair, float8, paging)
    ]  # fmt: skip
    return general + [
        _plan(backend, small.tiles, pair, dtype, dtype, PLAIN, UNPAGED)
        for pair, small in tiles.forward_small.items()
        for dtype in calls.DTYPE_CODES.values()
    ]
