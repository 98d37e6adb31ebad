"""From two runs of a kernel with different numbers of loop iterations to the cost and losses of an
iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfa.emulator.timing import constants, issue, program
from pyfa.emulator.timing.issue import CAUSES, SIMDS, Result, Turns

SLOTS = 16  # rows that a loop is shown in, at most, beside the one that closes it


@dataclass(frozen=True)
class Slot:
    """A stretch of the hot loop: from the matrix product that begins it to the one that begins the
    next slot.

    The last slot of a loop, ``end``, lies between the last product and the first product of the
    next iteration. Instructions are per wavefront and iteration. ``clocks``: from a wavefront's
    first issue in the slot to its first issue in the next. ``lost``: clocks of a SIMD's matrix
    unit, by cause.
    """

    name: str
    matrix: int
    vector: int
    transcendental: int
    lds: int
    memory: int
    scalar: int
    matrix_clocks: float
    clocks: float
    lost: Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """The estimate for one end of the constants. A tile is one iteration of the workgroup; clocks
    are per workgroup.

    ``lost``: shares of the matrix units' time in full tiles, by cause; ``end_of_loop`` is the share
    between the last product of an iteration and the first of the next.
    """

    end: str
    resident: int
    clocks_of_tile: float
    matrix_of_tile: float
    fixed_clocks: float
    fixed_matrix: float
    utilization: float
    lost: Mapping[str, float]
    end_of_loop: float
    lds_share: float
    l1_share: float
    slots: tuple[Slot, ...]

    @property
    def hz(self) -> float:
        """Return the clock of a device that is filled with such tiles."""
        return constants.clock(self.utilization, self.end)

    def clocks(self, tiles: float) -> float:
        """Return the clocks of a workgroup, or of all that share the compute unit, with ``tiles``
        tiles each."""
        return self.fixed_clocks + self.clocks_of_tile * tiles

    def matrix(self, tiles: float) -> float:
        """Return the matrix clocks of one workgroup, summed over SIMDs."""
        return self.fixed_matrix + self.matrix_of_tile * tiles

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "slots"}
        data["slots"] = [dict(vars(slot)) for slot in self.slots]
        return data


def estimate(
    short: Turns,
    long: Turns,
    tiles: tuple[float, float],
    end: str,
    resident: int = 1,
    changed: Mapping[str, float] | None = None,
) -> Estimate:
    """Estimate the cost from ``short`` and ``long``, whose workgroups differ by ``tiles`` tiles
    each."""
    few, many = (issue.simulate(turns, end, changed) for turns in (short, long))
    more = tiles[1] - tiles[0]
    clocks = many.clocks - few.clocks
    matrix = many.matrix_clocks - few.matrix_clocks
    lost = (many.lost - few.lost).sum(axis=0)
    loop = _loop(long)
    slots = _slots(short, long, few, many, loop) if loop is not None else ()
    turns = _turns_between(short, long, loop) if loop is not None else 1
    of_tile = matrix / more / resident
    return Estimate(
        end=end,
        resident=resident,
        clocks_of_tile=clocks / more,
        matrix_of_tile=of_tile,
        fixed_clocks=max(0.0, few.clocks - clocks / more * tiles[0]),
        fixed_matrix=max(0.0, few.matrix_clocks / resident - of_tile * tiles[0]),
        utilization=matrix / (SIMDS * clocks),
        lost={cause: float(x) / (SIMDS * clocks) for cause, x in zip(CAUSES, lost, strict=True)},
        end_of_loop=sum(slots[-1].lost.values()) * turns * SIMDS / (SIMDS * clocks)
        if slots
        else 0.0,
        lds_share=(many.lds_clocks - few.lds_clocks) / clocks,
        l1_share=(many.l1_clocks - few.l1_clocks) / clocks,
        slots=slots,
    )


def _loop(turns: Turns) -> npt.NDArray[Any] | None:
    """Return the events of the first wavefront's middle pass through its hottest loop; None without
    one."""
    first, count = int(turns.waves["first"][0]), int(turns.waves["count"][0])
    mine = turns.turns[first : first + count]
    steps = mine["step"].astype(np.int64)
    back = np.flatnonzero((mine["taken"][:-1] == 1) & (steps[1:] < steps[:-1]))
    if not len(back):
        return None
    matrix = turns.steps["kind"][steps] == program.NUMBER["matrix"]
    best, most = None, 0
    for step in np.unique(steps[back]).tolist():
        at = back[steps[back] == step]
        if len(at) < 3:
            continue
        inside = int(matrix[at[0] : at[-1]].sum())
        if inside > most:
            best, most = at, inside
    if best is None:
        return None
    middle = len(best) // 2
    return np.arange(best[middle - 1] + 1, best[middle] + 1) + first


def _turns_between(short: Turns, long: Turns, loop: npt.NDArray[Any]) -> float:
    """Return how many more loop iterations a wavefront of ``long`` makes than one of ``short``."""
    step = int(long.turns["step"][loop[-1]])
    waves = len(long.waves)
    few, many = (int((t.turns["step"] == step).sum()) for t in (short, long))
    return max(1.0, (many - few) / waves)


def _slots(
    short: Turns, long: Turns, few: Result, many: Result, loop: npt.NDArray[Any]
) -> tuple[Slot, ...]:
    steps = long.turns["step"][loop].astype(np.int64)
    kinds = long.steps["kind"][steps]
    products = np.flatnonzero(kinds == program.NUMBER["matrix"])
    if not len(products):
        return ()
    each = -(-len(products) // SLOTS)
    opens = products[::each]
    # Instructions before the first product belong to the end of the previous iteration.
    bounds = [*opens.tolist(), int(products[-1]) + 1]
    lost = many.lost - few.lost
    passes = _turns_between(short, long, loop)
    found: list[Slot] = []
    issued = many.issued[loop]
    for number, (begin, stop) in enumerate(pairwise(bounds)):
        inside = np.arange(begin, stop)
        found.append(_slot(str(number + 1), inside, steps, kinds, long, lost, passes,
                           float(issued[min(stop, len(issued) - 1)] - issued[begin])))  # fmt: skip
    rest = np.concatenate([np.arange(bounds[-1], len(loop)), np.arange(0, bounds[0])])
    # The next pass begins right behind this one.
    next_first = min(int(loop[-1]) + 1 + bounds[0], len(many.issued) - 1)
    span = float(many.issued[next_first] - issued[min(bounds[-1], len(issued) - 1)])
    found.append(_slot("end", rest, steps, kinds, long, lost, passes, span))
    return tuple(found)


def _slot(
    name: str,
    inside: npt.NDArray[Any],
    steps: npt.NDArray[np.int64],
    kinds: npt.NDArray[Any],
    turns: Turns,
    lost: npt.NDArray[np.float64],
    passes: float,
    clocks: float,
) -> Slot:
    def count(*names: str) -> int:
        return int(np.isin(kinds[inside], [program.NUMBER[n] for n in names]).sum())

    mine = np.unique(steps[inside])
    amounts = turns.steps["amount"][steps[inside]].astype(np.float64)
    matrix = kinds[inside] == program.NUMBER["matrix"]
    by_cause = lost[mine].sum(axis=0) / passes / SIMDS
    return Slot(
        name=name,
        matrix=count("matrix"),
        vector=count("vector"),
        transcendental=count("transcendental"),
        lds=count("lds"),
        memory=count("load", "load_to_lds", "store", "atomic"),
        scalar=count("scalar", "scalar_load", "jump", "barrier", "wait", "idle", "priority"),
        matrix_clocks=float(amounts[matrix].sum()) * program.QUANTUM,
        clocks=clocks,
        lost={cause: float(x) for cause, x in zip(CAUSES, by_cause, strict=True)},
    )
