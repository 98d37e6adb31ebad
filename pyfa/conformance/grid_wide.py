"""The grid's cases of head dims above 256: up to 576 for q and k, up to 512 for v.

They vary whether q and k, v, or all of them have more than 256 elements, and how many rows there
are (tiles of 8 to 64 rows, of one head or of all heads of a group). They also cover what only
kernels for such head dims do: compute V in halves, process fewer keys at a time, and pad to the
head_dim that the kernel is compiled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cases import LAYOUTS, Case, dense, packed
from .grid_axes import APPENDS, CACHES, HALF, PACKED, draws

_512: Mapping[str, Any] = {"head_dim": 512}
_576: Mapping[str, Any] = {"head_dim": 576, "head_dim_v": 512}
_320: Mapping[str, Any] = {"head_dim": 320}
_DIMS = (_512, _576, _320, {"head_dim": 257}, {"head_dim": 384, "head_dim_v": 128},
         {"head_dim": 128, "head_dim_v": 264}, {"head_dim": 64, "head_dim_v": 500})  # fmt: skip
_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {}, {"causal": True}, {"causal": True}, {"window": (20, 5)}, {"window": (40, -2)},
    {"causal": True, "attention_chunk": 24}, {"softcap": 5.0, "sinks": True},
    {"alibi": "heads", "causal": True}, {"bias": "full"}, {"scale": -0.02},
)  # fmt: skip


def quick() -> Iterator[Case]:
    for index, (dim, dim_v) in enumerate(((512, 512), (576, 512), (320, 64), (64, 500))):
        dims: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim_v, "dtype": HALF[index % 2]}
        yield dense(33, 65, **dims, heads_q=4, backward=index < 2, causal=True)
    yield dense(33, 65, batch=1, dtype="float32", backward=True, dlse="both", **_320)
    # Forward, and for those that have it backward, past the tiles of every kernel.
    for backward in (False, True):
        yield dense(130, 97, batch=1, heads_q=4, causal=True, backward=backward, **_512)
        yield dense(65, 150, batch=1, window=(30, 4), backward=backward, **_576)
        yield packed(PACKED[1], "varlen", dtype="float16", heads_q=4, backward=backward, **_320)
    yield packed(PACKED[0], "varlen", page_size=16, causal=True, **_512)
    yield packed(CACHES[1], "kvcache", heads_q=4, heads_k=1, num_splits=3, **_512)
    yield packed(CACHES[3], "kvcache", dtype="float16", page_size=16, causal=True, **_576)
    yield packed(CACHES[2], "kvcache", heads_q=8, leftpad=True, softcap=4.0, sinks=True, **_320)
    yield packed(APPENDS[1], "kvcache", new_keys=3, rotary="halves_part", causal=True, **_512)
    cache = {"cache_dtype": "float8_e4m3fn", "scales": "head", "heads_q": 4}
    yield packed(CACHES[0], "kvcache", page_size=16, **cache, **_512)
    yield dense(70, 40, layout="unaligned", head_dim=259, bias="full", sinks=True, dtype="float16")


def full() -> Iterator[Case]:
    common: Mapping[str, Any] = {
        "dtype": HALF,
        "dims": _DIMS,
        "heads_q": (2, 4, 8),
        "heads_k": (1, 2),
        "layout": LAYOUTS,
        "recipe": ("plain", "growing", "huge", "offset"),
        "options": _OPTIONS,
    }
    axes: Mapping[str, Any] = {
        "rows": (1, 16, 17, 63, 64, 65, 129),
        "keys": (1, 16, 31, 64, 65, 130, 257),
        "batch": (1, 2),
        "backward": (False, False, True),
    }
    for draw in draws("wide_dense", 90, {**common, **axes}):
        yield dense(**draw)
    axes = {
        "lengths": PACKED,
        "used_q": (False, True),
        "used_k": (False, True),
        "slack": (0, 3),
        "page_size": (0, 1, 16, 64),
        "backward": (False, False, True),
    }
    for draw in draws("wide_packed", 60, {**common, **axes}):
        yield packed(kind="varlen", **draw)
    axes = {
        "lengths": CACHES,
        "slack": (0, 7),
        "leftpad": (False, False, True),
        "num_splits": (0, 0, 1, 4),
        "page_size": (0, 0, 1, 16),
    }
    for draw in draws("wide_caches", 60, {**common, **axes}):
        yield packed(kind="kvcache", **draw)
