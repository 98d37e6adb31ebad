"""The sensitivity of the timing model's seconds on an MI300X to each of its constants.

Model, not measured. Constants of a compute unit change the time of a workgroup: ``costs_of``
simulates the recorded workgroup again for each of them. The costs are saved by the digest of the
code, for machines without the emulator. Constants of the device are varied directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel
from ...traffic.model import Model
from ..native import tiling
from . import code, plans, runtime_timing
from .runtime_timing import Cost
from .target import TARGET

# What a constant is multiplied by; 1 is its own value. Times in between are interpolated.
FACTORS = (0.25, 0.5, 2.0, 4.0)
_SWITCHES = ("transcendental_apart", "matrix_apart")
# Two more constants give the clock by utilization; constants.py has them outside its tables.
CLOCK, EXPONENT = "clock", "clock_exponent"
_OF_DEVICE = ("dispatch", "launch_seconds", "hbm_bytes", "l2_bytes_of_die")

Saved = Mapping[str, Any]
Find = Callable[[Plan, int], "Costs"]


class NoCostsError(LookupError):
    """Says why a kernel has no costs."""


@dataclass(frozen=True)
class Costs:
    """The costs of one kernel with ``resident`` workgroups on a compute unit, which can hold
    ``fits``.

    ``base``: the costs at both ends of the range. ``changed``: the costs after a change of one
    constant, by constant and at both ends. A number is multiplied by each of FACTORS; a switch is
    turned over. Constants without effect are left out.
    """

    digest: str
    title: str
    resident: int
    fits: int
    base: tuple[Cost, Cost]
    changed: Mapping[str, tuple[tuple[Cost, ...], tuple[Cost, ...]]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, without the matrix clocks, which depend on the code only, not on
        the timing model's constants."""

        def short(cost: Cost) -> list[float]:
            return [round(x, 1) for x in cost[:3]]

        return {
            "digest": self.digest,
            "title": self.title,
            "resident": self.resident,
            "fits": self.fits,
            "matrix": list(self.base[0][3:]),
            "base": [short(one) for one in self.base],
            "changed": {
                name: [[short(one) for one in end] for end in ends]
                for name, ends in self.changed.items()
            },
        }

    @classmethod
    def of(cls, data: Saved) -> Costs:
        """Read the data of ``as_dict``."""

        def cost(three: Sequence[float]) -> Cost:
            return Cost(*three, *data["matrix"])

        low, high = (cost(one) for one in data["base"])
        changed = {}
        for name, ends in data["changed"].items():
            first, second = (tuple(cost(one) for one in end) for end in ends)
            changed[name] = (first, second)
        names = ("digest", "title", "resident", "fits")
        return cls(**{name: data[name] for name in names}, base=(low, high), changed=changed)


@dataclass(frozen=True)
class Constant:
    """A constant that may be wrong: the two ends of its range, its unit, whether it is a switch."""

    name: str
    ends: tuple[float, float]
    unit: str
    switch: bool = False


def constants_known() -> dict[str, Constant]:
    """Return the constants that can be varied, by name."""
    from ...emulator.timing import constants

    found = {
        name: Constant(name, (one.low, one.high), one.unit, name in _SWITCHES)
        for table in (constants.ISSUE, constants.DEVICE)
        for name, one in table.items()
        if table is constants.ISSUE or name in _OF_DEVICE
    }
    low, high = (hz * machine for hz, machine in _clocks())
    found[CLOCK] = Constant(CLOCK, (low, high), "Hz")
    one = constants.CLOCK_EXPONENT
    found[EXPONENT] = Constant(EXPONENT, (one.low, one.high), "")
    return found


def _clocks() -> tuple[tuple[float, float], tuple[float, float]]:
    from ...emulator.timing import constants

    low, high = (
        (getattr(constants.CLOCK_HZ, end), getattr(constants.MACHINES, end))
        for end in constants.ends()
    )
    return low, high


@functools.cache
def costs_of(plan: Plan, resident: int = 0) -> Costs:
    """Compute the costs of ``plan`` with the emulator."""
    from ...emulator.timing import constants, issue

    plan = Plan("hip", plan.kernel, plan.constants)
    why = runtime_timing.why_unavailable()
    if why:
        raise NoCostsError(why)
    runs = runtime_timing.runs_of(plan, resident)
    if runs is None:
        raise NoCostsError(f"the model does not know {plan.kernel}")
    more = runs.tiles[1] - runs.tiles[0]

    def cost(end: str, changed: Mapping[str, float]) -> Cost:
        few, many = (issue.simulate(one, end, changed) for one in (runs.short, runs.long))
        tile = (many.clocks - few.clocks) / more
        matrix = (many.matrix_clocks - few.matrix_clocks) / more / runs.resident
        fixed = max(0.0, few.clocks - tile * runs.tiles[0])
        rest = max(0.0, few.matrix_clocks / runs.resident - matrix * runs.tiles[0])
        return Cost(tile, fixed, runs.masked_clocks(end, changed), matrix, rest)

    low, high = (cost(end, {}) for end in constants.ends())
    changed = {}
    for name, one in constants.ISSUE.items():
        first, second = (
            tuple(cost(end, {name: value}) for value in _others(name, getattr(one, end)))
            for end in constants.ends()
        )
        if any(x[:3] != base[:3] for base, end in ((low, first), (high, second)) for x in end):
            changed[name] = (first, second)
    digest = code.load(plan, plans.EMULATED).digest
    return Costs(digest, runs.title, runs.resident, runs.fits, (low, high), changed)


def _others(name: str, value: float) -> tuple[float, ...]:
    """Return the values that a constant is changed to; for a switch both positions."""
    return (0.0, 1.0) if name in _SWITCHES else tuple(value * factor for factor in FACTORS)


@dataclass(frozen=True)
class Reckoned:
    """The modeled time of a problem's forward or backward.

    ``seconds``, ``utilization`` and ``bound`` are given for the low and the high end of the
    constants' ranges. ``changed``: the seconds after a change of one constant, by constant and end,
    as in ``Costs.changed``. ``kernels``: the digest of each kernel's code, by title.
    """

    seconds: tuple[float, float]
    utilization: tuple[float, float]
    bound: tuple[str, str]
    kernels: Mapping[str, str]
    changed: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


def reckon(
    plan: Plan, problem: Problem, shape: Shape, model: Model, direction: str, find: Find
) -> Reckoned:
    """Estimate ``direction`` (forward or backward). ``find`` returns a kernel's costs with a number
    of workgroups on a compute unit (0: as many as fit), or raises NoCostsError."""
    from ...emulator.timing import constants, device

    forward = direction == "forward"
    pairs = [
        pair
        for pair in tiling.pairs_of(TARGET, plan, problem, shape)
        if (pair[0].role == "forward") == forward
    ]
    dram = model.costs["tiled", direction].dram / len(pairs)
    works = [_meets(tiled, one, shape, find) for tiled, one in pairs]
    ends = constants.ends()

    def seconds(end: int, pick: Callable[[Costs], Cost], **how: Any) -> Any:
        launches = [work.launch(pick(costs), costs.resident, dram) for work, costs in works]
        return device.time(launches, ends[end], **how)

    def own(end: int) -> Callable[[Costs], Cost]:
        return lambda costs: costs.base[end]

    def other(end: int, name: str, at: int) -> Callable[[Costs], Cost]:
        return lambda costs: (
            costs.changed[name][end][at] if name in costs.changed else costs.base[end]
        )

    low, high = seconds(0, own(0)), seconds(1, own(1))
    changed: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    for name in sorted({name for _, costs in works for name in costs.changed}):
        options = range(len(_others(name, 1.0)))
        first, second = (
            tuple(seconds(end, other(end, name, at)).seconds for at in options) for end in range(2)
        )
        changed[name] = (first, second)
    for name in (*_OF_DEVICE, CLOCK, EXPONENT):
        first, second = (
            tuple(seconds(end, own(end), **_how(name, end, x)).seconds for x in FACTORS)
            for end in range(2)
        )
        changed[name] = (first, second)
    return Reckoned(
        (low.seconds, high.seconds),
        (low.utilization, high.utilization),
        (low.bound, high.bound),
        {costs.title: costs.digest for _, costs in works},
        changed,
    )


def _how(name: str, end: int, factor: float) -> dict[str, Any]:
    """Return the arguments of ``device.time`` with a constant of the device at ``factor`` times its
    value."""
    from ...emulator.timing import constants

    at = constants.ends()[end]
    if name in _OF_DEVICE:
        return {"changed": {name: getattr(constants.DEVICE[name], at) * factor}}
    hz, machine = _clocks()[end]
    exponent = getattr(constants.CLOCK_EXPONENT, at)
    if name == CLOCK:
        return {"law": (hz * machine * factor, exponent)}
    return {"law": (hz * machine, exponent * factor)}


def _meets(tiled: TiledKernel, plan: Plan, shape: Shape, find: Find) -> tuple[Any, Costs]:
    work = runtime_timing.work_of(tiled, shape)
    costs = find(plan, 0)
    resident = work.resident(costs.fits)
    return work, costs if resident == costs.resident else find(plan, resident)


class Table:
    """Saved costs, by digest; missing ones are computed with the emulator of this machine."""

    def __init__(self, records: Sequence[Saved], live: bool = True) -> None:
        self._saved = {(one["digest"], one["resident"]): one for one in records}
        self._fits = {one["digest"]: one["fits"] for one in records}
        self._titles = {one["title"] for one in records}
        self._live = live
        self.used: dict[tuple[str, int], Costs] = {}
        self.made_here: set[str] = set()

    def find(self, plan: Plan, resident: int) -> Costs:
        """Implement ``Find``."""
        digest = code.load(Plan("hip", plan.kernel, plan.constants), plans.EMULATED).digest
        key = (digest, resident or self._fits.get(digest, 0))
        if key in self._saved:
            found = Costs.of(self._saved[key])
        elif self._live:
            found = costs_of(plan, resident)
            self.made_here.add(digest)
        else:
            title = _title(plan)
            other = " (those saved are of other code)" if title in self._titles else ""
            raise NoCostsError(f"no prediction is saved for code object {digest[:12]}{other}")
        self.used[found.digest, found.resident] = found
        return found


def _title(plan: Plan) -> str:
    from . import samples

    sample = samples.of(plan)
    return sample.title if sample else ""
