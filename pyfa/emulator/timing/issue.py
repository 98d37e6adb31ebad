"""The model of one compute unit: when the instructions of traced workgroups issue, and what they
wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfa.emulator import native
from pyfa.emulator.decode import Code
from pyfa.emulator.timing import constants, phases, program
from pyfa.emulator.timing.trace import LDS, Trace

# The layouts of core/timing.c.
TURN = np.dtype(
    [("step", "u4"), ("first", "u4"), ("clocks", "u2"), ("lines", "u2"), ("taken", "u1"),
     ("reserved", "u1", (3,))], align=True,
)  # fmt: skip
WAVE = np.dtype(
    [("first", "u4"), ("count", "u4"), ("simd", "u4"), ("group", "u4"), ("start", "f8")], align=True
)
CAUSES = (
    "vector unit",
    "LDS",
    "memory",
    "barrier",
    "dependency",
    "fetch",
    "issue",
    "start and end",
)
SIMDS = 4
_SHUFFLE_CLOCKS = 2  # ds_bpermute and its like use the crossbar alone: 64 dwords of 32 a clock


@dataclass(frozen=True)
class Turns:
    """Traced workgroups in the form that the model needs: program, events, memory segments and
    wavefronts."""

    code: Code
    steps: npt.NDArray[Any]
    turns: npt.NDArray[Any]
    lines: npt.NDArray[np.uint64]
    waves: npt.NDArray[Any]

    @property
    def lds_conflict_clocks(self) -> int:
        """Return the LDS clocks beyond those that the bytes need."""
        kinds = self.steps["kind"][self.turns["step"]]
        mine = self.turns[kinds == program.NUMBER["lds"]]
        least = self._least()[mine["step"]]
        return int(np.maximum(0, mine["clocks"].astype(np.int64) - least).sum())

    def _least(self) -> npt.NDArray[np.int64]:
        return np.array([_least_clocks(name) for name in self.code.names], np.int64)


@dataclass(frozen=True)
class Result:
    """The model's result for one run, with each constant at the same end of its range.

    ``lost``: clocks in which matrix units are idle, by instruction and cause (the last row is for
    SIMDs without a wavefront). ``stalled``: clocks for which wavefronts wait at an instruction.
    ``issued``: the clock of each event.
    """

    clocks: float
    matrix_clocks: float
    vector_clocks: float
    lds_clocks: float
    l1_clocks: float
    l1_misses: float
    issued: npt.NDArray[np.float32]
    lost: npt.NDArray[np.float64]
    stalled: npt.NDArray[np.float64]

    @property
    def utilization(self) -> float:
        """Return the utilization of the four matrix units."""
        return self.matrix_clocks / (SIMDS * self.clocks) if self.clocks else 0.0


def turns_of(code: Code, traces: Sequence[Trace], copies: int = 1) -> Turns:
    """Combine ``traces`` on one compute unit, each ``copies`` times with separate memory lines."""
    conflicts, steps = phases.Conflicts(), program.steps_of(code)
    turns: list[npt.NDArray[Any]] = []
    lines: list[npt.NDArray[np.uint64]] = []
    waves: list[tuple[int, int, int, int, float]] = []
    at = line_at = group = 0
    for trace in traces:
        clocks, of_lines, count = _accesses(code, steps, trace, conflicts)
        for copy in range(copies):
            for wave in range(trace.waves):
                mask = trace.events["wave"] == wave
                events = trace.events[mask]
                made = np.zeros(len(events), TURN)
                made["step"] = events["index"]
                made["clocks"] = np.minimum(clocks[mask], 65535)
                made["first"], made["lines"] = of_lines[mask] + line_at, count[mask]
                following = np.append(events["index"][1:], 0)
                made["taken"] = following != events["index"] + 1
                if len(made):
                    made["taken"][-1] = 0
                # SIMDs take wavefronts in turn; the next workgroup starts where this one ended.
                waves.append((at, len(made), (wave + trace.waves * group) % SIMDS, group, 0.0))
                turns.append(made)
                at += len(made)
            # Nothing is shared in L1 between workgroups: copies get lines of their own.
            lines.append(_lines(trace) + np.uint64(copy << 40))
            line_at += len(lines[-1])
            group += 1
    return Turns(code, steps, np.concatenate(turns), np.concatenate(lines), np.array(waves, WAVE))


def _lines(trace: Trace) -> npt.NDArray[np.uint64]:
    halved: npt.NDArray[np.uint64] = trace.segments >> np.uint64(1)
    return halved


def _least_clocks(name: str) -> int:
    if not name.startswith("ds_"):
        return 0
    if "permute" in name or "swizzle" in name:
        return _SHUFFLE_CLOCKS
    both = 2 if "read2" in name or "write2" in name else 1
    return max(2, both * 64 * program.lds_size(name) // 128)


def _accesses(
    code: Code, steps: npt.NDArray[Any], trace: Trace, conflicts: phases.Conflicts
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the clocks, first line and number of lines of every event."""
    events = trace.events
    clocks = np.zeros(len(events), np.int64)
    first, count = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    shuffles = np.array(["permute" in n or "swizzle" in n for n in code.names])
    clocks[shuffles[events["index"]]] = _SHUFFLE_CLOCKS
    for number in np.flatnonzero(events["accesses"]).tolist():
        event = events[number]
        name = code.names[int(event["index"])]
        start = int(event["first"])
        for access in trace.accesses[start : start + int(event["accesses"])].tolist():
            kind, size, amount, at = access
            if kind == LDS:
                lanes = trace.lanes[at : at + phases.LANES]
                clocks[number] += conflicts.clocks(lanes, size, program.is_lds_store(name))
            else:
                # The L1 takes 16 addresses and gives 64 bytes, or one segment, in a clock.
                clocks[number] += max(4, -(-size // 64), amount)
                first[number], count[number] = at, amount
    return clocks, first, count


def simulate(turns: Turns, end: str, changed: Mapping[str, float] | None = None) -> Result:
    """Run the model with the constants of one ``end``, some of them ``changed``."""
    values = {**constants.of(constants.ISSUE, end), **(changed or {})}
    gap = constants.DEVICE["wave_gap"]
    waves = turns.waves.copy()
    waves["start"] = np.arange(len(waves)) * getattr(gap, end)
    return run(turns, waves, values)


def run(turns: Turns, waves: npt.NDArray[Any], values: Mapping[str, float]) -> Result:
    """Run the model. ``values``: the value of each constant in ``constants.ISSUE``. ``waves``: one
    record for each wavefront; its ``start`` is the clock at which the wavefront starts."""
    parameters = (ctypes.c_double * len(constants.ISSUE))(*(values[n] for n in constants.ISSUE))
    steps = len(turns.steps)
    issued = np.zeros(len(turns.turns), np.float32)
    lost = np.zeros((steps + 1, len(CAUSES)))
    stalled = np.zeros((steps + 1, len(CAUSES)))
    totals = np.zeros(6)
    arrays = (turns.steps, turns.turns, turns.lines, waves, issued, lost, stalled, totals)
    step, turn, line, wave, *out = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
    status = native.load().emulator_time(
        step, ctypes.c_uint32(steps), turn, line, wave, ctypes.c_uint32(len(waves)),
        ctypes.byref(parameters), *out,
    )  # fmt: skip
    if status == 1:
        raise MemoryError(f"the timing model could not take {len(waves)} wavefronts")
    if status == 2:
        raise RuntimeError("the timing model stands still: a wavefront waits for ever")
    clocks, matrix, vector, lds, l1, misses = (float(x) for x in totals)
    return Result(clocks, matrix, vector, lds, l1, misses, issued, lost, stalled)
