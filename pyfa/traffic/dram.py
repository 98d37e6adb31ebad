"""An estimate of DRAM traffic, between what is compulsory and what is requested.

A model of one cache in front of memory, the last level that the device has, which keeps the share
of what is used again that fits: of ``bytes`` between two uses, cache / bytes stay (replacement at
random, in steady state). Two kinds of use again are told apart:

- inside a kernel: workgroups that run at once walk the same K and V in step, so they count as one
  reader; a later round of workgroups reads again what the heads at work did not keep;
- between kernels: what one wrote, or read, and the next reads; what passes between the two uses is
  all that both touch. An intermediate that stays in the cache is not written to memory either.

What the model leaves out: lines of partial use, workgroups that fall out of step, the two halves
into which an H100's L2 is cut, sectors fetched in vain. It is compared with ncu's ``dram__bytes``
by ``benchmarks/hbm_traffic.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device
from .passes import INTERMEDIATE, Pass


def last_level_bytes(device: Device) -> int:
    """Bytes of the cache in front of memory: AMD's Infinity Cache, else the L2."""
    return device.cache_bytes or device.l2_bytes * device.dies


def dram_bytes(passes: Sequence[Pass], cache: int, slots: int) -> int:
    """Bytes to and from memory of kernels one behind the other, from an empty cache.

    ``slots``: workgroups that the device runs at once. At least the compulsory bytes, at most the
    requested ones.
    """
    return sum(each_dram_bytes(passes, cache, slots))


def each_dram_bytes(passes: Sequence[Pass], cache: int, slots: int) -> list[int]:
    """``dram_bytes`` by kernel."""
    slots = max(1, slots)
    met: set[str] = set()
    before = 0
    found = []
    for one in passes:
        touched = sum(stream.once for stream in (*one.reads, *one.writes))
        carried = _lost(touched + before, cache)
        at_work = min(1.0, max(1.0, slots * one.heads / max(1, one.workgroups)) / one.heads)
        again = sum(stream.once for stream in one.reads if stream.asked > stream.once)
        inside = _lost(again * at_work, cache)
        total = 0.0
        for stream in one.reads:
            rounds = max(1.0, stream.asked / (max(1, stream.once) * slots))
            total += stream.once * (carried if stream.tensor in met else 1.0)
            total += stream.once * (rounds - 1.0) * inside
        for stream in one.writes:
            total += stream.once * (carried if stream.tensor in INTERMEDIATE else 1.0)
        met.update(stream.tensor for stream in (*one.reads, *one.writes))
        before = touched
        found.append(round(total))
    return found


def _lost(passed: float, cache: int) -> float:
    """The share of ``passed`` bytes that a cache does not keep."""
    return 1.0 - min(1.0, cache / passed) if passed else 0.0
