"""An estimate of DRAM traffic, between the compulsory and the requested bytes.

It models one cache in front of memory, the device's last level. If ``bytes`` are accessed between
two uses of the same data, the share cache / bytes of it stays in the cache (random replacement,
steady state). There are two kinds of reuse:

- inside a kernel: workgroups that run at the same time read the same K and V in step, so they count
  as one reader. A later round of workgroups reads again the share that the cache did not keep;
- between kernels: a kernel reads what the previous kernel wrote or read. All data that both access
  passes through the cache between the two uses. An intermediate result that stays in the cache is
  not written to memory, either.

The model leaves out partially used lines, workgroups that fall out of step, the two halves of an
H100's L2, and sectors that are fetched but not used. ``benchmarks/hbm_traffic.py`` compares it with
ncu's ``dram__bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device
from .passes import INTERMEDIATE, Pass


def last_level_bytes(device: Device) -> int:
    """Return the bytes of the cache in front of memory: AMD's Infinity Cache, else the L2."""
    return device.cache_bytes or device.l2_bytes * device.dies


def dram_bytes(passes: Sequence[Pass], cache: int, slots: int) -> int:
    """Return the bytes to and from memory of a sequence of kernels, starting with an empty cache.

    ``slots``: workgroups that the device runs at once. The result is at least the compulsory and at
    most the requested bytes.
    """
    return sum(each_dram_bytes(passes, cache, slots))


def each_dram_bytes(passes: Sequence[Pass], cache: int, slots: int) -> list[int]:
    """Return ``dram_bytes`` by kernel."""
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
    """Return the share of data that a cache does not keep while ``passed`` bytes are accessed."""
    return 1.0 - min(1.0, cache / passed) if passed else 0.0
