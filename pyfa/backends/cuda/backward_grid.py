"""The tiles of Hopper's backward that take the least time for the sizes of a call."""

from __future__ import annotations

import functools

from ..common.splits import GroupCosts
from ..native.backward import group_splits
from ..native.target import BackwardGrid, Block
from ..native.tiles import Pair
from ..native.tiles.sm90 import (
    BACKWARD,
    BACKWARD_OF_GRID,
    BACKWARD_OF_LARGE_WINDOWED,
    BACKWARD_OF_WINDOW,
    BackwardPace,
    BackwardTimes,
    OwnBackward,
)

# Of the general tiles' time: the model does not tell two tiles apart that are closer.
_WORTH = 0.97
# Longer sequences have the general tiles: the others add more dQ for a score.
_MOST_ROWS = 2048
# Of heads that come side by side (bwd_shape.h). On 37 shapes on an H100 and an H200 these choose
# the fastest number of parts or lose at most 5 %, and once, with wide heads, 10 %
# (docs/kernels/cuda_sm90_backward.md).
_PARTS = GroupCosts(start=240, sum=450, tail=0.0, misses=0.3)
# Wide heads gain more from parts than other terms explain: 1 x 4,096, 32/4 heads of 256 take 2.67
# ms in one part, 1.85 in two.
_WIDE_PARTS = GroupCosts(tail=0.3)


def costs_of_parts(roles: int) -> GroupCosts:
    """Return what the number of parts of a group costs, of blocks with or without ``ROLES``."""
    return _WIDE_PARTS if roles else _PARTS


def all_tiles(pair: Pair) -> tuple[OwnBackward, ...]:
    """Return the tiles among which ``tiles_for`` chooses, without the general ones."""
    times = BACKWARD_OF_GRID.get(pair)
    return tuple(pace.tiles for pace in times.paces[1:]) if times else ()


@functools.lru_cache(1024)
def tiles_for(grid: BackwardGrid, pair: Pair) -> OwnBackward | None:
    """Return the tiles for ``grid``, or None for the general ones."""
    times = BACKWARD_OF_GRID.get(pair)
    shape = grid.shape
    if times is None or not shape.batch * shape.heads_k * shape.seqlen_q * shape.seqlen_k:
        return None
    if shape.window_left >= 0:
        most, tiles = BACKWARD_OF_WINDOW.get(pair, (0, None))
        equal = shape.heads_q == shape.heads_k
        small = equal and shape.window_left < most and not _is_large_windowed(grid, pair)
        return tiles if small else None
    if max(shape.seqlen_q, shape.seqlen_k) > _MOST_ROWS:
        return None
    took = {pace.tiles: microseconds(grid, times, pace) for pace in times.paces}
    best, general = min(took, key=took.__getitem__), times.paces[0].tiles
    return best if took[best] < _WORTH * took[general] else None


def _is_large_windowed(grid: BackwardGrid, pair: Pair) -> bool:
    """Return whether a call with a small window has so many work tiles that the general tiles are
    faster."""
    windows, least = BACKWARD_OF_LARGE_WINDOWED.get(pair, (range(0), 0))
    shape, keys = grid.shape, BACKWARD[pair].block_k
    work_tiles = -(-shape.seqlen_k // keys) * shape.batch * shape.heads_k
    return shape.window_left + 1 in windows and work_tiles >= least * grid.device.units


def microseconds(grid: BackwardGrid, times: BackwardTimes, pace: BackwardPace) -> float:
    """Return about how long an H200 takes for ``grid``, which has no window."""
    shape, tiles = grid.shape, pace.tiles
    rows, keys = tiles.block_q, tiles.block_k
    of_rows, of_keys = -(-shape.seqlen_q // rows), -(-shape.seqlen_k // keys)
    block = Block(0, keys=keys, parts=costs_of_parts(tiles.roles))
    parts = group_splits(grid.device, block, shape)
    heads, of_group = shape.heads_k * parts, shape.heads_q // shape.heads_k // parts
    places = grid.device.units * tiles.blocks

    around = times.launch + (times.sum if parts > 1 else 0.0)
    around += times.rows * shape.batch * shape.heads_q * of_rows * rows / 1000

    def of_block(steps: int) -> float:
        return pace.start + steps * of_group * pace.step

    longest = of_block(of_rows)
    if shape.window_right < 0:
        return around + -(-of_keys * shape.batch * heads // places) * longest
    # Causal: a block sees the rows from its first key on.
    of_head = sum(of_block(of_rows - number * keys // rows) for number in range(of_keys))
    busy = of_head * shape.batch * heads / places
    return around + max(longest, busy + times.tail * longest)
