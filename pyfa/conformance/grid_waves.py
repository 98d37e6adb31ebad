"""Cases of the MI300X forwards of which a short call uses one and a long call another.

Up to head_dim 192, plain scores have two kernels (``backends/hip/forward.py``): workgroups of 128
rows for few rows, short sequences and small windows, and workgroups of 256 rows. Most cases of
other families are short. These have more than 128 rows and use workgroups of 256: they have many
keys, a window that is open on one side or wide, or lengths on the device under a causal mask that
is not square. Some use workgroups of 128 where other families have few such cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from .cases import Case, dense, packed
from .grid_axes import HALF

Shape = Mapping[str, Any]

_PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192))
_QUICK = (64, 96, 128)
_GROUP: Shape = {"heads_q": 2, "heads_k": 1}
# More heads than dies, which do not divide them; three heads for each die, in groups of two.
_MANY: Shape = {"heads_q": 18, "heads_k": 9}
_THREES: Shape = {"heads_q": 24, "heads_k": 12}
# More sequences than lanes, and one of more than 128 rows.
_SEQUENCES = (1,) * 64 + (150, 40), (3,) * 64 + (9, 160)
_LENGTHS = (300, 0, 33), (390, 33, 97)
_SPLIT = (150, 40), (700, 130)


def quick() -> Iterator[Case]:
    for index, (dim, half) in enumerate(itertools.product(_QUICK, HALF)):
        shape: Shape = {"head_dim": dim, "dtype": half, "recipe": ("plain", "growing")[index % 2]}
        # Two workgroups, of which the last has one row, and keys that fill no tile.
        yield dense(257, 1060, 1, **_GROUP, **shape)
        yield packed(_LENGTHS, "varlen", causal=True, used_q=True, used_k=True, slack=3, **_GROUP,
                     **shape)  # fmt: skip
        # Rows that see no key, and more rows than keys.
        window = {"window": (40, -1)} if index % 2 else {"causal": True, "window": (1300, 0)}
        yield dense(300, 200, 1, sinks=index % 4 == 3, **window, **_GROUP, **shape)
    # Three workgroups of 128 rows at head_dim 96; other families have such cases at 64 and 128.
    for half in HALF:
        yield dense(257, 300, 1, causal=True, heads_q=4, head_dim=96, dtype=half)
    # At head_dim 192: two workgroups of 256 rows, and three of 128.
    yield packed(_LENGTHS, "varlen", causal=True, used_q=True, used_k=True, slack=3, head_dim=192,
                 head_dim_v=128, dtype="bfloat16", **_GROUP)  # fmt: skip
    yield dense(257, 300, 1, causal=True, window=(100, 0), head_dim=192, head_dim_v=128,
                dtype="bfloat16", **_GROUP)  # fmt: skip
    yield dense(257, 1060, 1, head_dim=192, dtype="float16", recipe="growing", **_GROUP)


def full() -> Iterator[Case]:
    for (dim, dim_v), half in itertools.product(_PAIRS, HALF):
        shape: Shape = {"head_dim": dim, "head_dim_v": dim_v, "dtype": half}
        yield dense(257, 1060, 1, causal=True, **_GROUP, **shape)
        yield dense(270, 250, 1, causal=True, window=(1300, 0), backward=True, **_GROUP, **shape)
        yield packed(((150, 0, 33), (230, 33, 97)), "varlen", causal=True, used_k=True, **_MANY,
                     **shape)  # fmt: skip
        yield packed(_SEQUENCES, "varlen", causal=True, **shape)
        yield packed(((150, 9), (170, 20)), "varlen", causal=True, **_THREES, **shape)
        yield dense(150, 200, 1, window=(-1, 20), sinks=True, **_MANY, **shape)
        # Splits of the keys, of values that fill a tile and of narrower ones.
        fields: Shape = {"num_splits": 3, "heads_q": 4, "packed_q": True, "slack": 2}
        narrow = {**shape, "head_dim": dim - 5, "head_dim_v": dim_v - 5}
        yield packed(_SPLIT, "kvcache", sinks=True, **fields, **shape)
        yield packed(_SPLIT, "kvcache", leftpad=True, batch_idx=True, **fields, **narrow)
        # More of them with workgroups of 128 rows.
        if dim == 192:
            yield packed(((1,) * 64 + (120, 40), (3,) * 64 + (9, 140)), "varlen", **shape)
            yield dense(140, 300, 1, window=(100, 20), sinks=True, **_MANY, **narrow)
    for half in HALF:
        shape = {"head_dim": 96, "dtype": half}
        yield packed(((65, 0, 33), (200, 33, 97)), "varlen", causal=True, used_k=True, **_MANY,
                     **shape)  # fmt: skip
        yield packed(((1,) * 64 + (130, 40), (3,) * 64 + (9, 140)), "varlen", **shape)
        yield packed(((40, 9), (7, 20)), "varlen", **_THREES, **shape)
        yield dense(65, 200, 1, window=(100, 20), sinks=True, **_MANY, **shape)
