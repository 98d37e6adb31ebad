"""Hopper's forward: which problems it supports, and what it is compiled with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ... import mods
from ...blocks import keys_visited
from ...mods.ir import loads_by
from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..common.calls import GENERAL, PLAIN
from ..native import decode
from ..native.lists import listed
from ..native.plans import modified, plan_with
from ..native.tiles import Pair, constants_of
from ..native.tiles.sm90 import (
    FORWARD,
    FORWARD_BIAS,
    FORWARD_INVARIANT,
    FORWARD_OF_GRID,
    FORWARD_OF_LENGTHS,
    FORWARD_OF_WINDOW,
    FORWARD_TANH,
    LAUNCH_US,
    MOST_OF_THREE_GROUPS,
    ROWS,
    SHARED_BYTES,
    SMALL,
    Own,
    Pace,
)
from . import plans
from .tensor_maps import BIAS_SCORE, panel

KERNEL = "cuda/sm90/attn_fwd.cu"
# Features of calls that run on the sm80 kernel, with the words for ``explain``.
ELSEWHERE = {
    "dropout": "dropout", "bias": "bias",
    "tree": "tree_mask",  # its addresses spill 150 to 390 bytes
}  # fmt: skip
OTHER_BIAS = "bias with a dtype other than q's, unaligned rows or other score terms"
_FULL, _MASKED, _TERMS = range(3)
# Score classes besides PLAIN and GENERAL (``fwd_tile.h``): a term alone, without pages; softcap and
# ALiBi also without a mask_mod.
ALONE = {"softcap": 3, "alibi": 4}
SCORE_MOD = 5
_SCORE_TERMS = {"softcap", "alibi", "score_mod", "mask_mod"}
_TWO_FIT = 96  # up to this head_dim, two blocks of one warpgroup fit on an SM
_HALF_SM = 113 * 1024  # bytes of shared memory of each of two blocks
# If a call has no other features than these, its grid is known when the plan is made, and
# determines the tiles. This holds up to ``_MOST_KEYS`` keys: 192 rows x 65,536 keys took 136 µs
# with blocks of 64 rows, and 109 µs with the general tiles.
_OF_GRID = frozenset({"causal", "gqa", "sinks", "backward", "dlse", "deterministic"})
_MOST_KEYS = 4096
_ON_DEVICE = frozenset({"varlen", "seqused"})  # features of calls whose lengths are on the device
_SIMPLE = _OF_GRID | _ON_DEVICE | {"window"}
PAGE_SIZES = (0, 16)  # those of ``all_plans``; plans for others are compiled at first use
# Features that plans support whose blocks have the rows of all query heads of a KV head.
_PACKED = frozenset(
    ("causal", "window", "negative_edge", "chunk", "sinks", "varlen", "seqused", "paged", "leftpad",
     "batch_idx", "gqa", "dv", "batch_invariant")
)  # fmt: skip
# Such plans take calls with at most MOST_ROWS rows per head and at least LEAST_LINES rows of all
# heads of a group. Calls with fewer rows run on the decode kernel, unless it does not support them.
MOST_ROWS = ROWS
LEAST_LINES = 33
PIECE = 128  # keys, about a tile; splits of such plans are multiples of it
# Page sizes are a multiple of this. This kernel reads smaller pages only if no other kernel can. On
# an H200, pages of 4 keys take 28 µs on this kernel and on sm80's; pages of 1 key take 65 µs on
# this kernel and 28 µs on sm80's.
_WORTH_A_COPY = 8


def why_not(problem: Problem) -> list[str]:
    """Return why ``problem`` runs on the sm80 kernel on a device that also has Hopper's kernel."""
    features = problem.features - ({"bias"} if _copies_bias(problem) else set())
    found = [words for feature, words in ELSEWHERE.items() if feature in features]
    if "bias" in found:
        found[found.index("bias")] = OTHER_BIAS
    if problem.mods and "paged" in problem.features:
        found.append("pages with score_mod or mask_mod")
    # With batch_invariant, one kernel must read both pages and keys without pages:
    # ``why_not_invariant`` has the reasons.
    if "batch_invariant" not in problem.features:
        found += without_pages(problem)
    return [f"sm80's kernel: sm90's has no {words}" for words in found]


def _copies_bias(problem: Problem) -> bool:
    """Return whether the kernel reads tiles of the bias of ``problem``."""
    others = problem.features & (_SCORE_TERMS | {"paged", "batch_invariant", "dropout"})
    narrow = max(problem.head_dim, problem.head_dim_v) <= max(max(pair) for pair in FORWARD_BIAS)
    return problem.bias_tiles and problem.aligned and not others and narrow


def without_pages(problem: Problem, of: int = _WORTH_A_COPY) -> list[str]:
    """Return the reasons why TMA cannot read the pages of ``problem``, whose size must be a
    multiple of ``of`` keys."""
    if "paged" not in problem.features:
        return []
    found = []
    if problem.page_size % of:
        found.append(f"page sizes that are not a multiple of {of} keys")
    if "leftpad" in problem.features:
        found.append("cache_leftpad with pages")
    return found


def why_not_invariant(problem: Problem) -> list[str]:
    """Return the reasons why no kernel gives ``problem`` the same bits as a problem without
    pages."""
    if "batch_invariant" not in problem.features:
        return []
    if problem.mods and "paged" in problem.features and not problem.features & ELSEWHERE.keys():
        # Without pages this kernel would run, and sm80's kernel gives other bits.
        return ["batch invariance with pages and score_mod or mask_mod is not implemented"]
    if why_not(problem):
        return []
    pair = calls.bucket_of(FORWARD, problem.head_dim, problem.head_dim_v)
    lacking = without_pages(problem, fewest_rows(pair, 2))
    return [f"batch invariance with {words} is not implemented" for words in lacking]


def fewest_rows(pair: Pair, itemsize: int) -> int:
    """Return the number of keys in the smallest copy. A copy needs at least 128 bytes of each
    panel. TMA swizzles by address, so a copy may have fewer than the 8 rows of a swizzle."""
    return max(128 // itemsize // panel(head, itemsize) for head in pair)


def packs(problem: Problem) -> bool:
    """Return whether blocks have the rows of all query heads of a KV head, so that K and V are read
    once for all of them."""
    if not plans.runs_sm90(problem.arch) or why_not(problem):
        return False
    group = problem.heads_q // problem.heads_k
    few = problem.seqlen_q <= MOST_ROWS and 1 < group <= ROWS
    if not few or calls.score_class(problem) != PLAIN or not problem.features <= _PACKED:
        return False
    many = decode.lines(problem) >= LEAST_LINES and not decode.why_not(problem)
    return many or "batch_invariant" in problem.features


def plan(problem: Problem) -> Plan:
    pair = calls.bucket_of(FORWARD, problem.head_dim, problem.head_dim_v)
    if "bias" in problem.features:
        return _plan_with_bias(
            pair, calls.DTYPE_CODES[problem.dtype], plans.notes_of(problem, pair)
        )
    # A mask_mod only masks scores, so it does not need the plan with score terms.
    scores = replace(problem, features=problem.features - {"mask_mod"})
    general = calls.score_class(scores) != PLAIN
    kind = _TERMS if general else _kind_of_mask(pair, problem.mods) if problem.mods else _FULL
    packed = packs(problem)
    if kind == _FULL and (packed or problem.features & {"causal", "window", "chunk"}):
        kind = _MASKED
    dtype = calls.DTYPE_CODES[problem.dtype]
    score = _score_of(problem) if general else PLAIN
    if score in ALONE.values():
        kind = _kind_alone(pair, score)
    if score == SCORE_MOD and problem.mods:
        tiles = _tiles_of_score_mod(pair, problem.mods)
        notes = plans.notes_of(problem, pair)
        found = plan_of(tiles, pair, dtype, score, tiles.shared_bytes(pair), notes)
        return listed(modified(found, problem.mods))
    invariant = "batch_invariant" in problem.features
    tiles = (FORWARD_INVARIANT if invariant or packed else FORWARD)[pair][kind]
    chunk = tiles.chunk_tiles(pair) * tiles.block_k if invariant and kind != _TERMS else 0
    notes = plans.notes_of(problem, pair, chunk)
    groups = tiles.groups
    simple = problem.features <= _SIMPLE
    if simple and kind != _TERMS and not packed and pair in FORWARD_OF_GRID:
        return _plan_of_grid(_chosen(problem, pair, FORWARD[pair][kind]), pair, dtype, notes)
    if not general and _shows_few_keys(problem, pair):
        found = _plan_of_grid(SMALL[pair], pair, dtype, notes)
        return listed(modified(found, problem.mods))
    if packed and not invariant:
        groups = -(-min(decode.lines(problem), 2 * ROWS) // ROWS)
    elif invariant and not problem.mods and _has_few_rows(problem, pair, packed):
        groups = 1
    found = _plan(pair, kind, dtype, score, problem.page_size, invariant, groups, packed, notes)
    return listed(modified(found, problem.mods)) if problem.mods else found


def _chosen(problem: Problem, pair: Pair, general: Own) -> Own:
    """Return the tiles for the window, for lengths that are on the device, or for the grid."""
    small = SMALL.get(pair, general)
    if "window" in problem.features:
        return small if 0 < problem.window <= FORWARD_OF_WINDOW.get(pair, 0) else general
    if problem.features & _ON_DEVICE:
        full, causal = FORWARD_OF_LENGTHS.get(pair, (0, 0))
        most = causal if "causal" in problem.features else full
        return small if max(problem.seqlen_q, problem.seqlen_k) <= most else general
    return _fastest(problem, pair, general)


def _fastest(problem: Problem, pair: Pair, general: Own) -> Own:
    """Return the tiles that take the least time. Other tiles than the ``general`` ones must gain at
    least 3 %, because the model is not more exact than that. The model does not include splits of
    the keys."""
    if problem.seqlen_k > _MOST_KEYS or ("causal" in problem.features and not problem.square):
        return general
    times = {pace.tiles: _microseconds(problem, pair, pace) for pace in FORWARD_OF_GRID[pair]}
    best = min(times, key=times.__getitem__)
    return best if times[best] < 0.97 * times[general] else general


def _microseconds(problem: Problem, pair: Pair, pace: Pace) -> float:
    """Return about how long an H100 or H200 takes for the grid of ``problem`` (``Pace``)."""
    rows, keys = pace.tiles.rows, pace.tiles.block_k
    blocks, heads = -(-problem.seqlen_q // rows), problem.batch * problem.heads_q
    units, fit = max(1, problem.device.units), _fit(pace.tiles, pair)
    shared = pace.shared if blocks * heads > units else 1.0

    def of_work_tile(seen: int) -> float:
        return pace.start + -(-seen // keys) * keys * pace.key

    longest = of_work_tile(problem.seqlen_k)
    if "causal" not in problem.features:
        return LAUNCH_US + -(-blocks * heads // (units * fit)) * longest * shared
    # The longest work tiles come first. The unbalanced rest at the end took a fifth of the longest.
    all_of_head = sum(of_work_tile(min((i + 1) * rows, problem.seqlen_k)) for i in range(blocks))
    average = all_of_head * heads / (units * fit) * shared
    return LAUNCH_US + max(longest, average + 0.2 * longest)


def _fit(tiles: Own, pair: Pair) -> int:
    """Return how many blocks of ``tiles`` an SM has at a time."""
    return 2 if tiles.groups == 1 and tiles.shared_bytes(pair) <= _HALF_SM else 1


def _plan_of_grid(tiles: Own, pair: Pair, dtype: int, notes: Iterable[str] = ()) -> Plan:
    more = {}
    if tiles.groups == 1:
        more = {"OF_GROUPS": 2, "BLOCKS": _fit(tiles, pair)}
    return plan_of(tiles, pair, dtype, PLAIN, tiles.shared_bytes(pair), notes, **more)


def _score_of(problem: Problem) -> int:
    """Return the score class of a problem with score terms."""
    terms = problem.features & _SCORE_TERMS
    if problem.features & {"paged", "batch_invariant"}:
        return GENERAL
    if terms - {"mask_mod"} == {"score_mod"}:
        return SCORE_MOD
    found = [ALONE.get(name, GENERAL) for name in terms]
    return found[0] if len(found) == 1 and problem.positive else GENERAL


def _kind_alone(pair: Pair, score: int) -> int:
    """Return the tiles for a call with a single score term. At head_dim 64 and above 128, the tiles
    of plain masks spill with softcap."""
    spills = pair[0] == 64 or pair[0] > 128
    return _TERMS if score == ALONE["softcap"] and spills else _MASKED


def _tiles_of_score_mod(pair: Pair, digest: str) -> Own:
    """Return the tiles for a score_mod alone. At head_dim 64, three warpgroups are faster, but have
    registers only for short score_mods that load nothing for each score. With ALiBi as a score_mod,
    tiles of 128 keys are 1.10 times as fast on an H200 as two warpgroups. A tanh spills with them,
    and with 96 keys is 1.07 times as fast."""
    score, general = mods.of(digest).score, FORWARD[pair][_TERMS]
    if pair[0] != 64 or score is None or loads_by(score, "q", "kv"):
        return general
    if len(score.ops) > MOST_OF_THREE_GROUPS:
        return general
    return FORWARD_TANH if any(op.name == "tanh" for op in score.ops) else FORWARD[pair][_MASKED]


def _kind_of_mask(pair: Pair, digest: str) -> int:
    """Return the tiles for a mask_mod alone, where those for small windows are not used. At
    head_dim 64, mask_mods that load a value for each key often mask documents that are shorter than
    the rows of three warpgroups: on an H200, documents of 512 tokens took 0.13 ms with three
    warpgroups and 0.10 ms with two."""
    mask = mods.of(digest).mask
    return _TERMS if pair[0] == 64 and mask is not None and loads_by(mask, "kv") else _MASKED


def _shows_few_keys(problem: Problem, pair: Pair) -> bool:
    """Return whether ``problem`` has a mask_mod and no score terms, and is faster with the tiles
    for small windows (``SMALL``).

    They are if rows see keys as with such a window, and at head_dim 64 if the mask_mod loads a
    value for each key, as for documents: on an H200, documents of 128, 512 and 2,048 tokens took
    0.82, 0.91 and 0.97 times as long as with two warpgroups.
    """
    mask = mods.of(problem.mods).mask if problem.mods else None
    if mask is None or pair not in SMALL or not problem.features <= _SIMPLE | {"mask_mod"}:
        return False
    if loads_by(mask, "kv"):
        return pair[0] == 64
    visited = keys_visited(problem.mods, problem.seqlen_q, problem.seqlen_k)
    return visited <= FORWARD_OF_WINDOW.get(pair, 0)


def _has_few_rows(problem: Problem, pair: Pair, packed: bool) -> bool:
    """Return whether blocks of one warpgroup are faster.

    At large head dims, only one such block fits on an SM, and it computes more slowly than two
    warpgroups. So such blocks are faster only if each block has its own SM: on an H200, 64 blocks
    took 76 µs instead of 91, and 512 blocks took 582 instead of 522."""
    if problem.seqlen_q > ROWS:
        return False
    blocks = problem.batch * problem.heads_q
    if packed:
        blocks = problem.batch * problem.heads_k * -(-decode.lines(problem) // ROWS)
    return blocks <= problem.device.units or pair[0] <= _TWO_FIT or (packed and _spills(pair))


def _spills(pair: Pair) -> bool:
    """Return whether packed blocks of two warpgroups with chunks spill: 16 bytes."""
    return pair[0] == 256


def page_rows(page_size: int, tiles: Own) -> dict[str, int]:
    """Return ``PAGE_ROWS``, the number of keys in one copy: it divides both ``page_size`` and the
    keys of a tile. ``WHOLE_PAGES`` is set if such a copy is a whole page. The result is empty
    without pages (``page_size`` 0)."""
    if not page_size:
        return {}
    rows = math.gcd(page_size, tiles.block_k)
    return {"PAGE_ROWS": rows, **({"WHOLE_PAGES": 1} if rows == page_size else {})}


def _plan(
    pair: Pair, kind: int, dtype: int, score: int, page_size: int, invariant: bool, groups: int,
    packed: bool, notes: Iterable[str] = (),
) -> Plan:  # fmt: skip
    """Return a plan. ``invariant``: the kernel whose rows do not depend on each other. ``groups``:
    the warpgroups of a block; with other numbers than the table's an invariant plan has the same
    bits. ``packed``: see ``packs``."""
    tiles = (FORWARD_INVARIANT if invariant or packed else FORWARD)[pair][kind]
    more = page_rows(page_size, tiles)
    if invariant:
        more["INVARIANT"] = 1
        if kind != _TERMS:
            more["CHUNK_TILES"] = tiles.chunk_tiles(pair)
    if packed:
        more["PACKED"] = 1
    if groups != tiles.groups:
        # With one warpgroup, P would otherwise be computed as with three, which is slower.
        more["OF_GROUPS"] = tiles.groups if invariant else 2
        # On an H200 with 64 blocks, 3 stages gain 4 % at head_dim 64 and lose 12 % at 128.
        stages = 3 if groups == 1 and pair[0] <= 64 else tiles.stages
        tiles = tiles._replace(groups=groups, stages=stages)
    if groups == 1:
        more["BLOCKS"] = _fit(tiles, pair)
    shared, kept = tiles.shared_bytes(pair), tiles.kept_bytes(pair)
    room = SHARED_BYTES if _fit(tiles, pair) == 1 else _HALF_SM
    if "CHUNK_TILES" in more and shared + kept <= room:
        more["CHUNK_SHARED"] = 1
        shared += kept
    return plan_of(tiles, pair, dtype, score, shared, notes, **more)


def _plan_with_bias(pair: Pair, dtype: int, notes: Iterable[str] = ()) -> Plan:
    tiles = FORWARD_BIAS[pair]
    return plan_of(tiles, pair, dtype, BIAS_SCORE, tiles.shared_bytes(pair, bias=True), notes)


def constants_of_own(tiles: Own) -> dict[str, int]:
    """Return ``tiles`` as the constants of a plan. ``HALVES`` is left out if it is 1, which is the
    kernels' default."""
    return {x: n for x, n in constants_of(tiles).items() if x != "HALVES" or n > 1}


def plan_of(
    tiles: Own, pair: Pair, dtype: int, score: int, shared: int, notes: Iterable[str], **more: int
) -> Plan:
    """Return the plan with these tiles, ``shared`` bytes, and ``more`` constants for other
    inputs."""
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SCORE": score,
        "SHARED_BYTES": shared,
        **constants_of_own(tiles),
        **more,
    }
    return plan_with("cuda", KERNEL, constants, notes)


def all_plans() -> list[Plan]:
    kinds = ((_FULL, PLAIN), (_MASKED, PLAIN), (_TERMS, GENERAL))
    found = [
        _plan(pair, kind, dtype, score, page_size, invariant, groups, packed)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD
        for invariant, packed in ((False, False), (False, True), (True, False), (True, True))
        if not (invariant or packed) or pair in FORWARD_INVARIANT
        for kind, score in kinds
        if not (invariant or packed) or kind != _FULL
        if not packed or kind != _TERMS
        for groups in _groups_of(pair, kind, invariant, packed)
        for page_size in PAGE_SIZES
    ]
    found += [
        _plan(pair, _kind_alone(pair, score), dtype, score, 0, False, groups, False)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD
        for score in ALONE.values()
        for groups in _groups_of(pair, _kind_alone(pair, score), False, False)
    ]
    found += [
        _plan_of_grid(pace.tiles, pair, dtype)
        for dtype in calls.DTYPE_CODES.values()
        for pair, paces in FORWARD_OF_GRID.items()
        for pace in paces
    ]
    found += [
        _plan_with_bias(pair, dtype)
        for dtype in calls.DTYPE_CODES.values()
        for pair in FORWARD_BIAS
    ]
    return list(dict.fromkeys(found))


def _groups_of(pair: Pair, kind: int, invariant: bool, packed: bool) -> tuple[int, ...]:
    """Return how many warpgroups the blocks of such plans may have."""
    own = (FORWARD_INVARIANT if invariant or packed else FORWARD)[pair][kind].groups
    if invariant:
        return (1,) if packed and _spills(pair) else (1, own)
    return (1, 2) if packed else (own,)
