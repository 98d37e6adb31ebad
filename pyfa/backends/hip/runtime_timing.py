"""The timing model of the HIP kernels: the cost of one loop iteration of each, and the time of a
problem.

A model of an MI300X, not measured. A kernel runs in the emulator with two lengths, which differ in
the number of loop iterations. One workgroup is recorded, and the model computes when its
instructions would issue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import bundle
from ..._torch import Empty
from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel
from ...traffic.kernels import ROLES
from ...traffic.model import Model
from ...traffic.requested import blocks, requested_of
from ..common.program import Step
from ..native import tiling
from . import code, plans, samples
from .launcher import Launcher
from .runtime_emulator import EmulatorRuntime, program
from .target import TARGET


class Cost(NamedTuple):
    """The cost of the workgroups that share a compute unit (one or more), with each constant of the
    model at the same end of its range. ``tile``: clocks in which each of them computes one tile.
    ``fixed``: clocks for everything else. ``masked``: clocks added by a causal diagonal.
    ``matrix_of_tile``, ``fixed_matrix``: the matrix clocks of one of the workgroups, per tile and
    for everything else."""

    tile: float
    fixed: float
    masked: float
    matrix_of_tile: float
    fixed_matrix: float


@dataclass(frozen=True)
class Kernel:
    """The model's answer for one plan: an estimate for each end of the range, and the tiles of its
    sample.

    ``masked``: clocks that the diagonal of a causal mask adds to a workgroup, by end.
    ``conflict_clocks``: LDS clocks per tile of the workgroup beyond those that its bytes need.
    """

    title: str
    estimates: tuple[Any, ...]  # of emulator.timing.report.Estimate
    masked: tuple[float, ...]
    conflict_clocks: float
    resident: int

    def cost(self, end: int) -> Cost:
        """Return the cost at the ``end``-th end of the range."""
        one = self.estimates[end]
        return Cost(
            one.clocks_of_tile,
            one.fixed_clocks,
            self.masked[end],
            one.matrix_of_tile,
            one.fixed_matrix,
        )


@dataclass(frozen=True)
class Answer:
    """The model's answer for a problem, at both ends of the range: seconds, rates, utilization,
    bound."""

    role: str
    seconds: tuple[float, float]
    tflops: tuple[float, float]
    bytes_per_second: tuple[float, float]
    utilization: tuple[float, float]
    hz: tuple[float, float]
    bound: tuple[str, str]
    last_round: tuple[float, float]


def why_unavailable() -> str | None:
    """Return why there is no model on this machine; None if there is one."""
    return EmulatorRuntime().why_unavailable() or code.why_unavailable()


def is_at_hand(plan: Plan, problem: Problem, shape: Shape) -> bool:
    """Return whether the bundle has the code objects of a problem's kernels, so that nothing is
    compiled."""
    arch = plans.EMULATED
    return all(
        bundle.find(arch, code.key_of(Plan("hip", one.kernel, one.constants), arch)) is not None
        for _, one in tiling.pairs_of(TARGET, plan, problem, shape)
    )


def kernel(plan: Plan, resident: int = 0) -> Kernel | None:
    """Return the model of ``plan``, whose kernel ``samples`` knows. ``resident`` workgroups share a
    compute unit, by default as many as fit."""
    return _kernel(Plan("hip", plan.kernel, plan.constants), resident)


@functools.cache
def _kernel(plan: Plan, resident: int) -> Kernel | None:
    from ...emulator.timing import constants, report

    runs = runs_of(plan, resident)
    if runs is None:
        return None
    short, long, tiles, copies = runs.short, runs.long, runs.tiles, runs.resident
    ends = constants.ends()
    estimates = tuple(report.estimate(short, long, tiles, end, copies) for end in ends)
    masked = tuple(runs.masked_clocks(end) for end in ends)
    conflicts = (long.lds_conflict_clocks - short.lds_conflict_clocks) / (tiles[1] - tiles[0])
    return Kernel(runs.title, estimates, masked, conflicts / copies, copies)


@dataclass(frozen=True)
class Runs:
    """The recorded runs of one plan, as ``emulator.timing.issue.Turns``: ``short`` and ``long`` are
    runs of two lengths, which differ by ``tiles``. ``under`` is the short run under a causal mask.
    ``fits``: workgroups that fit on a compute unit."""

    title: str
    short: Any
    long: Any
    under: Any | None
    tiles: tuple[float, float]
    resident: int
    fits: int

    def masked_clocks(self, end: str, changed: Mapping[str, float] | None = None) -> float:
        """Return the clocks that the diagonal of a causal mask adds."""
        from ...emulator.timing import issue

        if self.under is None:
            return 0.0
        under, short = (issue.simulate(x, end, changed).clocks for x in (self.under, self.short))
        return max(0.0, under - short)


def runs_of(plan: Plan, resident: int = 0) -> Runs | None:
    """Run ``plan`` in the emulator; return None for a kernel that ``samples`` does not know."""
    from ...emulator.timing import device, issue

    sample = samples.of(plan)
    if sample is None:
        return None
    traced = {n: counters_of(plan, sample.run, n, (0,)) for n in (sample.short, sample.long)}
    facts = code.load(plan, plans.EMULATED)
    fits = device.resident(facts.kernel, traced[sample.short][1])
    copies = resident or fits
    decoded = program(facts.data).code
    short, long = (issue.turns_of(decoded, one[0].traces, copies) for one in traced.values())
    under = None
    if sample.masked is not None:
        masked, _ = counters_of(plan, sample.masked, sample.short, (0,))
        under = issue.turns_of(decoded, masked.traces, copies)
    tiles = (sample.short / sample.keys, sample.long / sample.keys)
    return Runs(sample.title, short, long, under, tiles, copies, fits)


def counters_of(
    wanted: Plan,
    run: Callable[[Launcher, int], object],
    length: int,
    trace: Sequence[int] = (),
) -> tuple[Any, int]:
    """Return the counters of the one launch of ``wanted`` that ``run`` makes, with the traces of
    some workgroups, and its threads."""
    found: list[tuple[Any, int]] = []

    class Watching(EmulatorRuntime):
        @property
        def empty(self) -> Empty:
            return samples.empty

        def run(self, step: Step, *rest: Any) -> None:
            super().run(step, *rest)
            if (step.plan.kernel, step.plan.constants) == (wanted.kernel, wanted.constants):
                found.append((self.counters, step.threads))

    run(Launcher(Watching(trace)), length)
    (one,) = found
    return one


def answers(plan: Plan, problem: Problem, shape: Shape, model: Model) -> list[Answer]:
    """Estimate forward, and backward if the problem has one, on an MI300X."""
    pairs = tiling.pairs_of(TARGET, plan, problem, shape)
    found = []
    for to in ("forward", "backward"):
        mine = [p for p in pairs if (p[0].role == "forward") == (to == "forward")]
        if mine:
            found.append(_answer(to, mine, shape, model))
    return found


def _answer(
    to: str, pairs: Sequence[tuple[TiledKernel, Plan]], shape: Shape, model: Model
) -> Answer:
    from ...emulator.timing import constants, device

    dram = model.costs["tiled", to].dram
    ends = []
    for number, end in enumerate(constants.ends()):
        launches = [_launch(tiled, plan, shape, number, dram / len(pairs)) for tiled, plan in pairs]
        ends.append(device.time([one for one in launches if one is not None], end))
    low, high = ends
    flops = model.flops[to]

    def both(get: Callable[[Any], Any]) -> tuple[Any, Any]:
        return get(low), get(high)

    return Answer(
        role=to,
        seconds=both(lambda t: t.seconds),
        tflops=both(lambda t: flops / t.seconds / 1e12),
        bytes_per_second=both(lambda t: dram / t.seconds),
        utilization=both(lambda t: t.utilization),
        hz=both(lambda t: t.hz),
        bound=both(lambda t: t.bound),
        last_round=both(lambda t: t.last_round),
    )


def _launch(tiled: TiledKernel, plan: Plan, shape: Shape, end: int, dram: float) -> Any:
    work, most = work_of(tiled, shape), kernel(plan)
    assert most is not None
    resident = work.resident(most.resident)
    one = most if resident == most.resident else kernel(plan, resident)
    assert one is not None
    return work.launch(one.cost(end), resident, dram)


@dataclass(frozen=True)
class Work:
    """The workgroups of one launch in the order of kernels/hip/schedule.h: head by head, the last
    blocks of a head first. ``parts``: for each workgroup of a head, its number of tiles and whether
    a causal diagonal crosses them. ``batch_heads``: the number of (sequence, head) pairs.
    ``asked``: bytes requested from L2."""

    parts: Sequence[tuple[int, bool]]
    batch_heads: int
    asked: float

    def resident(self, most: int) -> int:
        """Return the number of workgroups on a compute unit at once, of which ``most`` fit."""
        from ...emulator.timing import constants

        units = int(constants.DEVICE["units"].low)
        return max(1, min(most, -(-len(self.parts) * self.batch_heads // units)))

    def launch(self, cost: Cost, resident: int, dram: float) -> Any:
        """Return the launch as ``emulator.timing.device.Launch``."""
        from ...emulator.timing import constants, device

        clocks = [cost.fixed + cost.tile * tiles + cost.masked * cut for tiles, cut in self.parts]
        matrix = sum(cost.fixed_matrix + cost.matrix_of_tile * tiles for tiles, _ in self.parts)
        # A die has neighboring heads one after the other: as many heads as dies go side by side.
        dies = int(constants.DEVICE["dies"].low)
        side = min(dies, self.batch_heads)
        order = [c for c in clocks for _ in range(side)] * (self.batch_heads // side)
        order += clocks * (self.batch_heads % side)
        return device.Launch(order, matrix * self.batch_heads, resident, dram, self.asked)


def work_of(tiled: TiledKernel, shape: Shape) -> Work:
    """Return the work of ``tiled`` for ``shape``."""
    owns, shape = ROLES[tiled.role].owns_keys, tiled.divided(shape)
    walked = tiled.tiling.block_q if owns else tiled.tiling.block_k
    heads = shape.heads_k if owns else shape.heads_q // tiled.tiling.packed
    again = shape.group if owns else 1
    parts = [
        (-(-(stop - begin) // walked) * again, _is_cut(shape, first, last, stop, owns))
        for block in blocks(shape, tiled)
        for first, last, begin, stop in zip(*(each.tolist() for each in block), strict=True)
    ][::-1]
    reads, writes = requested_of(shape, tiled)
    asked = float(sum(reads.values()) + sum(writes.values()))
    return Work(parts, heads * shape.batch, asked)


def _is_cut(shape: Shape, first: int, last: int, stop: int, owns: bool) -> bool:
    """Return whether the causal diagonal crosses the keys that a workgroup iterates over; False if
    it owns keys."""
    return not owns and shape.window_right >= 0 and stop > 0 and first != last
