"""The model of the device around a compute unit: rounds of workgroups, their tail, memory, and the
clock."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyfa.codeobject import Kernel
from pyfa.emulator.timing import constants
from pyfa.emulator.timing.issue import SIMDS

LDS_OF_UNIT = 65536
REGISTERS = 512  # of a lane and SIMD, shared by its wavefronts
WAVES_OF_SIMD = 8


@dataclass(frozen=True)
class Launch:
    """One kernel's workgroups, in the order in which they are dispatched.

    ``clocks``: the clocks of each workgroup. ``matrix``: matrix clocks of all workgroups on all
    SIMDs. ``resident``: workgroups on a compute unit at once. ``dram_bytes``: bytes from memory
    behind the caches. ``l2_bytes``: bytes requested from L2. ``taken``: workgroups are persistent
    and take work tiles themselves, so that XCDs balance and no dispatch lies between work tiles.
    """

    clocks: Sequence[float]
    matrix: float
    resident: int = 1
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0
    taken: bool = False


@dataclass(frozen=True)
class Time:
    """Seconds of a sequence of launches, at one end of the constants."""

    seconds: float
    utilization: float
    hz: float
    bound: str
    last_round: float


def resident(kernel: Kernel, threads: int, lds_bytes: int = 0) -> int:
    """Return how many workgroups of ``threads`` one compute unit holds at once."""
    waves = -(-threads // 64)
    granule = 8
    registers = max(granule, -(-max(kernel.vgprs, 1) // granule) * granule)
    of_simd = min(WAVES_OF_SIMD, REGISTERS // min(registers, REGISTERS))
    by_waves = of_simd * SIMDS // waves
    lds = kernel.lds_bytes + lds_bytes
    by_lds = LDS_OF_UNIT // lds if lds else by_waves
    return max(1, min(by_waves, by_lds))


def finish(clocks: Sequence[float], places: int, dies: int, gap: float, engines: int = 1) -> float:
    """Return when the last workgroup ends. Workgroups go to the XCDs in turn; on an XCD, each
    workgroup takes the first free slot, ``gap`` clocks after the previous workgroup there ended.

    If an XCD feeds its shader ``engines`` in turn, the engine with the most work ends no sooner
    than its share of the slots has done that work.
    """
    if not len(clocks):
        return 0.0
    if min(clocks) == max(clocks):
        rounds = -(-len(clocks[::dies]) // (places // dies))
        return rounds * (clocks[0] + gap) - gap
    last = 0.0
    for die in range(dies):
        free = [0.0] * (places // dies)
        share = len(free) / engines
        for engine in range(engines):
            given = clocks[die + engine * dies :: dies * engines]
            if len(given) > -(-len(free) // engines):
                last = max(last, (sum(given) + gap * len(given)) / share - gap)
        for one in clocks[die::dies]:
            heapq.heapreplace(free, free[0] + one + gap)
        last = max(last, max(free) - gap)
    return last


def time(
    launches: Sequence[Launch],
    end: str,
    law: tuple[float, float] | None = None,
    changed: Mapping[str, float] | None = None,
) -> Time:
    """Return the time of the launches in sequence.

    The clock rate of each launch follows from its utilization. ``law`` is passed to
    ``constants.clock``. ``changed`` replaces some of the constants ``DEVICE``.
    """
    device = {**constants.of(constants.DEVICE, end), **(changed or {})}
    units, dies = int(device["units"]), int(device["dies"])
    seconds = busy = total = 0.0
    bound, last_round, hz = "", 0.0, 0.0
    longest = -1.0
    for launch in launches:
        if not len(launch.clocks):
            continue
        places = units * launch.resident
        if launch.taken:
            clocks = finish(launch.clocks, places, 1, 0.0)
        else:
            engines = int(device["engines"])
            clocks = finish(launch.clocks, places, dies, device["dispatch"], engines)
        utilization = launch.matrix / (SIMDS * units * clocks)
        hz_here = constants.clock(utilization, end, law)
        ways = {
            "compute units": clocks / hz_here,
            "HBM": launch.dram_bytes / device["hbm_bytes"],
            "L2": launch.l2_bytes / (device["l2_bytes_of_die"] * dies * hz_here),
        }
        by = max(ways, key=lambda name: ways[name])
        seconds += ways[by] + device["launch_seconds"]
        busy += launch.matrix / hz_here
        total += ways[by]
        if ways[by] > longest:
            longest, bound, hz = ways[by], by, hz_here
            mean = sum(launch.clocks) / places
            last_round = max(0.0, 1 - mean / clocks)
    utilization = busy / (SIMDS * units * total) if total else 0.0
    return Time(seconds, utilization, hz, bound, last_round)
