"""The cases of each level, and the selection of those that a backend runs.

The level "quick" is chosen by hand: every feature alone, the pairs of features that interact, every
head dim, tile edges, value recipes, memory layouts, packed batches and caches. The level "full"
adds families of samples from the cross products of several axes: on each axis, sample i of a family
takes the choice that the SHA-256 of "family/i/axis" selects. So a new family does not change the
cases of other families, and no sample depends on the stream of a random generator.

A backend runs the cases whose features and dtype it declares. For each feature or dtype that it
does not declare, it also gets the plainest case that needs it, which it must refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import (
    grid_bands,
    grid_cover,
    grid_decode,
    grid_fp8,
    grid_hostile,
    grid_kernels,
    grid_latent,
    grid_mods,
    grid_objects,
    grid_trees,
    grid_waves,
    grid_wide,
)
from .cases import BIASES, FLOAT32_ROTARIES, LAYOUTS, RECIPES, ROTARIES, Case
from .cases import dense as _dense
from .cases import packed as _packed
from .grid_axes import APPENDS, CACHES, DTYPES, HALF, PACKED, SHAPES, Fields, draws

LEVELS = ("quick", "full")

_DIMS = (1, 8, 40, 59, 64, 80, 96, 111, 128, 192, 256)
# Around the edges of tiles of 16, 32, 64, 128 and 256; 513 passes those of 512.
_EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
_LONG = (*_EDGES, 513)
_VALUES = tuple(recipe for recipe in RECIPES if recipe not in ("identity", "mixed"))

# Options of the score function and of the heads, each alone.
_ALONE: tuple[Fields, ...] = (
    {},
    {"causal": True},
    {"window": (17, 5)},
    {"window": (9, -1)},
    {"window": (-1, 3)},
    {"causal": True, "window": (12, 0)},
    {"softcap": 2.0},
    {"softcap": 30.0},
    {"alibi": "heads"},
    {"alibi": "batch"},
    *({"bias": bias} for bias in BIASES),
    {"sinks": True},
    {"dropout_p": 0.17},
    {"heads_q": 4},
    {"heads_q": 6, "heads_k": 3},
    {"heads_q": 4, "heads_k": 1},
    {"head_dim_v": 40},
    {"head_dim": 40, "head_dim_v": 128},
    {"scale": 0.0},
    {"scale": -0.3},
    {"scale": 0.0, "causal": True, "lengths_q": (65, 65), "lengths_k": (65, 65)},
    {"scale": -0.3, "causal": True, "lengths_q": (65, 65), "lengths_k": (65, 65)},
)
_GRADIENT: tuple[Fields, ...] = (
    {"dlse": "both"},
    {"dlse": "only"},
    {"deterministic": True},
    *({"bias": bias, "bias_grad": True} for bias in BIASES if bias != "bool"),
)
_PAIRS: tuple[Fields, ...] = (
    {"causal": True, "window": (5, 0), "sinks": True},
    {"causal": True, "softcap": 5.0},
    {"causal": True, "dropout_p": 0.3},
    {"causal": True, "alibi": "heads"},
    {"causal": True, "bias": "full"},
    {"causal": True, "heads_q": 6, "heads_k": 2},
    {"causal": True, "head_dim_v": 96},
    {"window": (7, 2), "alibi": "batch"},
    {"window": (7, 2), "dropout_p": 0.5},
    {"window": (3, 3), "softcap": 10.0, "heads_q": 4},
    {"softcap": 4.0, "alibi": "heads", "bias": "heads"},
    {"softcap": 4.0, "sinks": True},
    {"softcap": 4.0, "dropout_p": 0.2},
    {"dropout_p": 0.2, "heads_q": 4, "heads_k": 1},
    {"dropout_p": 0.2, "sinks": True},
    {"dropout_p": 0.9, "bias": "hidden"},
    {"sinks": True, "bias": "hidden"},
    {"sinks": True, "bias": "bool"},
    {"sinks": True, "heads_q": 6, "heads_k": 3, "alibi": "heads"},
    {"bias": "hidden", "heads_q": 4},
    {"scale": -0.2, "softcap": 3.0, "window": (20, -1)},
)
_GRADIENT_PAIRS: tuple[Fields, ...] = (
    {"dlse": "both", "causal": True, "heads_q": 4},
    {"dlse": "both", "softcap": 3.0},
    {"dlse": "both", "sinks": True, "bias": "hidden"},
    {"dlse": "both", "dropout_p": 0.25},
    {"dlse": "only", "alibi": "heads", "window": (30, 4)},
    {"deterministic": True, "heads_q": 6, "heads_k": 1, "causal": True},
    {"deterministic": True, "dropout_p": 0.1, "dlse": "both"},
    {"bias": "keys", "bias_grad": True, "dropout_p": 0.1, "softcap": 5.0},
    {"bias": "heads", "bias_grad": True, "heads_q": 4, "causal": True},
    {"bias": "hidden", "bias_grad": True, "sinks": True, "dlse": "both"},
)
_CACHE_OPTIONS: tuple[Fields, ...] = (
    {},
    {"used_k": True, "slack": 5},
    {"leftpad": True},
    {"leftpad": True, "causal": True, "alibi": "heads"},
    {"batch_idx": True, "slack": 3},
    {"page_size": 1},
    {"page_size": 16},
    {"page_size": 16, "leftpad": True, "causal": True},
    {"page_size": 64, "heads_q": 8, "heads_k": 2},
    {"batch_idx": True, "leftpad": True, "window": (20, 0)},
    {"num_splits": 3},
    {"packed_q": True, "causal": True},
    {"packed_q": True, "page_size": 16, "slack": 2},
    {"causal": True, "softcap": 8.0, "sinks": True},
    {"bias": "full", "slack": 4},
    {"bias": "bool", "leftpad": True},
)


def cases(
    level: str,
    declared: frozenset[str],
    dtypes: Sequence[str],
    wanted: Sequence[str] | None = None,
    max_seqlen: int | None = None,
) -> list[Case]:
    """Return the cases of ``level`` for a backend that declares these features and dtypes.

    ``wanted``: return only cases that need one of these features. ``max_seqlen`` shortens
    sequences.
    """
    grid = _unique(_quick() if level == "quick" else _full(), max_seqlen)
    if wanted:
        grid = [case for case in grid if case.features & set(wanted)]
    able = set(dtypes)
    theirs = dict.fromkeys(_in_their_float8(case, dtypes) for case in grid)
    kept = [case for case in theirs if case.features <= declared and able.issuperset(case.dtypes)]
    return kept + _probes(grid, declared, dtypes)


def _in_their_float8(case: Case, dtypes: Sequence[str]) -> Case:
    """Return the case in the float8 format among ``dtypes``; unchanged if both or none are
    there."""
    found = [name for name in grid_fp8.FORMATS if name in dtypes]
    if len(found) != 1:
        return case
    dtype, cache = (
        found[0] if name in grid_fp8.FORMATS else name for name in (case.dtype, case.cache_dtype)
    )
    return replace(case, dtype=dtype, cache_dtype=cache)


def _probes(grid: list[Case], declared: frozenset[str], dtypes: Sequence[str]) -> list[Case]:
    """Return, for each feature and dtype that is not declared, the plainest case that needs it."""
    probes: dict[str, Case] = {}
    plainest = sorted(grid, key=lambda case: (len(case.features), case.dtype not in dtypes))
    for case in plainest:
        beyond = sorted(case.features - declared)
        beyond += [name for name in case.dtypes if name not in dtypes]
        for name in beyond:
            probes.setdefault(name, case)
    return list(dict.fromkeys(probes.values()))


def _unique(grid: Iterable[Case], max_seqlen: int | None) -> list[Case]:
    if max_seqlen is not None:
        grid = (case.clamped(max_seqlen) for case in grid)
    return [case for case in dict.fromkeys(grid) if not case.flaws()]


def _quick() -> Iterator[Case]:
    for index, options in enumerate(_ALONE):
        half, other = HALF[index % 2], HALF[1 - index % 2]
        yield _dense(65, 97, dtype=half, **options)
        yield _dense(*SHAPES[index % 5], dtype=other, backward=True, **options)
        yield _dense(97, 65, batch=1, dtype="float32", backward=True, **options)
    for index, options in enumerate((*_GRADIENT, *_PAIRS, *_GRADIENT_PAIRS)):
        dtype = DTYPES[index % 3]
        yield _dense(*SHAPES[index % 5], dtype=dtype, backward=True, **options)
    for index, dim in enumerate(_DIMS):
        dtype = HALF[index % 2]
        yield _dense(33, 65, dtype=dtype, backward=True, head_dim=dim)
        yield _dense(17, 17, dtype=dtype, head_dim=_DIMS[-index - 1], head_dim_v=dim, causal=True)
    for index, rows in enumerate(_EDGES):
        keys = _EDGES[(index * 7 + 3) % len(_EDGES)]
        yield _dense(rows, keys, dtype=HALF[index % 2], causal=True, backward=True, head_dim=32)
    yield _dense(0, 5, batch=0, backward=True)
    # Plain inference past the tile edges of every kernel, for those that do only this much.
    for dim in (64, 128):
        for index, (rows, keys) in enumerate(((129, 257), (65, 33), (1, 130), (200, 200))):
            for causal in (False, True):
                dtype = HALF[(index + causal) % 2]
                heads = {"head_dim": dim, "heads_q": 4, "heads_k": (2, 4)[index % 2]}
                yield _dense(rows, keys, dtype=dtype, causal=causal, **heads)
    # Training likewise, by the kernels that add in any order and by those that do not.
    for index, (dim, deterministic, dtype) in enumerate(
        itertools.product((64, 128), (False, True), HALF)
    ):
        fields = {"head_dim": dim, "heads_q": 4, "deterministic": deterministic, "dtype": dtype}
        causal = (index + index // 2) % 2 == 0
        yield _dense(129, 257, batch=1, backward=True, causal=causal, **fields)
        if deterministic and dtype == "bfloat16":
            yield _dense(129, 257, batch=1, backward=True, softcap=30.0, **fields)
    for index, recipe in enumerate(_VALUES):
        yield _dense(65, 513, dtype=HALF[index % 2], backward=True, recipe=recipe, softcap=50.0)
        yield _dense(64, 64, dtype=DTYPES[-index % 3], backward=True, recipe=recipe)
    # A scale that is no power of two, which PyTorch's CPU kernels round in two ways.
    large = {"dtype": "float32", "head_dim": 72, "recipe": "growing", "backward": True}
    yield _dense(129, 129, batch=1, **large)
    # Windows that leave whole tiles of keys empty, at either end.
    yield _dense(257, 257, backward=True, window=(3, 0), head_dim=32)
    yield _dense(33, 513, backward=True, window=(8, -1), head_dim=32)
    yield _dense(33, 513, dtype="float16", backward=True, window=(450, -1), recipe="growing")
    for index, layout in enumerate(LAYOUTS):
        yield _dense(33, 65, dtype=HALF[index % 2], backward=True, layout=layout, bias="full")
        yield _dense(64, 64, dtype=HALF[index % 2], backward=True, layout=layout, head_dim=40)
        packed = {"dtype": HALF[index % 2], "layout": layout, "backward": True, "slack": 3}
        yield _packed(PACKED[index % 3], "varlen", **packed)
    yield from _quick_packed()
    yield from _quick_caches()
    yield from _invariant()
    yield from _dropout_bits(4)
    yield from grid_hostile.quick()
    yield from grid_mods.mods(1)
    yield from grid_mods.quick()
    yield from grid_mods.lists(1)
    yield from grid_fp8.quick()
    yield from grid_bands.quick()
    yield from grid_cover.quick()
    yield from grid_decode.quick()
    yield from grid_latent.quick()
    yield from grid_trees.quick()
    yield from grid_waves.quick()
    yield from grid_wide.quick()


def _invariant() -> Iterator[Case]:
    """Return cases for the kernels of batch_invariant, which serve every layout."""
    fields: Fields = {"batch_invariant": True, "heads_q": 4}
    yield _dense(65, 97, causal=True, backward=True, **fields)
    yield _dense(97, 65, dtype="float16", window=(30, 5), softcap=5.0, sinks=True, **fields)
    yield _dense(33, 65, dtype="float16", bias="full", head_dim=96, **fields)
    yield _packed(PACKED[1], "varlen", causal=True, backward=True, **fields)
    yield _packed(PACKED[0], "varlen", causal=True, page_size=16, **fields)
    yield _packed(CACHES[0], "kvcache", dtype="float16", head_dim=128, causal=True, **fields)
    yield _packed(APPENDS[0], "kvcache", new_keys=1, page_size=32, slack=2, causal=True, **fields)


def _quick_packed() -> Iterator[Case]:
    for index, lengths in enumerate(PACKED):
        yield _packed(lengths, "varlen", dtype=DTYPES[index % 3], backward=True, causal=True)
    options: tuple[Fields, ...] = (
        {"used_q": True},
        {"used_k": True, "causal": True},
        {"used_q": True, "used_k": True, "slack": 4, "dlse": "both"},
        {"dropout_p": 0.3, "heads_q": 4},
        {"dropout_p": 0.3, "used_k": True, "used_q": True},
        {"alibi": "batch", "window": (9, 9)},
        {"bias": "heads", "bias_grad": True},
        {"bias": "bool", "sinks": True, "slack": 2},
        {"softcap": 3.0, "deterministic": True, "heads_q": 6},
        {"head_dim": 59, "head_dim_v": 111, "slack": 1},
        {"page_size": 16},
        {"page_size": 1, "heads_q": 4, "causal": True},
        {"page_size": 16, "used_k": True, "used_q": True, "dlse": "both"},
        {"page_size": 32, "dropout_p": 0.2, "slack": 3},
    )
    for index, fields in enumerate(options):
        dtype = DTYPES[index % 3]
        yield _packed(PACKED[index % 3], "varlen", dtype=dtype, backward=True, **fields)
    shared = ((5, 9, 33), (40, 33, 17))
    for backward in (False, True):
        fields = {"page_size": 16, "shared": True, "backward": backward}
        yield _packed(shared, "varlen", **fields, deterministic=backward)


def _quick_caches() -> Iterator[Case]:
    for index, options in enumerate(_CACHE_OPTIONS):
        lengths = CACHES[index % len(CACHES)]
        yield _packed(lengths, "kvcache", dtype=DTYPES[index % 3], **options)
    for index, rotary in enumerate(("", *ROTARIES)):
        appends: tuple[Fields, ...] = (
            {"causal": index % 2 == 0},
            {"page_size": (16, 1)[index % 2], "causal": True},
            {"batch_idx": True, "rotary_seqlens": bool(rotary), "leftpad": index % 2 == 1},
        )
        for lengths, options in zip(APPENDS, appends, strict=True):
            fields = {"dtype": DTYPES[index % 3], "rotary": rotary, "slack": index, **options}
            yield _packed(lengths, "kvcache", new_keys=lengths[0][0], **fields)
    for index, rotary in enumerate(FLOAT32_ROTARIES):
        fields = {"dtype": HALF[index % 2], "rotary": rotary, "head_dim": (64, 72)[index // 2]}
        fields |= {"causal": True, "slack": 3, "layout": LAYOUTS[index]}
        yield _packed(APPENDS[index % 3], "kvcache", new_keys=APPENDS[index % 3][0][0], **fields)
    # Decode with every number of rows and heads that share a key head, around blocks of lines.
    for index, (dim, rows, group) in enumerate(
        itertools.product((64, 128, 256), (1, 3, 8), (1, 4, 8))
    ):
        lengths = (rows,) * 2, ((97, 300), (64, 256), (31, 33))[index % 3]
        fields = {"head_dim": dim, "heads_q": 2 * group, "dtype": HALF[index % 2]}
        yield _packed(lengths, "kvcache", causal=index % 2 == 0, **fields)
    # So many splits that what combines them meets across wavefronts, and more than it has slots.
    for index, (dim, splits, keys) in enumerate(((64, 20, 513), (128, 9, 257), (256, 32, 513))):
        fields = {"head_dim": dim, "num_splits": splits, "dtype": HALF[index % 2]}
        yield _packed(((1, 1), (keys, 17)), "kvcache", heads_q=4, **fields)
    # A sink counts once, however many splits there are.
    for dtype in HALF:
        fields = {"dtype": dtype, "num_splits": 3, "sinks": True, "head_dim": 128}
        yield _packed(((1, 1), (130, 33)), "kvcache", **fields)
    # Splits whose rows do not fill a workgroup, with a head_dim that leaves threads of a row
    # without elements. The LSE of the row behind the first sequence's last one is far larger.
    for dtype in HALF:
        fields = {"dtype": dtype, "num_splits": 9, "recipe": "big", "scale": 0.25, "head_dim": 96}
        yield _packed(((1, 1, 1), (1, 300, 130)), "kvcache", heads_q=5, heads_k=1, **fields)


def _dropout_bits(count: int) -> Iterator[Case]:
    """Return cases in which V is the identity, so that the dropout bits can be read from the
    output."""
    axes: Fields = {
        "dtype": DTYPES,
        "dropout_p": (0.1, 0.5, 0.93),
        "causal": (False, True),
        "heads_q": (2, 6),
        "recipe": ("identity",),
    }
    for index, fields in enumerate(draws("bits", count, axes)):
        keys = (31, 64, 130, 256)[index % 4]
        yield _dense(33, keys, head_dim_v=max(keys, 64), **fields)
        lengths = ((9, 33, 1), (64, 31, 17))
        yield _packed(lengths, "varlen", **fields, slack=index % 3)


def _full() -> Iterator[Case]:
    yield from _quick()
    for options in (*_ALONE, *_PAIRS):
        for index, dtype in enumerate(DTYPES):
            for place, shape in enumerate(SHAPES):
                yield _dense(*shape, dtype=dtype, backward=(index + place) % 2 == 0, **options)
    for options in (*_GRADIENT, *_GRADIENT_PAIRS):
        for dtype in DTYPES:
            for shape in SHAPES[:4]:
                yield _dense(*shape, dtype=dtype, backward=True, **options)
    yield from grid_mods.mods(3)
    yield from grid_mods.everywhere()
    yield from grid_mods.lists(3)
    yield from _bias_tiles()
    yield from _many_lengths()
    yield from _many_tiles()
    yield from _full_dense()
    yield from _full_packed()
    yield from _full_caches()
    yield from _dropout_bits(40)
    yield from grid_fp8.full()
    yield from grid_bands.full()
    yield from grid_cover.full()
    yield from grid_decode.full()
    yield from grid_kernels.full()
    yield from grid_latent.full()
    yield from grid_objects.full()
    yield from grid_trees.full()
    yield from grid_waves.full()
    yield from grid_wide.full()
    yield from grid_hostile.full()
    yield from grid_mods.below_zero()


def _bias_tiles() -> Iterator[Case]:
    """Return cases whose bias begins each row at a multiple of 16 bytes, which kernels may copy in
    tiles: every pair of head dims, ends inside a tile and beyond one."""
    dims = (64, 96, 128, (192, 128), 192, 256)
    for index, (dim, deterministic) in enumerate(itertools.product(dims, (False, True))):
        width, width_v = dim if isinstance(dim, tuple) else (dim, dim)
        fields: dict[str, Any] = {
            "head_dim": width,
            "head_dim_v": width_v,
            "dtype": HALF[index % 2],
        }
        fields |= {"bias": ("full", "heads", "hidden")[index % 3], "deterministic": deterministic}
        rows, keys = ((129, 264), (65, 104), (200, 128))[index // 2 % 3]
        causal = index % 4 == 1
        yield _dense(rows, keys, batch=2, heads_q=4, backward=True, causal=causal, **fields)
    # The other dtype of HIP's kernel for a bias alone at 96.
    yield _dense(129, 264, batch=2, heads_q=4, backward=True, head_dim=96, head_dim_v=96,
                 dtype="float16", bias="full")  # fmt: skip


def _many_lengths() -> Iterator[Case]:
    """Return packed cases with more sequences than a wavefront has lanes, and with different
    lengths."""
    rows = tuple((7 * i * i) % 151 if i % 5 else 0 for i in range(70))
    keys = tuple(n + 13 * (i % 3) for i, n in enumerate(rows))
    for index, lengths in enumerate(((rows, rows), (rows, keys))):
        for causal, deterministic in itertools.product((False, True), (False, True)):
            fields: dict[str, Any] = {"causal": causal, "deterministic": deterministic}
            fields |= {"heads_q": (2, 6)[index], "dtype": HALF[deterministic], "slack": 5}
            yield _packed(lengths, "varlen", backward=True, **fields)


def _many_tiles() -> Iterator[Case]:
    """Return cases with more tiles of rows than a GPU runs at once, so that a persistent block
    takes several: with one tile per head, and with two."""
    for dim, rows, heads in ((64, 70, 144), (64, 200, 72), (128, 200, 72)):
        half, causal = HALF[rows > 100], rows > 100
        yield _dense(rows, 65, head_dim=dim, dtype=half, heads_q=heads, heads_k=36, causal=causal)


def _full_dense() -> Iterator[Case]:
    common: Fields = {"dtype": DTYPES, "batch": (1, 2, 3), "backward": (False, True)}
    axes: Fields = {
        "rows": _EDGES,
        "keys": _LONG,
        "head_dim": (8, 32, 64, 128),
        "causal": (False, True),
    }
    for draw in draws("lengths", 300, {**common, **axes}):
        yield _dense(**draw)
    axes = {
        "rows": (17, 33, 64),
        "keys": (17, 33, 64),
        "head_dim": _DIMS,
        "head_dim_v": _DIMS,
        "heads_q": (2, 4),
        "causal": (False, True),
    }
    for draw in draws("dims", 240, {**common, **axes}):
        yield _dense(**draw)
    axes = {
        "rows": (1, 17, 65, 129),
        "keys": (16, 65, 129, 257),
        "recipe": _VALUES,
        "layout": LAYOUTS,
        "options": (*_ALONE, *_PAIRS),
    }
    for draw in draws("values", 300, {**common, **axes}):
        yield _dense(**draw)
    axes = {
        "rows": _EDGES,
        "keys": _EDGES,
        "window": ((0, 0), (1, 0), (0, 1), (3, 70), (64, 64), (-1, 0), (130, -1)),
        "options": ({}, {"sinks": True}, {"softcap": 6.0}, {"dropout_p": 0.2}, {"alibi": "heads"}),
    }
    for draw in draws("windows", 240, {**common, **axes}):
        yield _dense(**draw)
    yield from _mixed("dense", 500)


def _mixed(kind: str, count: int) -> Iterator[Case]:
    """Return samples over all axes; combinations without a meaning are left out."""
    dense = kind == "dense"
    axes: Fields = {
        "dtype": DTYPES,
        "head_dim": (8, 40, 64, 111, 128),
        "head_dim_v": (40, 64, 128),
        "heads_q": (2, 4, 6),
        "heads_k": (1, 2),
        "causal": (False, True),
        "window": (None, None, (20, 0), (5, -1)),
        "softcap": (0.0, 0.0, 3.0),
        "bias": ("", "", "", "full", "heads", "bool", "hidden"),
        "alibi": ("", "", "heads", "batch"),
        "sinks": (False, True),
        "dropout_p": (0.0, 0.0, 0.4),
        "recipe": _VALUES,
        "layout": LAYOUTS,
        "backward": (True, True, False),
        "gradient": ({}, {"dlse": "both"}, {"dlse": "only"}, {"deterministic": True}),
        "bias_grad": (False, True),
    }
    of_dense: Fields = {
        "rows": (1, 2, 17, 64, 65, 130),
        "keys": (1, 16, 33, 64, 129, 257),
        "batch": (1, 2),
    }
    of_packed: Fields = {
        "lengths": PACKED,
        "used_q": (False, True),
        "used_k": (False, True),
        "slack": (0, 0, 3),
        "page_size": (0, 0, 1, 16, 64),
    }
    axes = {**axes, **(of_dense if dense else of_packed)}
    for draw in draws(f"mixed_{kind}", count, axes):
        if not draw["backward"]:
            draw |= {"dlse": "", "deterministic": False}
        draw["bias_grad"] = draw["bias_grad"] and draw["backward"] and bool(draw["bias"])
        if draw["bias"] == "bool":
            draw["bias_grad"] = False
        yield _dense(**draw) if dense else _packed(kind=kind, **draw)


def _full_packed() -> Iterator[Case]:
    axes: Fields = {
        "dtype": DTYPES,
        "backward": (False, True),
        "lengths": PACKED,
        "used_q": (False, True),
        "used_k": (False, True),
        "slack": (0, 3),
        "page_size": (0, 0, 1, 16, 32),
        "layout": LAYOUTS,
        "options": (*_ALONE, *_PAIRS),
    }
    for draw in draws("packed", 400, axes):
        yield _packed(kind="varlen", **draw)
    yield from _mixed("varlen", 300)


def _full_caches() -> Iterator[Case]:
    # Eight heads a key head at every pair of head dims that decode kernels are compiled for: 8, 24
    # and 56 rows of all heads, which take one, two and four matrix products of 16.
    for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        for index, rows in enumerate((1, 3, 7)):
            fields = {"head_dim": dim, "head_dim_v": dim_v, "heads_q": 8, "heads_k": 1}
            for dtype in HALF:
                lengths = (rows,), (97 + index,)
                yield _packed(lengths, "kvcache", dtype=dtype, causal=rows > 1, **fields)
    common: Fields = {
        "dtype": DTYPES,
        "layout": LAYOUTS,
        "slack": (0, 1, 7),
        "leftpad": (False, False, True),
        "packed_q": (False, True),
        "causal": (False, True),
        "num_splits": (0, 0, 1, 4),
        "heads_q": (2, 4, 8),
        "storage": ({}, {"batch_idx": True}, {"page_size": 1}, {"page_size": 16}),
        "options": (*(x for x in (*_ALONE, *_PAIRS) if not {"dropout_p"} & set(x)),),
    }
    axes: Fields = {"lengths": CACHES}
    for draw in draws("caches", 300, {**common, **axes}):
        yield _packed(kind="kvcache", **draw)
    axes = {
        "lengths": APPENDS,
        "rotary": ("", *ROTARIES),
        "rotary_seqlens": (False, True),
        "new_keys": (1, 3, 7),
    }
    for draw in draws("appends", 400, {**common, **axes}):
        draw["rotary_seqlens"] = draw["rotary_seqlens"] and bool(draw["rotary"])
        yield _packed(kind="kvcache", **draw)
