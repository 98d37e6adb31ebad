"""The number of splits of the keys, for calls whose blocks alone would leave the device idle.

There are five cases of a forward, each with the costs of the arch and kernel:

- ``within_a_round``: a prefill whose splits all run at once.
- ``over_rounds``: a prefill of equal work tiles whose last round is far from full.
- ``fewest_to_fill``: a few rows, where a split is cheap and only its number matters.
- ``are_apart``: chunks whose boundaries are given (batch invariance).
- ``least_time``: a few rows on a device with fitted times.

A backward splits the query heads of a group instead: ``of_group``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple


class Costs(NamedTuple):
    """Costs of a prefill in microseconds: 64 keys of a block, combining one row of one head, and
    starting to combine."""

    tile_us: float
    row_us: float
    combine_us: float


FREE = Costs(1.0, 0.0, 0.0)
# The fewest keys of a split of a prefill: with fewer, merging costs more than the split gains.
_LEAST_KEYS = 256


def within_a_round(blocks: int, keys: int, places: int, rows: int, costs: Costs) -> int:
    """Return the number of splits with which ``blocks`` fill the ``places`` of the device once, if
    that saves more time than combining ``rows`` (of all heads) costs; otherwise 1."""
    parts = max(1, min(places // max(blocks, 1), keys // _LEAST_KEYS))
    gain = keys / 64 * (1 - 1 / parts) * costs.tile_us
    return parts if gain > costs.combine_us + rows * costs.row_us else 1


class Rounds(NamedTuple):
    """Costs of a prefill in microseconds, from a timing model: ``tile_us`` for 64 keys of a block,
    ``block_us`` to start and end a block, ``row_us`` to merge one split of a row, ``combine_us`` to
    launch the merge. ``row_bytes`` is the output of one split of a row."""

    tile_us: float
    block_us: float
    row_us: float
    combine_us: float
    row_bytes: int


# The share of a gain in clocks that is also a gain in time: idle units leave power to the others.
_OF_CLOCKS = 0.55
_WORTH = 0.92  # of the time; the model cannot tell apart two times that are closer
_MOST_PARTS = 8
_MOST_BYTES = 1 << 28  # of the partial results that are to be merged


def over_rounds(
    blocks: int, keys: int, places: int, rows: int, costs: Rounds, parts: int = 1
) -> int:
    """Return the number of splits for which equal ``blocks``, run in rounds of ``places``, end
    first. Return ``parts`` if no number gains enough."""

    def busy(parts: int) -> float:
        rounds = -(-blocks * parts // places)
        return rounds * (keys / 64 / parts * costs.tile_us + costs.block_us)

    def merging(parts: int) -> float:
        return costs.combine_us + rows * parts * costs.row_us if parts > 1 else 0.0

    now = busy(parts)
    most = min(_MOST_PARTS, keys // _LEAST_KEYS, _MOST_BYTES // max(1, rows * costs.row_bytes))
    times = {
        count: now * (busy(count) / now) ** _OF_CLOCKS + merging(count)
        for count in range(1, max(1, most) + 1)
    }
    best = min(times, key=lambda count: times[count])
    return best if times[best] < _WORTH * (now + merging(parts)) else parts


def of_prefill(
    blocks: int, keys: int, places: int, rows: int, costs: Costs, rounds: Rounds | None
) -> int:
    """Return the number of splits of a prefill: that of ``over_rounds`` if ``rounds`` are known and
    all blocks see the same number of keys, otherwise that of ``within_a_round``."""
    parts = within_a_round(blocks, keys, places, rows, costs)
    return over_rounds(blocks, keys, places, rows, rounds, parts) if rounds else parts


def fewest_to_fill(
    blocks: int, pieces: int, places: int, most: int, enough: Callable[[float, float], float]
) -> int:
    """Return the smallest number of splits, at most ``most``, of ``pieces`` of keys that leaves few
    of ``places`` empty. Each further split costs time to combine.

    Blocks run in rounds of ``places``; the share is how full the rounds are. ``enough`` returns the
    share that suffices, given the number of rounds and the best share. If no number suffices, 85 %
    of the best share does, as in FlashAttention-2.
    """
    shares = {}
    for parts in range(1, most + 1):
        # Skip numbers of splits that do not shorten the longest split.
        if parts > 1 and -(-pieces // parts) == -(-pieces // (parts - 1)):
            continue
        rounds = blocks * parts / places
        shares[parts] = rounds, rounds / -(-blocks * parts // places)
    best = max(share for _, share in shares.values())
    for parts, (rounds, share) in shares.items():
        if share >= enough(rounds, best):
            return parts
    return next(parts for parts, (_, share) in shares.items() if share >= 0.85 * best)


# With at most so many rows, of all query heads of a KV head, the partial results of chunks are
# small compared with the keys: one for each 16 of 2,048 keys.
_FEW_LINES = 64


def are_apart(blocks: int, places: int, lines: int) -> bool:
    """Return whether each chunk of keys should be a split of its own, with ``blocks`` blocks.

    ``lines`` is the number of query rows of a KV head, over all its query heads. Merging the splits
    costs more with more rows. Many rows are split only if half of ``places`` would be empty.
    """
    return lines <= _FEW_LINES or 2 * blocks <= places


class Times(NamedTuple):
    """Fitted times and two limits. A time is given as the number of bytes that a busy SM reads in
    it.

    ``start``: starting and ending a round. ``combine``: combining, plus ``part`` for each split.
    ``latency``: if a round keeps only a fraction x of the SMs busy, reading takes
    sqrt(latency + (1 − latency)·x²) of the time that it takes in a full round. ``pieces``: the
    smallest number of pieces in a split; a piece is the fixed number of keys by which the kernel
    divides them. ``parts``: the largest number of splits.
    """

    start: int
    combine: int
    part: int
    latency: float
    pieces: int
    parts: int


@functools.lru_cache(4096)
def least_time(blocks: int, pieces: int, piece_bytes: int, units: int, times: Times) -> int:
    """Return the number of splits that takes the least time.

    The keys are ``pieces`` pieces of ``piece_bytes`` bytes, which are divided among the splits.
    Each of ``blocks`` is launched once per split. Blocks run in rounds, one block on each of
    ``units`` SMs. In a round with fewer blocks than SMs, each block reads faster.
    """
    pieces, units = max(1, pieces), max(1, units)
    best, least = 1, math.inf
    for parts in range(1, max(1, min(times.parts, pieces // times.pieces)) + 1):
        share = -(-pieces // parts)
        full, rest = divmod(blocks * -(-pieces // share), units)
        time: float = full * (times.start + share * piece_bytes)
        if parts > 1:
            time += times.combine + parts * times.part
        if rest:
            busy = math.sqrt(times.latency + (1 - times.latency) * (rest / units) ** 2)
            time += times.start + share * piece_bytes * busy
        if time < least:
            best, least = parts, time
    return best


class GroupCosts(NamedTuple):
    """The costs of a backward that divides the query heads of its groups. The unit is the time that
    a block takes to visit one query row.

    ``start``: the time to start and end a block. ``sum``: the time to add up the gradients of the
    parts. ``tail``: how much longer a masked backward takes than the average SM or CU is busy, as a
    share of the longest block's time. If heads come one by one, the longest block of the last head
    starts late. ``misses``: the share by which a row takes longer each time the rows visited at
    once double beyond the size of the L2.

    The defaults of ``start`` and ``sum`` were fitted to shapes on an H200, that of ``tail`` to 12
    shapes of the MI300X timing model.
    """

    start: float = 640
    sum: float = 300
    tail: float = 0.88
    misses: float = 0.0


class Visited(NamedTuple):
    """The blocks of a backward that own keys, and what each block visits if the query heads of a
    group are not divided into parts (``of_group``).

    ``rows``: the query rows that the longest block visits, in all heads of its group. ``uneven``:
    other blocks visit fewer rows, on average half as many, and the longest blocks of a head start
    first. ``l2_share``: the bytes of the rows of a group, divided by the number of blocks that
    visit them, then by the size of the L2; 0 if unknown.
    """

    blocks: int
    rows: int
    uneven: bool
    l2_share: float = 0.0


@functools.lru_cache(4096)
def of_group(group: int, visited: Visited, places: int, costs: GroupCosts) -> int:
    """Return into how many parts to divide the query heads of each group in a backward.

    With few KV heads, most ``places`` of the device stay empty. Each part has its own blocks, dK
    and dV. The blocks of a part also visit fewer rows at once. For example, the rows of 16 groups
    of 8 heads with 1,024 rows and head_dim 128 take 128 MiB. With four parts, such a backward takes
    0.82 of the time on an H100.
    """
    blocks, rows, uneven, l2_share = visited

    def time(parts: int) -> float:
        longest = rows / parts + costs.start
        if not uneven:
            ends: float = -(-blocks * parts // places) * longest
        else:
            average = blocks * parts / places * (longest + costs.start) / 2
            ends = max(longest, average + costs.tail * longest)
            held = min(places / parts, blocks) * l2_share
            ends *= 1 + costs.misses * math.log2(max(1.0, held))
        return ends + (costs.sum if parts > 1 else 0)

    return min((parts for parts in range(1, group + 1) if group % parts == 0), key=time)
