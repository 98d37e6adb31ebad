"""Bytes of one attention: what a kernel's tiles ask of the memory system.

Not HBM traffic: K and V are asked for once per block of query rows, and most of that the caches
answer. What the emulator counts and what the sectors of an L2 show compares with this.
"""

from __future__ import annotations

from typing import NamedTuple

_FLOAT_BYTES = 4  # of LSE and of partial results


class Shape(NamedTuple):
    """A dense attention without score terms. Windows as a ``Call`` has them: −1 for unlimited."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    window_left: int = -1
    window_right: int = -1
    itemsize: int = 2


class Tiling(NamedTuple):
    """How a forward kernel walks: a workgroup has ``block_q`` rows of one head.

    ``splits``: parts of equally many tiles that a block's keys are cut into, each with a workgroup
    of its own. A part begins with a whole tile, and ends with the last key that any row sees.
    """

    block_q: int
    block_k: int
    splits: int = 1


class Requested(NamedTuple):
    """Bytes of each tensor; ``merged`` of them are read again by the kernel that merges parts."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    partial: int
    merged: int

    @property
    def loads(self) -> int:
        return self.q + self.k + self.v + self.merged

    @property
    def stores(self) -> int:
        return self.out + self.lse + self.partial


def requested_bytes(shape: Shape, tiling: Tiling) -> Requested:
    """Of a forward with its merge: Q once per part, K and V once per block of rows that sees them.

    Scalars (arguments, lengths, the LSEs of parts where they are merged) are left out.
    """
    size = shape.itemsize
    keys = seen = 0
    for first in range(0, shape.seqlen_q, tiling.block_q):
        last = min(first + tiling.block_q, shape.seqlen_q) - 1
        for begin, end in _parts(shape, tiling, first, last):
            keys += end - begin
            seen += _rows_seeing(shape, first, last, begin, end)
    lines = shape.batch * shape.heads_q
    rows = lines * shape.seqlen_q
    merged = lines * seen * shape.head_dim_v * _FLOAT_BYTES if tiling.splits > 1 else 0
    return Requested(
        q=rows * shape.head_dim * size * tiling.splits,
        k=lines * keys * shape.head_dim * size,
        v=lines * keys * shape.head_dim_v * size,
        out=rows * shape.head_dim_v * size,
        lse=rows * _FLOAT_BYTES,
        partial=merged + rows * _FLOAT_BYTES * tiling.splits if tiling.splits > 1 else 0,
        merged=merged,
    )


def _parts(shape: Shape, tiling: Tiling, first: int, last: int) -> list[tuple[int, int]]:
    """The keys [begin, end) of each part of the rows ``first`` … ``last``; empty ones left out."""
    shift, most = shape.seqlen_k - shape.seqlen_q, shape.seqlen_k
    low, end = 0, most
    if shape.window_left >= 0:
        low = min(max(first + shift - shape.window_left, 0), most)
    if shape.window_right >= 0:
        end = min(max(last + shift + shape.window_right + 1, 0), most)
    begin = low // tiling.block_k * tiling.block_k
    tiles = -(-max(end - begin, 0) // tiling.block_k)
    share = -(-tiles // tiling.splits) * tiling.block_k
    starts = (begin + part * share for part in range(tiling.splits))
    return [(start, min(end, start + share)) for start in starts if start < end]


def _rows_seeing(shape: Shape, first: int, last: int, begin: int, end: int) -> int:
    """How many of the rows ``first`` … ``last`` see any of the keys [begin, end): those stored."""
    shift = shape.seqlen_k - shape.seqlen_q
    if shape.window_right >= 0:
        first = max(first, begin - shift - shape.window_right)
    if shape.window_left >= 0:
        last = min(last, end - 1 - shift + shape.window_left)
    return max(last - first + 1, 0)
