"""The tiles of Hopper's backward that take the least time for the sizes of a call."""

from __future__ import annotations

import functools

from ..common.splits import GroupCosts
from ..native.backward import group_splits
from ..native.target import BackwardGrid, Block
from ..native.tiles import Pair
from ..native.tiles.sm90 import (
    BACKWARD_OF_GRID,
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
PARTS = GroupCosts(start=240, sum=450, tail=0.0, misses=0.3)


def all_tiles(pair: Pair) -> tuple[OwnBackward, ...]:
    """Return the tiles among which ``tiles_for`` chooses, without the general ones."""
    times = BACKWARD_OF_GRID.get(pair)
    return tuple(pace.tiles for pace in times.paces[1:]) if times else ()


@functools.lru_cache(1024)
def tiles_for(grid: BackwardGrid, pair: Pair) -> OwnBackward | None:
    """Return the tiles for ``grid``, or None for the general ones."""
    times = BACKWARD_OF_GRID.get(pair)
    sizes = grid.sizes
    if times is None or not sizes.batch * sizes.heads_k * sizes.seqlen_q * sizes.seqlen_k:
        return None
    if sizes.window_left >= 0:
        most, tiles = BACKWARD_OF_WINDOW[pair]
        equal = sizes.heads_q == sizes.heads_k
        return tiles if equal and sizes.window_left < most else None
    if max(sizes.seqlen_q, sizes.seqlen_k) > _MOST_ROWS:
        return None
    took = {pace.tiles: microseconds(grid, times, pace) for pace in times.paces}
    best, general = min(took, key=took.__getitem__), times.paces[0].tiles
    return best if took[best] < _WORTH * took[general] else None


def microseconds(grid: BackwardGrid, times: BackwardTimes, pace: BackwardPace) -> float:
    """Return about how long an H200 takes for ``grid``, which has no window."""
    sizes, tiles = grid.sizes, pace.tiles
    rows, keys = tiles.block_q, tiles.block_k
    of_rows, of_keys = -(-sizes.seqlen_q // rows), -(-sizes.seqlen_k // keys)
    block = Block(0, keys=keys, parts=PARTS)
    parts = group_splits(grid.device, block, sizes)
    heads, of_group = sizes.heads_k * parts, sizes.heads_q // sizes.heads_k // parts
    places = grid.device.units * tiles.blocks

    around = times.launch + (times.sum if parts > 1 else 0.0)
    around += times.rows * sizes.batch * sizes.heads_q * of_rows * rows / 1000

    def of_block(steps: int) -> float:
        return pace.start + steps * of_group * pace.step

    longest = of_block(of_rows)
    if sizes.window_right < 0:
        return around + -(-of_keys * sizes.batch * heads // places) * longest
    # Causal: a block sees the rows from its first key on.
    of_head = sum(of_block(of_rows - number * keys // rows) for number in range(of_keys))
    busy = of_head * sizes.batch * heads / places
    return around + max(longest, busy + times.tail * longest)
