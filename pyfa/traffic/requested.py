"""Bytes that a kernel's tiles request from the memory system.

This is not HBM traffic: K and V are requested once per block of query rows, and most requests hit
the caches. The emulator's counters and the sectors of an L2 can be compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..shape import Shape
from .kernels import ROLES, TiledKernel, Tiling
from .memory import FLOAT_BYTES, tensor_bytes

Array = npt.NDArray[np.int64]


class Requested(NamedTuple):
    """Bytes of each tensor; ``merged``: bytes that the kernel that merges splits reads again."""

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


class Blocks(NamedTuple):
    """Rows ``first`` … ``last`` iterate over the keys [begin, end): arrays with one element per
    split."""

    first: Array
    last: Array
    begin: Array
    end: Array

    @property
    def walked(self) -> int:
        return int((self.end - self.begin).sum())


_MOST_BLOCKS = 1 << 25  # 3 s: rows of 2³¹ − 1 in tiles of 64
_AT_ONCE = 1 << 18


def requested_bytes(shape: Shape, tiling: Tiling) -> Requested:
    """Return the requested bytes of a forward with its merge: Q once per split, K and V once per
    block of rows that sees them.

    Scalars (arguments, lengths, the LSEs of merged splits) are left out.
    """
    size, packed = shape.itemsize, tiling.packed
    keys = seen = 0
    for part in _walk(shape, tiling.block_q, tiling.block_k, tiling):
        keys += part.walked
        if tiling.splits > 1:
            seen += _seen(shape, part, packed)
    groups = shape.batch_heads // packed  # of heads whose rows share blocks
    rows = shape.batch_heads * shape.seqlen_q
    split = tiling.splits > 1
    merged = groups * seen * shape.head_dim_v * FLOAT_BYTES if split else 0
    return Requested(
        q=rows * shape.head_dim * size * tiling.splits,
        k=groups * keys * shape.head_dim * size,
        v=0 if shape.latent else groups * keys * shape.head_dim_v * size,
        out=rows * shape.head_dim_v * size,
        lse=rows * FLOAT_BYTES,
        partial=merged + rows * FLOAT_BYTES * tiling.splits if split else 0,
        merged=merged,
    )


def requested_of(shape: Shape, kernel: TiledKernel) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that one kernel reads, and those that it writes, by tensor.

    For each block of keys, a kernel that owns keys reads the rows of every query head of the group.
    """
    role = ROLES[kernel.role]
    if kernel.role == "forward":
        asked = requested_bytes(shape, kernel.tiling)
        reads = {"q": asked.q, "k": asked.k, "v": asked.v}
        if kernel.whole_tiles:
            walked = sum(part.walked for part in blocks(shape, kernel))
            per_key = shape.batch_heads // kernel.tiling.packed * walked * shape.itemsize
            reads |= {"k": per_key * shape.head_dim, "v": per_key * shape.head_dim_v}
        if not asked.partial:
            return reads, {"out": asked.out, "lse": asked.lse}
        return reads, {"partial": asked.partial}
    shape = kernel.divided(shape)
    sizes = tensor_bytes(shape)
    reads = {name: sizes[name] for name in role.held}
    walked = sum(part.walked for part in blocks(shape, kernel))
    length = shape.seqlen_q if role.owns_keys else shape.seqlen_k
    heads = 1 if role.owns_keys else shape.group
    for name in role.streamed:
        # The bytes of one row (or key) of all sequences and heads, times how often each is visited.
        reads[name] = sizes[name] // max(1, length) * walked * heads
    writes = {name: sizes[name] for name in role.written}
    for name in role.added:
        writes[name] = sizes[name] // max(1, length) * walked * heads
    return reads, writes


def _seen(shape: Shape, part: Blocks, packed: int) -> int:
    """Return the number of lines that see any key of their split."""
    low, high = part.first // packed, part.last // packed
    if shape.window_right >= 0:
        low = np.maximum(low, part.begin - shape.shift - shape.window_right)
    if shape.window_left >= 0:
        high = np.minimum(high, part.end - 1 - shape.shift + shape.window_left)
    high = np.maximum(low, high + 1)
    lines = np.minimum(part.last + 1, high * packed) - np.maximum(part.first, low * packed)
    return int(np.maximum(lines, 0).sum())


def blocks(shape: Shape, kernel: TiledKernel) -> Iterator[Blocks]:
    """Return every split of a head: rows that iterate over keys, or keys that iterate over rows if
    a kernel owns keys. Fully masked splits are left out."""
    owned, walked = kernel.tiling.block_q, kernel.tiling.block_k
    if ROLES[kernel.role].owns_keys:
        shape, owned, walked = shape.mirrored, walked, owned
    for part in _walk(shape, owned, walked, kernel.tiling):
        if kernel.whole_tiles:
            tiles = -(-(part.end - part.begin) // walked) + kernel.ahead
            end = np.minimum(part.begin + tiles * walked, shape.seqlen_k)
            yield part._replace(end=end)
        else:
            yield part


def workgroups(shape: Shape, kernel: TiledKernel) -> int:
    """Return the workgroups of a launch: the blocks of a head, also masked ones, for every head and
    split."""
    tiling = kernel.tiling
    if ROLES[kernel.role].owns_keys:
        heads_k = kernel.divided(shape).heads_k
        return -(-shape.seqlen_k // tiling.block_k) * heads_k * shape.batch
    of_head = -(-shape.seqlen_q * tiling.packed // tiling.block_q)
    return of_head * shape.batch_heads // tiling.packed * tiling.splits


def _walk(shape: Shape, owned: int, walked: int, tiling: Tiling) -> Iterator[Blocks]:
    """Yield lines ``first`` … ``last`` (rows, or rows of all ``packed`` heads) and [begin, end) of
    each of their splits; empty splits are left out. Yields many blocks at a time: 10⁹ rows are 8
    million blocks."""
    lines, packed = shape.seqlen_q * tiling.packed, tiling.packed
    if lines // owned > _MOST_BLOCKS:
        most = _MOST_BLOCKS * owned // packed
        raise ValueError(
            f"seqlen: expected at most {most:,} rows, because a plan counts block by block"
        )
    for start in range(0, lines, _AT_ONCE * owned):
        first = np.arange(start, min(start + _AT_ONCE * owned, lines), owned, dtype=np.int64)
        last = np.minimum(first + owned, lines) - 1
        low, end = np.zeros_like(first), np.full_like(first, shape.seqlen_k)
        if shape.window_left >= 0:
            low = np.clip(first // packed + shape.shift - shape.window_left, 0, shape.seqlen_k)
        if shape.window_right >= 0:
            end = np.clip(last // packed + shape.shift + shape.window_right + 1, 0, shape.seqlen_k)
        begin = low // walked * walked
        tiles = np.where(end > low, -(-(end - begin) // walked), 0)
        share = -(-tiles // tiling.splits) * walked
        for part in range(tiling.splits):
            at = begin + part * share
            there = (share > 0) & (at < end)
            yield Blocks(first[there], last[there], at[there], np.minimum(end, at + share)[there])
