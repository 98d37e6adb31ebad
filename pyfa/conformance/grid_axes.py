"""Dtypes, shapes and lengths that families of cases share, and the function that draws samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cases import pick

Fields = Mapping[str, Any]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of each sequence: rows, keys

HALF = ("bfloat16", "float16")
DTYPES = (*HALF, "float32")
# (rows, keys): square, either longer, rows that a causal mask leaves empty, several key tiles.
SHAPES: tuple[tuple[int, int], ...] = ((65, 65), (65, 97), (97, 65), (129, 48), (17, 513))
PACKED: tuple[Lengths, ...] = (
    ((65, 0, 17, 1), (65, 33, 0, 1)),
    ((5, 64, 33), (129, 64, 31)),
    ((97, 1), (16, 130)),
    ((0, 0), (0, 7)),
    ((40,), (40,)),
    ((1, 1, 1, 1, 1), (2, 63, 127, 1, 65)),
    ((), ()),
)
CACHES: tuple[Lengths, ...] = (
    ((1, 1, 1), (65, 17, 128)),
    ((1, 1), (257, 257)),
    ((5, 5), (48, 48)),
    ((33, 33), (33, 130)),
    ((2, 2, 2, 2), (0, 1, 2, 63)),
)
APPENDS: tuple[Lengths, ...] = (
    ((1, 1, 1), (65, 17, 128)),
    ((3, 3), (64, 40)),
    ((7, 7), (7, 33)),
)


def draws(family: str, count: int, axes: Fields) -> Iterator[dict[str, Any]]:
    """Yield ``count`` samples. On each axis, a hash of family, sample and axis selects the choice.
    If a choice is a mapping, its fields are added to the sample and replace those of other axes."""
    for index in range(count):
        drawn = {axis: pick(f"{family}/{index}/{axis}", axes[axis]) for axis in axes}
        more = [drawn.pop(axis) for axis in axes if isinstance(drawn[axis], Mapping)]
        for fields in more:
            drawn |= fields
        yield drawn
