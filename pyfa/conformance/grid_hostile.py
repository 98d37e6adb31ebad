"""The grid's cases with NaN and inf among the inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .cases import Case, dense, packed
from .grid_axes import CACHES, HALF, PACKED, Fields


def quick() -> Iterator[Case]:
    """Return cases with NaN and inf among the inputs: in masked positions, in padding, in rows and
    pages that no sequence owns."""
    for index, element in enumerate(("q=nan", "k=nan", "v=nan")):
        half, other = HALF[index % 2], HALF[1 - index % 2]
        fields: dict[str, Any] = {"hostile": element, "backward": True}
        yield dense(65, 97, dtype=half, causal=True, heads_q=4, **fields)
        yield dense(64, 64, dtype=other, causal=index > 0, deterministic=True, **fields)
        yield dense(40, 12, dtype="float32", **fields)
        yield dense(5, 7, dtype=half, hostile=element, softcap=5.0, alibi="heads", sinks=True)
        yield packed(PACKED[1], "varlen", dtype=other, causal=True, **fields)
        splits: dict[str, Any] = {"num_splits": 3} if index else {"page_size": 16}
        yield packed(CACHES[0], "kvcache", dtype=half, heads_q=8, hostile=element, **splits)
    for index, element in enumerate(("q=inf", "q=-inf", "k=inf", "v=inf")):
        half = HALF[index % 2]
        yield dense(65, 97, dtype=half, causal=True, window=(40, 0), hostile=element)
        yield dense(33, 33, dtype=half, hostile=element)
        yield packed(CACHES[0], "kvcache", dtype=half, heads_q=4, hostile=element)
    yield dense(33, 33, hostile="q=-inf", sinks=True)
    yield packed(CACHES[0], "kvcache", head_dim=80, hostile="k=-inf", heads_q=4)
    beyond: dict[str, Any] = {"hostile": "padding=inf"}
    yield packed(PACKED[0], "varlen", used_q=True, used_k=True, slack=4, backward=True, **beyond)
    yield packed(PACKED[1], "varlen", page_size=16, used_k=True, backward=True, **beyond)
    caches: tuple[Fields, ...] = (
        {"page_size": 16, "slack": 5},
        {"leftpad": True, "batch_idx": True, "slack": 3, "heads_q": 8, "num_splits": 3},
        {"new_keys": 1, "slack": 9, "dtype": "float16"},
    )
    for options in caches:
        yield packed(CACHES[0], "kvcache", **beyond, **options)


def full() -> Iterator[Case]:
    """Return cases with a NaN among new keys and values; with a NaN in V where a sink is so much
    larger than all scores of some rows that the factor of their outputs is 0 in float32 (0 · NaN is
    NaN); and with a NaN in keys that a boolean bias or a mask_mod hides from some rows."""
    for element in ("k=nan", "v=nan"):
        yield packed(((4, 4), (71, 80)), "kvcache", new_keys=5, hostile=element)
    fields: dict[str, Any] = {"sinks": True, "recipe": "mixed", "hostile": "v=nan"}
    group: dict[str, Any] = {"heads_q": 8, "heads_k": 2, **fields}
    yield dense(80, 39, batch=1, **fields)
    yield dense(64, 30, dtype="float16", causal=True, **fields)
    yield packed(((65, 200), (300, 193)), "varlen", head_dim=128, causal=True, **fields)
    yield packed(((104, 104), (176, 193)), "kvcache", heads_k=1, **fields)
    yield packed(((2, 2), (176, 193)), "kvcache", num_splits=3, **group)
    yield packed(((65, 65), (300, 193)), "kvcache", num_splits=3, causal=True, **group)
    hidden: dict[str, Any] = {"hostile": "k=nan", "heads_q": 4, "heads_k": 2}
    for index, (dim, half) in enumerate(itertools.product((64, 96, 128, 192, 256), HALF)):
        fields = {"head_dim": dim, "dtype": half, "bias": "bool", **hidden}
        terms: dict[str, Any] = {"alibi": "heads"} if index % 2 else {}
        yield dense(65, 97, backward=True, **fields)
        yield dense(70, 200, alibi="heads", causal=index % 4 > 1, **fields)
        if dim <= 128:  # with kernels for a boolean bias alone
            for element in ("k=nan", "k=inf"):
                yield dense(70, 200, causal=index % 4 > 1, **fields | {"hostile": element})
        yield packed(((3, 3), (97, 130)), "kvcache", **terms, **fields)
    yield packed(((33, 65), (97, 130)), "varlen", bias="bool", softcap=5.0, **hidden)
    for index, dim in enumerate((64, 96, 128, 256)):
        fields = {"head_dim": dim, "dtype": HALF[index % 2], "causal": True, **hidden}
        yield dense(65, 97, softcap=5.0, **fields)
    yield dense(40, 60, dtype="float32", bias="bool", backward=True, **hidden)
    yield from _last_elements()
    for element in ("q=nan", "k=nan", "v=nan"):
        masked = {**hidden, "hostile": element}
        yield dense(65, 97, mask_mod="dilated", backward=True, **masked)
        yield packed(((2, 2), (97, 130)), "kvcache", mask_mod="documents", **masked)


def _last_elements() -> Iterator[Case]:
    """Yield cases whose last element of a key hides it, with head dims that kernels round up: by
    one piece of 8 elements and by many, with one, two and four products of 16 rows."""
    dims = (24, 72, 88, 120, 136, 184, 248, 504)
    for index, dim in enumerate(dims):
        rows = (1, 4, 8)[index % 3]
        fields: dict[str, Any] = {"dtype": HALF[index // 3 % 2], "head_dim": dim, "heads_q": 8}
        lengths = ((rows, rows), (150, 97))
        yield packed(lengths, "kvcache", heads_k=1, hostile="k=-inf", **fields)
    last: dict[str, Any] = {"dtype": "float16", "head_dim": 40, "heads_q": 4, "hostile": "k=-inf"}
    yield packed(CACHES[1], "kvcache", page_size=16, **last)
    yield packed(CACHES[0], "kvcache", head_dim=8, head_dim_v=128, hostile="k=-inf")
    yield packed(CACHES[0], "kvcache", head_dim=520, head_dim_v=512, hostile="k=-inf")
    for half, dim in zip(HALF, (40, 80), strict=True):
        yield dense(65, 97, dtype=half, head_dim=dim, hostile="k=-inf")
