"""Which rows of a whole sequence each rank holds.

Zigzag: the sequence is cut into 2·ranks chunks and rank r holds chunks r and 2·ranks − 1 − r, so
that under a causal mask all ranks have the same work (Zhu 2024, ring-flash-attention; Llama 3 2024,
arXiv:2407.21783, section 3.3.2). Contiguous: one chunk a rank. A packed batch is cut sequence by
sequence, and a chunk is the parts of all sequences, one behind the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

# A chunk begins at a multiple of this, because dropout draws for four keys at once.
UNIT = 4

Range = tuple[int, int]


class Chunk(NamedTuple):
    """A chunk on its rank: rows ``rows`` of what the rank holds are, one behind the other, the
    ``parts`` of the whole sequences, some of which may be empty."""

    rows: Range
    parts: tuple[Range, ...]


class Layout(NamedTuple):
    """Whole sequences of ``lengths`` rows on ``ranks``. All but a packed batch has one length."""

    lengths: tuple[int, ...]
    ranks: int
    zigzag: bool

    def parts(self, number: int) -> tuple[Range, ...]:
        """Where chunk ``number`` begins and ends in each sequence.

        All chunks are equally long but the last that are not empty: what blocks of equal length
        make of their corners is what the whole sequence makes of its own.
        """
        chunks = self.ranks * (2 if self.zigzag else 1)
        return tuple(share(length, chunks, number) for length in self.lengths)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """What ``rank`` holds, in the order in which it does."""
        return _chunks(self, rank)

    def rows(self, rank: int) -> int:
        """How many rows ``rank`` holds."""
        return self.chunks(rank)[-1].rows[1]


@functools.lru_cache(256)
def _chunks(layout: Layout, rank: int) -> tuple[Chunk, ...]:
    numbers = (rank, 2 * layout.ranks - 1 - rank) if layout.zigzag else (rank,)
    found: list[Chunk] = []
    for number in numbers:
        parts = layout.parts(number)
        begin = found[-1].rows[1] if found else 0
        found.append(Chunk((begin, begin + sum(stop - start for start, stop in parts)), parts))
    return tuple(found)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each of ``lengths`` rows begins, one behind the other, and where the last ends."""
    return list(accumulate(lengths, initial=0))


def positions(layout: Layout, rank: int) -> list[Range]:
    """The rows that ``rank`` holds, in order, as ranges of the whole (packed) sequence."""
    offsets = starts(layout.lengths)
    return [
        (first + start, first + stop)
        for chunk in layout.chunks(rank)
        for first, (start, stop) in zip(offsets, chunk.parts, strict=False)
    ]


def share(rows: int, shares: int, number: int) -> Range:
    """Which of ``rows`` rows are in share ``number`` of ``shares`` in order: all are equally long,
    and a multiple of ``UNIT``, but the last ones."""
    step = -(-rows // (shares * UNIT)) * UNIT
    return min(number * step, rows), min((number + 1) * step, rows)
