"""The grid's cases of decode with sequences that end at every position of the loop over keys.

The loop is unrolled: a wavefront has several tiles of keys in flight. The tiles left after the last
full iteration are handled by separate code, with and without pages and score terms. So each case
has sequences of 1 to 14 tiles of 64 keys.
"""

from __future__ import annotations

import itertools
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

# More rows of a group than one workgroup of decode has, or nearly as many, which a forward may take
# together: groups that divide its tile and that do not, several tiles, and every way in which rows
# and keys can lie.
_LENGTHS = ((9, 9, 9, 9), (9, 64, 200, 1100))
_TOGETHER: tuple[Fields, ...] = (
    {"heads_q": 6, "heads_k": 1, "causal": True, "num_splits": 3},
    {"heads_q": 16, "heads_k": 2, "causal": True, "page_size": 16, "slack": 5},
    {"heads_q": 10, "heads_k": 2, "causal": True, "page_size": 64, "sinks": True},
    {"heads_q": 16, "heads_k": 1, "window": (70, 0), "num_splits": 2},
    {"heads_q": 14, "heads_k": 2, "attention_chunk": 50, "causal": True, "batch_idx": True},
    {"heads_q": 40, "heads_k": 1, "leftpad": True, "sinks": True, "recipe": "growing"},
    {"heads_q": 24, "heads_k": 3, "packed_q": True, "used_k": True, "causal": True},
    {"heads_q": 64, "heads_k": 1, "window": (30, -20), "num_splits": 5, "recipe": "huge"},
    {"heads_q": 12, "heads_k": 3, "new_keys": 3, "causal": True, "layout": "strided"},
    {"heads_q": 8, "heads_k": 1, "packed_q": True, "page_size": 8},
)
_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40))


def quick() -> Iterator[Case]:
    """Yield a case for each number of row tiles and each dtype, with one of the options (a score
    term, pages), and a few more cases."""
    for index, rows in enumerate(_ROWS):
        for number, half in enumerate(HALF):
            yield _case(rows, 64, half, **_OPTIONS[2 * index + number])
    # The first keys that the rows of a block see differ from row to row.
    for half in HALF:
        yield packed(((3, 3), (100, 64)), "kvcache", dtype=half, window=(20, 0))
    yield _together(64, 64, "bfloat16", **_TOGETHER[0])
    yield _together(128, 128, "float16", **_TOGETHER[1])


def full() -> Iterator[Case]:
    """Yield a case with each option for each number of row tiles, head_dim and dtype, and cases of
    one key and of many query heads."""
    for rows in _ROWS:
        for dim in (64, 128):
            for half in HALF:
                for options in _OPTIONS:
                    yield _case(rows, dim, half, **options)
    for dim in (64, 128):
        for half in HALF:
            # With one key, the LSE is the capped score. This also tests the tanh formula for large
            # arguments.
            one = {"dtype": half, "head_dim": dim, "softcap": 30.0, "recipe": "big"}
            for rows in _ROWS:
                yield packed(((rows,) * 6, (1,) * 6), "kvcache", heads_q=8, heads_k=1, **one)
            yield packed(((33, 70), (1, 1)), "varlen", heads_q=4, heads_k=4, **one)
    # Each row sees no key before its own.
    for dim, half in itertools.product((64, 128), HALF):
        for right in (0, 1):
            yield packed(((3, 3), (1, 200)), "kvcache", dtype=half, head_dim=dim, window=(0, right))
    for index, options in enumerate(_TOGETHER):
        for number, dims in enumerate(_DIMS):
            yield _together(*dims, HALF[(index + number) % 2], **options)


def _together(dim: int, dim_v: int, half: str, **options: object) -> Case:
    return packed(_LENGTHS, "kvcache", dtype=half, head_dim=dim, head_dim_v=dim_v, **options)


def _case(rows: int, dim: int, half: str, **options: object) -> Case:
    lengths = ((rows,) * len(_KEYS), _KEYS)
    return packed(
        lengths, "kvcache", dtype=half, heads_q=8, heads_k=1, head_dim=dim, num_splits=1, **options
    )
