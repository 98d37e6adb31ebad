"""The grid's cases of ``attention_chunk``, and of windows with a negative bound. Such a window
excludes keys next to the query.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cases import Case, dense, packed
from .grid_axes import DTYPES, HALF, Fields, Lengths, draws

# (rows, keys): rows in front of the first key, and several tiles of keys.
_SHAPES = ((65, 97), (97, 65), (129, 48), (17, 513), (65, 65))
_ALONE: tuple[Fields, ...] = (
    {"attention_chunk": 16},
    {"attention_chunk": 40, "causal": True},
    {"attention_chunk": 1},
    {"attention_chunk": 1000},
    {"attention_chunk": 37, "window": (20, 5)},
    {"attention_chunk": 37, "window": (-1, 3)},
    {"window": (8, -3)},
    {"window": (-3, 8)},
    {"window": (-1, -4)},
    {"window": (-6, -1)},
    {"window": (-5, 3)},
    {"causal": True, "window": (30, -7)},
    {"window": (40, -9), "attention_chunk": 33},
    {"window": (-70, -1), "sinks": True},
)
_PAIRS: tuple[Fields, ...] = (
    {"attention_chunk": 24, "alibi": "heads", "causal": True},
    {"attention_chunk": 24, "dropout_p": 0.3},
    {"attention_chunk": 19, "bias": "full", "heads_q": 4},
    {"attention_chunk": 50, "sinks": True, "heads_q": 6, "softcap": 4.0},
    {"window": (9, -2), "alibi": "batch"},
    {"window": (-2, 9), "dropout_p": 0.3, "heads_q": 4, "heads_k": 1},
    {"window": (-4, -1), "bias": "bool", "softcap": 5.0},
    {"window": (12, -5), "dlse": "both", "causal": True},
)
# Around the edges of tiles of 16 to 128 rows and keys, and beyond them.
_TILES: tuple[tuple[int, int, Fields], ...] = (
    (257, 257, {"attention_chunk": 64, "causal": True}),
    (200, 200, {"attention_chunk": 128}),
    (129, 257, {"attention_chunk": 100, "causal": True, "heads_q": 4}),
    (33, 513, {"attention_chunk": 130}),
    (257, 257, {"window": (100, -64)}),
    (129, 257, {"window": (-65, 140)}),
)
_PACKED: tuple[Lengths, ...] = (
    ((65, 0, 17, 1), (65, 33, 0, 1)),
    ((5, 64, 33), (129, 64, 31)),
)
_CACHES: tuple[Lengths, ...] = (
    ((1, 1, 1), (65, 17, 128)),
    ((5, 5), (48, 97)),
    ((33, 33), (33, 130)),
    ((2, 2, 2, 2), (0, 1, 2, 163)),
)
_STORED: tuple[Fields, ...] = (
    {},
    {"page_size": 16, "heads_q": 8},
    {"leftpad": True, "batch_idx": True, "slack": 3},
    {"num_splits": 3, "alibi": "heads"},
    {"packed_q": True, "page_size": 16, "slack": 2},
    {"new_keys": 1, "page_size": 16},
)
_BANDS: tuple[Fields, ...] = (
    {"attention_chunk": 40, "causal": True},
    {"window": (50, -2)},
    {"attention_chunk": 24, "window": (30, -3)},
    {"window": (-1, -5)},
)


def quick() -> Iterator[Case]:
    """Return cases of each such mask: alone, with the features that it interacts with, around tile
    edges, packed, and in a cache."""
    for index, options in enumerate((*_ALONE, *_PAIRS)):
        gradient: Fields = {"backward": index % 8 != 4, "deterministic": index % 8 in (0, 3, 6)}
        rows, keys = _SHAPES[index % 5]
        yield dense(rows, keys, dtype=DTYPES[index % 3], **gradient, **options)
    for index, (rows, keys, options) in enumerate(_TILES):
        fields: Fields = {"head_dim": (64, 128)[index % 2], "dtype": HALF[index % 2], "batch": 1}
        yield dense(rows, keys, backward=True, deterministic=index % 4 == 1, **fields, **options)
    for index, lengths in enumerate(_PACKED):
        yield packed(lengths, "varlen", dtype=HALF[index], backward=True, **_BANDS[index])
    for index, stored in enumerate(_STORED):
        yield _cached(index, index, stored)
    fp8: Fields = {"dtype": "float8_e4m3fn", "head_dim": 128}
    yield dense(65, 97, attention_chunk=40, causal=True, **fp8)


def full() -> Iterator[Case]:
    """Return the same cases in other shapes, dtypes and plans, and cases of random sizes with
    features that change a plan."""
    for index, options in enumerate((*_ALONE, *_PAIRS)):
        half, other = HALF[index % 2], HALF[1 - index % 2]
        forward = {name: value for name, value in options.items() if name != "dlse"}
        yield dense(65, 97, dtype=half, **forward)
        gradient: Fields = {"backward": True, "deterministic": index % 2 == 0}
        rows, keys = _SHAPES[(index + 2) % 5]
        yield dense(rows, keys, dtype=other, **gradient, **options)
        yield dense(40, 50, batch=1, dtype="float32", backward=True, **options)
    for index, (rows, keys, options) in enumerate(_TILES):
        for dim in (64, 128):
            fields: Fields = {"head_dim": dim, "dtype": HALF[index % 2], "batch": 1}
            yield dense(rows, keys, **fields, **options)
            for deterministic in (False, True):
                how: Fields = {"backward": True, "deterministic": deterministic}
                yield dense(rows, keys, **how, **fields, **options)
    for index, options in enumerate(_BANDS):
        for lengths in _PACKED:
            how = {"dtype": DTYPES[index % 3], "backward": True, "used_q": index % 2 == 0}
            yield packed(lengths, "varlen", **how, **options)
        for place, stored in enumerate(_STORED):
            yield _cached(index, place, stored)
    yield packed(_PACKED[1], "varlen", page_size=16, attention_chunk=20, causal=True)
    fp8: Fields = {"dtype": "float8_e4m3fn", "head_dim": 128}
    yield dense(65, 97, window=(30, -4), **fp8)
    cache: Fields = {"cache_dtype": "float8_e4m3fn", "head_dim": 128, "causal": True}
    yield packed(_CACHES[0], "kvcache", attention_chunk=40, **cache)
    yield from _drawn()


def _cached(band: int, place: int, stored: Fields) -> Case:
    """Return a case of a band of ``_BANDS`` over a cache."""
    dtype, lengths = DTYPES[(band + place) % 3], _CACHES[(band + place) % 4]
    fields = {**stored, "new_keys": 0} if 0 in lengths[1] else stored
    return packed(lengths, "kvcache", dtype=dtype, **_BANDS[band % 4], **fields)


def _drawn() -> Iterator[Case]:
    axes: Fields = {
        "dtype": DTYPES,
        "rows": (1, 17, 64, 65, 130),
        "keys": (16, 65, 128, 129, 257),
        "head_dim": (40, 64, 128, 256),
        "backward": (False, True),
        "causal": (False, True),
        "attention_chunk": (0, 1, 13, 32, 64, 100, 128),
        "window": (None, None, (20, -3), (-9, -1), (-1, -8), (7, 0)),
        "heads_q": (2, 4),
        "terms": ({}, {}, {"alibi": "heads"}, {"dropout_p": 0.2}, {"sinks": True}),
    }
    for draw in draws("bands", 80, axes):
        if draw["attention_chunk"] or draw["window"]:
            yield dense(**draw)
