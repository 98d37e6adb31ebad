"""The rows of a whole sequence that each rank holds.

Zigzag: the sequence is cut into 2·ranks chunks, and rank r holds chunks r and 2·ranks − 1 − r. With
a causal mask all ranks then have the same work (Zhu 2024, ring-flash-attention; Llama 3 2024,
arXiv:2407.21783, section 3.3.2). Contiguous: each rank holds one chunk. In a packed batch each
sequence is cut separately, and a chunk is the concatenation of its parts of all sequences.
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
    """A chunk on its rank. Rows ``rows`` of the rank are the concatenated ``parts`` of the whole
    sequences; some parts may be empty."""

    rows: Range
    parts: tuple[Range, ...]


class Layout(NamedTuple):
    """Whole sequences of ``lengths`` rows on ``ranks``. Only a packed batch has several lengths."""

    lengths: tuple[int, ...]
    ranks: int
    zigzag: bool

    def parts(self, number: int) -> tuple[Range, ...]:
        """Return where chunk ``number`` begins and ends in each sequence.

        In each sequence, all chunks have the same length, except that the last nonempty chunk may
        be shorter and the chunks after it are empty. Between two chunks of equal length, a causal
        mask is the same whether it is aligned to their first rows or to their last.
        """
        chunks = self.ranks * (2 if self.zigzag else 1)
        return tuple(share(length, chunks, number) for length in self.lengths)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Return the chunks of ``rank``, in the order in which the rank holds them."""
        return _chunks(self, rank)

    def rows(self, rank: int) -> int:
        """Return how many rows ``rank`` holds."""
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
    """Return where each of ``lengths`` begins if they are concatenated, and the total."""
    return list(accumulate(lengths, initial=0))


def positions(layout: Layout, rank: int) -> list[Range]:
    """Return the rows that ``rank`` holds, in order, as ranges of the whole (packed) sequence."""
    offsets = starts(layout.lengths)
    return [
        (first + start, first + stop)
        for chunk in layout.chunks(rank)
        for first, (start, stop) in zip(offsets, chunk.parts, strict=False)
    ]


def share(rows: int, shares: int, number: int) -> Range:
    """Return which of ``rows`` rows are in share ``number`` of ``shares``. All shares have the same
    length, a multiple of ``UNIT``, except that the last nonempty share may be shorter and the
    shares after it are empty."""
    step = -(-rows // (shares * UNIT)) * UNIT
    return min(number * step, rows), min((number + 1) * step, rows)
