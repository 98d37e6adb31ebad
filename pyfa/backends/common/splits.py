"""Into how many parts the keys of a call go, where its blocks alone would leave the device idle.

There are three cases, each with the costs of the arch and kernel that asks:

- ``within_a_round``: a prefill, whose parts all run at once, or else it stays whole.
- ``fewest_to_fill``: a few rows, where a part costs little and only its number is known to matter.
- ``least_time``: a few rows on a device whose times were fitted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple


class Costs(NamedTuple):
    """Of a prefill in microseconds: 64 keys of a block, putting a row of one head together, and
    starting to."""

    tile_us: float
    row_us: float
    combine_us: float


FREE = Costs(1.0, 0.0, 0.0)
# What is worth a part of its own in a prefill: below it, merging costs more.
_LEAST_KEYS = 256


def within_a_round(blocks: int, keys: int, places: int, rows: int, costs: Costs) -> int:
    """As many parts as let ``blocks`` fill ``places`` of the device once, where that gains more
    than putting ``rows`` (of all heads) together costs."""
    parts = max(1, min(places // max(blocks, 1), keys // _LEAST_KEYS))
    gain = keys / 64 * (1 - 1 / parts) * costs.tile_us
    return parts if gain > costs.combine_us + rows * costs.row_us else 1


def fewest_to_fill(
    blocks: int, pieces: int, places: int, most: int, enough: Callable[[float, float], float]
) -> int:
    """The fewest of up to ``most`` parts of ``pieces`` that leave few of ``places`` empty, since
    each is more to combine.

    Blocks run in rounds of ``places``; a share is how full their rounds are. ``enough`` takes a
    number of rounds, and the best share of all, to the share that is good enough there. Where none
    is, 85 % of the best are, as FlashAttention-2 decides.
    """
    shares = {}
    for parts in range(1, most + 1):
        # Only counts that change the longest part are worth a look.
        if parts > 1 and -(-pieces // parts) == -(-pieces // (parts - 1)):
            continue
        rounds = blocks * parts / places
        shares[parts] = rounds, rounds / -(-blocks * parts // places)
    best = max(share for _, share in shares.values())
    for parts, (rounds, share) in shares.items():
        if share >= enough(rounds, best):
            return parts
    return next(parts for parts, (_, share) in shares.items() if share >= 0.85 * best)


class Times(NamedTuple):
    """Of reading keys a little at a time, in bytes that a busy SM reads meanwhile: starting and
    ending a round, combining, and each part of it. ``latency``: what of the time does not shrink
    where fewer blocks read. Fewest ``pieces`` of a part, most ``parts``."""

    start: int
    combine: int
    part: int
    latency: float
    pieces: int
    parts: int


@functools.lru_cache(4096)
def least_time(blocks: int, pieces: int, piece_bytes: int, units: int, times: Times) -> int:
    """Into how many parts ``pieces`` of keys go so that ``blocks`` take the least time on ``units``
    SMs, in rounds of one an SM. Fewer blocks than SMs read faster each."""
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
