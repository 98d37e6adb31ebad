"""The grid's float8 cases: 8-bit queries, keys and values, and 8-bit caches with 16-bit queries.

Every kind of scale is combined with every layout: dense, packed, pages, cache rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cases import FLOAT8_RECIPES, FLOAT32_ROTARIES, LAYOUTS, ROTARIES, Case, dense, packed
from .grid_axes import APPENDS, draws

FORMATS = ("float8_e4m3fn", "float8_e4m3fnuz")
_SCALES: tuple[str | int, ...] = ("head", 16, "tensor", 64, "", 32)
_DENSE: tuple[Mapping[str, Any], ...] = (
    {},
    {"causal": True, "heads_q": 4},
    {"window": (17, 5), "head_dim": 128},
    {"head_dim": 40, "head_dim_v": 128, "heads_q": 6, "heads_k": 3},
    {"causal": True, "head_dim": 256, "out_dtype": "float16"},
    {"softcap": 3.0, "alibi": "heads", "causal": True},
    {"bias": "full", "sinks": True},
)
_PACKED: tuple[Mapping[str, Any], ...] = (
    {"causal": True, "heads_q": 4},
    {"used_k": True, "used_q": True, "slack": 3},
    {"page_size": 16, "used_k": True},
    {"page_size": 32, "causal": True, "head_dim": 96},
)
_CACHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"used_k": True, "slack": 40, "heads_q": 8},
    {"page_size": 16, "heads_q": 8},
    {"page_size": 64, "causal": True},
    {"batch_idx": True, "slack": 3, "num_splits": 3},
    {"leftpad": True, "causal": True},
    {"packed_q": True, "page_size": 16},
    {"new_keys": 3, "slack": 5},
)
_LENGTHS = ((65, 0, 17, 1), (65, 33, 0, 130))
_CACHED = (((1, 1, 1), (65, 17, 128)), ((5, 5), (48, 48)), ((33, 33), (33, 130)))


def quick() -> Iterator[Case]:
    yield dense(16, 16, batch=1, dtype="float8_e4m3fn")
    yield dense(16, 16, batch=1, dtype="float8_e4m3fnuz", scales="head")
    for index, options in enumerate(_DENSE):
        fields = {"dtype": FORMATS[index == 1], "scales": _SCALES[index % 6], **options}
        yield dense((65, 129, 33)[index % 3], (97, 130, 65)[index % 3], **fields)
    for index, recipe in enumerate(FLOAT8_RECIPES):
        yield dense(33, 513, dtype="float8_e4m3fn", recipe=recipe, causal=index == 2)
    yield dense(17, 513, dtype="float8_e4m3fn", recipe="sink", sinks=True)
    for index, element in enumerate(("q=nan", "k=nan", "v=nan")):
        fields = {"hostile": element, "causal": index > 0}
        yield dense(33, 65, dtype="float8_e4m3fn", scales=_SCALES[index], **fields)
    yield packed(_CACHED[0], "kvcache", cache_dtype="float8_e4m3fn", heads_q=8, hostile="k=nan")
    for index, options in enumerate(_PACKED):
        yield packed(_LENGTHS, "varlen", dtype="float8_e4m3fn", scales=_SCALES[index], **options)
    for index, options in enumerate(_CACHES):
        lengths = _CACHED[index % 3 if "new_keys" not in options else 1]
        dtypes = {"dtype": ("bfloat16", "float16")[index % 2], "cache_dtype": FORMATS[index == 4]}
        if index in (1, 6, 7):
            dtypes = {"dtype": "float8_e4m3fn"}
        yield packed(lengths, "kvcache", scales=_SCALES[(index + 1) % 4], **dtypes, **options)
    # The queries and the new keys are rounded again after rotary, each to its own dtype.
    rotated: tuple[Mapping[str, Any], ...] = (
        {"dtype": "float8_e4m3fn", "rotary": "halves_part_float32", "page_size": 16},
        {"cache_dtype": "float8_e4m3fn", "rotary": "interleaved", "dtype": "float16"},
    )
    for scales, options in zip(("", "head"), rotated, strict=True):
        fields = {"new_keys": 3, "causal": True, "slack": 2, "scales": scales}
        yield packed(APPENDS[1], "kvcache", **fields, **options)


def full() -> Iterator[Case]:
    common: Mapping[str, Any] = {
        "scales": _SCALES,
        "heads_q": (2, 4, 8),
        "head_dim": (16, 64, 80, 128),
        "head_dim_v": (64, 128),
        "causal": (False, True),
        "layout": LAYOUTS,
    }
    axes: Mapping[str, Any] = {
        "dtype": FORMATS,
        "out_dtype": ("", "float16"),
        "rows": (1, 17, 64, 129, 257),
        "keys": (1, 33, 64, 130, 257, 513),
        "recipe": ("plain", "growing", "huge", "offset", "rotated"),
        "options": _DENSE,
    }
    # Rotary before every kind of float8 cache. Its new rows are rounded again.
    for index, rotary in enumerate((*ROTARIES, *FLOAT32_ROTARIES)):
        fields: dict[str, Any] = {
            "rotary": rotary,
            "new_keys": APPENDS[index % 3][0][0],
            "slack": 2,
        }
        fields |= {
            "causal": index % 2 == 0,
            "scales": _SCALES[index % 6],
            "head_dim": (64, 80)[index % 2],
        }
        fields |= ({"page_size": 16}, {"batch_idx": True}, {})[index // 2 % 3]
        half = ("bfloat16", "float16")[index % 2]
        yield packed(APPENDS[index % 3], "kvcache", dtype=half, cache_dtype=FORMATS[0], **fields)
        if rotary in FLOAT32_ROTARIES:
            yield packed(APPENDS[index % 3], "kvcache", dtype=FORMATS[0], heads_q=8, **fields)
    for draw in draws("float8 dense", 100, {**common, **axes}):
        yield dense(**draw)
    axes = {"dtype": FORMATS, "options": _PACKED}
    for draw in draws("float8 packed", 60, {**common, **axes}):
        yield packed(_LENGTHS, "varlen", **draw)
    axes = {
        "lengths": _CACHED,
        "dtype": ("bfloat16", "float16", *FORMATS),
        "cache_dtype": FORMATS,
        "options": _CACHES,
    }
    for draw in draws("float8 caches", 100, {**common, **axes}):
        if draw["dtype"] in FORMATS:
            draw["cache_dtype"] = ""
        yield packed(draw.pop("lengths"), "kvcache", **draw)
