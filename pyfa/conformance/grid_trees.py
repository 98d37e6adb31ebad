"""The grid's cases with a ``tree_mask``: a mask over the new rows, which only calls with a KV cache
can have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .cases import Case, packed
from .grid_axes import DTYPES, HALF, Fields, Lengths, draws

# (rows, keys) of sequences: few rows, more than one tile of them, more rows than keys, none.
_LENGTHS: tuple[Lengths, ...] = (
    ((6, 6, 6), (65, 17, 300)),
    ((16, 16), (257, 64)),
    ((70, 70), (97, 200)),
    ((3, 3, 3, 3), (0, 1, 3, 130)),
)
_OPTIONS: tuple[Fields, ...] = (
    {},
    {"causal": True, "heads_q": 8},
    {"page_size": 16, "heads_q": 4, "num_splits": 3},
    {"leftpad": True, "batch_idx": True, "slack": 3},
    {"packed_q": True, "page_size": 16, "slack": 2},
    {"window": (20, 0), "sinks": True},
    {"attention_chunk": 40, "softcap": 5.0},
    {"alibi": "heads", "heads_q": 4, "page_size": 1},
    {"window": (-2, 64)},
)


def quick() -> Iterator[Case]:
    """Yield one case for each option, with the lengths in turn, and cases with new keys and a
    float8 cache."""
    for index, options in enumerate(_OPTIONS):
        yield _tree(index, dtype=DTYPES[index % 3], **options)
    yield _tree(2, window=(-2, 64), dtype="bfloat16")
    yield _tree(0, new_keys=6, page_size=16, head_dim=128)
    yield _tree(1, cache_dtype="float8_e4m3fn", head_dim=128, heads_q=8)


def full() -> Iterator[Case]:
    """Yield each option with all lengths, and random combinations of the features that change a
    plan."""
    for shape in range(len(_LENGTHS)):
        for index, options in enumerate(_OPTIONS):
            yield _tree(shape, dtype=HALF[(shape + index) % 2], **options)
    yield _tree(0, heads_q=4, mask_mod="prefix")
    yield _tree(0, heads_q=4, page_size=16, score_mod="alibi")
    axes: Fields = {
        "dtype": DTYPES,
        "shape": range(len(_LENGTHS)),
        "head_dim": (40, 64, 96, 128, 192, 256),
        "heads_q": (2, 4, 8),
        "causal": (False, True),
        "options": _OPTIONS,
        "batch_invariant": (False, False, True),
    }
    for draw in draws("trees", 60, axes):
        if draw["batch_invariant"]:
            for name in ("num_splits", "attention_chunk"):
                draw.pop(name, None)
        yield _tree(draw.pop("shape"), **draw)


def _tree(shape: int, **options: Any) -> Case:
    return packed(_LENGTHS[shape % len(_LENGTHS)], "kvcache", tree=True, **options)
