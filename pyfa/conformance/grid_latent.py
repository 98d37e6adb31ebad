"""The grid's cases of latent attention.

The cache has one head, and its first elements are the values. The cases vary the number of rows
over all heads (which decides how many products and workgroups a decode needs), the storage of the
keys, and the lists of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from .cases import LAYOUTS, Case, packed
from .grid_axes import DTYPES, HALF, draws

_DIMS: Mapping[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads_k": 1, "scale": 192**-0.5}
_LENGTHS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 1, 1), (65, 1, 130)),
    ((2, 2, 2, 2), (0, 1, 2, 63)),
    ((3, 3), (97, 33)),
)
_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"heads_q": 16},
    {"heads_q": 16, "page_size": 16, "causal": True},
    {"heads_q": 5, "page_size": 7, "slack": 3, "sinks": True},
    {"heads_q": 40, "causal": True, "num_splits": 3},
    {"heads_q": 8, "sinks": True, "num_splits": 2, "recipe": "growing"},
    {"heads_q": 4, "head_dim": 320, "head_dim_v": 256, "page_size": 64, "causal": True},
)
_LISTS: tuple[Mapping[str, Any], ...] = (
    {"heads_q": 16, "topk": 37},
    {"heads_q": 16, "topk": 70, "page_size": 5, "used_q": True},
    {"heads_q": 3, "topk": 9, "slack": 4, "causal": True, "sinks": True, "num_splits": 2},
)
# As many heads as DeepSeek's models have: several workgroups of decode, with and without lists.
_MANY: tuple[Mapping[str, Any], ...] = (
    {"lengths": ((1, 1), (70, 0)), "heads_q": 64, "page_size": 16, "recipe": "growing"},
    {"lengths": ((2,), (45,)), "heads_q": 128, "causal": True, "sinks": True, "num_splits": 2},
    {"lengths": ((1,), (90,)), "heads_q": 64, "topk": 70, "num_splits": 2},
    {"lengths": ((1,), (50,)), "heads_q": 128, "topk": 33, "sinks": True},
    # Several tiles of 64 keys, of one row that sees none of them, and over several splits.
    {"lengths": ((1, 1, 1), (0, 64, 500)), "heads_q": 128, "page_size": 64, "recipe": "growing"},
    {
        "lengths": ((4, 4), (2, 321)),
        "heads_q": 33,
        "causal": True,
        "page_size": 16,
        "sinks": True,
        "num_splits": 3,
    },
    # Fewer keys than rows: the first rows see none.
    {"lengths": ((5, 5), (3, 70)), "heads_q": 32, "causal": True, "num_splits": 2},
    {
        "lengths": ((2, 2), (129, 255)),
        "heads_q": 20,
        "slack": 9,
        "causal": True,
        "recipe": "growing",
    },
)
# More than 80 lines a sequence, for which gfx942 has another kernel: keys of several rounds of its
# slots and of a list, whose length is drawn, and causal rows over splits that end within a tile and
# a page. Each of the two splits has five tiles: that kernel finds addresses for four at a time. The
# largest scores are in the last.
_LINES: tuple[Mapping[str, Any], ...] = (
    {
        "lengths": ((1,), (90,)),
        "heads_q": 100,
        "topk": 70,
        "num_splits": 1,
        "recipe": "growing",
        "used_q": True,
    },
    {
        "lengths": ((2,), (157,)),
        "heads_q": 45,
        "causal": True,
        "page_size": 7,
        "sinks": True,
        "num_splits": 2,
        "recipe": "growing",
    },
)
# Several tiles of keys for a workgroup of many rows, which the splits that a backend chooses would
# leave one: a row that outgrows its maximum so far beside rows that do not, keys that arrive tile
# by tile, and values narrower than a kernel's columns, whose rows stand side by side. And sinks
# that several splits have.
_TILES: tuple[Mapping[str, Any], ...] = (
    {"lengths": ((3, 3), (321, 130)), "heads_q": 8, "recipe": "huge", "num_splits": 1},
    {
        "lengths": ((1, 1), (70, 33)),
        "heads_q": 96,
        "sinks": True,
        "num_splits": 2,
        "scale": 0.02,
    },
    {"lengths": ((1,), (450,)), "heads_q": 32, "num_splits": 1},
    {
        "lengths": ((2, 2), (130, 65)),
        "heads_q": 12,
        "head_dim": 192,
        "head_dim_v": 128,
        "num_splits": 1,
    },
)
_PAGES = (16, 64, 0)
# Float8 caches.
_SCALES: tuple[str | int, ...] = ("", "tensor", "head", 16)


def quick() -> Iterator[Case]:
    yield _latent(((1,), (40,)), heads_q=4)
    yield _latent(((1,), (40,)), heads_q=4, topk=20)
    for index, options in enumerate((*_OPTIONS, *_LISTS)):
        dtype = DTYPES[index % 3]
        yield _latent(_LENGTHS[index % 3], dtype=dtype, **options)
        yield _latent(_LENGTHS[(index + 1) % 3], dtype=HALF[index % 2], **options)
    for dtype, options in itertools.product(HALF, _LINES):
        yield _latent(**{"dtype": dtype, **options})
    for index, options in enumerate(_TILES):
        yield _latent(**{"dtype": HALF[index % 2], "page_size": _PAGES[index % 3], **options})
    for index, scales in enumerate(_SCALES):
        fields = {"scales": scales, "heads_q": 16, "page_size": 16 * (index % 2)}
        dtypes = {"dtype": HALF[index % 2], "cache_dtype": "float8_e4m3fn"}
        yield _latent(_LENGTHS[index % 3], **dtypes, **fields)
    fields = {"cache_dtype": "float8_e4m3fn", "scales": "head"}
    yield _latent(_LENGTHS[0], topk=20, **fields)


def full() -> Iterator[Case]:
    axes: Mapping[str, Any] = {
        "lengths": (*_LENGTHS, ((1, 1), (257, 400)), ((5, 5), (48, 200)), ((1,), (1030,))),
        "dtype": HALF,
        "heads_q": (1, 8, 16, 17, 32, 33, 64, 128),
        "page_size": (0, 1, 16, 64, 61),
        "slack": (0, 0, 9),
        "causal": (False, True),
        "sinks": (False, True),
        "num_splits": (0, 0, 1, 5),
        "layout": LAYOUTS,
        "recipe": ("plain", "growing", "huge", "offset"),
        "dims": ({}, {}, {"head_dim": 512}, {"head_dim": 192, "head_dim_v": 128}),
        "lists": ({}, {}, {"topk": 64}, {"topk": 100, "used_q": True}, {"topk": 1}),
        "cache": ({}, {}, {"cache_dtype": "float8_e4m3fn"},
                  {"cache_dtype": "float8_e4m3fnuz", "scales": "head"}),
    }  # fmt: skip
    for index, options in enumerate(_MANY):
        yield _latent(**{"dtype": HALF[index % 2], **options})
    for options, dtype, page_size in itertools.product(_TILES, HALF, _PAGES):
        yield _latent(**{"dtype": dtype, "page_size": page_size, **options})
    for draw in draws("latent", 200, axes):
        yield _latent(draw.pop("lengths"), **draw)


def _latent(lengths: tuple[tuple[int, ...], tuple[int, ...]], **options: Any) -> Case:
    return packed(lengths, "latent", **{**_DIMS, **options})
