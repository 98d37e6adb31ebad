"""The grid's cases of decode whose sequences end in every place of the loop over keys.

The loop is unrolled: a wavefront has several tiles of keys on the way, and what is left after the
last whole round has code of its own, with and without pages and score terms. So each case has
sequences of 1 to 14 tiles of 64 keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cases import Case, packed
from .grid_axes import HALF, Fields

_KEYS = (1, 65, 130, 190, 257, 321, 390, 450, 513, 577, 640, 705, 770, 830)
# Rows of 8 heads that share a KV head: one, two and four tiles of 16 rows.
_ROWS = (1, 3, 7)
_OPTIONS: tuple[Fields, ...] = (
    {},
    {"page_size": 16},
    {"softcap": 20.0, "page_size": 64},
    {"alibi": "heads", "causal": True},
    {"bias": "full", "page_size": 16},
    {"bias": "other"},
    {"bias": "keys", "window": (100, 0)},
    {"bias": "bool", "page_size": 32, "sinks": True},
)


def quick() -> Iterator[Case]:
    """Yield one option for each number of tiles and dtype."""
    for index, rows in enumerate(_ROWS):
        for number, half in enumerate(HALF):
            yield _case(rows, 64, half, **_OPTIONS[2 * index + number])


def full() -> Iterator[Case]:
    """Yield all options for each number of tiles, head_dim and dtype."""
    for rows in _ROWS:
        for dim in (64, 128):
            for half in HALF:
                for options in _OPTIONS:
                    yield _case(rows, dim, half, **options)
    for dim in (64, 128):
        for half in HALF:
            # With one key the LSE is the capped score: tanh where it has another formula, too.
            one = {"dtype": half, "head_dim": dim, "softcap": 30.0, "recipe": "big"}
            for rows in _ROWS:
                yield packed(((rows,) * 6, (1,) * 6), "kvcache", heads_q=8, heads_k=1, **one)
            yield packed(((33, 70), (1, 1)), "varlen", heads_q=4, heads_k=4, **one)


def _case(rows: int, dim: int, half: str, **options: object) -> Case:
    lengths = ((rows,) * len(_KEYS), _KEYS)
    return packed(
        lengths, "kvcache", dtype=half, heads_q=8, heads_k=1, head_dim=dim, num_splits=1, **options
    )
