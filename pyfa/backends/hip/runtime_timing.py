"""The timing model over the HIP kernels: what a turn of each costs, and a problem's time.

A model of an MI300X, not measured. A kernel runs in the emulator on two lengths that differ by
turns of its loop, one workgroup is recorded, and the model says when its instructions would issue.
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
    """What a workgroup, or all that share a compute unit, take at one end: clocks of a tile, of
    all else, and what a causal diagonal adds; and matrix clocks of one of them, as the first
    two."""

    tile: float
    fixed: float
    masked: float
    matrix_of_tile: float
    fixed_matrix: float


@dataclass(frozen=True)
class Kernel:
    """What the model says of one plan: an estimate for each end, and its sample's tiles.

    ``masked``: clocks that the diagonal of a causal mask adds to a workgroup, by end.
    ``conflict_clocks``: LDS clocks of a tile of the workgroup beyond what its bytes take.
    """

    title: str
    estimates: tuple[Any, ...]  # of emulator.timing.report.Estimate
    masked: tuple[float, ...]
    conflict_clocks: float
    resident: int

    def cost(self, end: int) -> Cost:
        """At the ``end``-th end."""
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
    """Of a problem, at the two ends: seconds, rates, utilisation, what bounds."""

    role: str
    seconds: tuple[float, float]
    tflops: tuple[float, float]
    bytes_per_second: tuple[float, float]
    utilisation: tuple[float, float]
    hz: tuple[float, float]
    bound: tuple[str, str]
    last_round: tuple[float, float]


def why_unavailable() -> str | None:
    """Why there is no model here; None where there is one."""
    return EmulatorRuntime().why_unavailable() or code.why_unavailable()


def is_at_hand(plan: Plan, problem: Problem, shape: Shape) -> bool:
    """Whether the code objects of a problem's kernels are in the bundle: nothing is compiled."""
    arch = plans.EMULATED
    return all(
        bundle.find(arch, code.key_of(Plan("hip", one.kernel, one.constants), arch)) is not None
        for _, one in tiling.pairs_of(TARGET, plan, problem, shape)
    )


def kernel(plan: Plan, resident: int = 0) -> Kernel | None:
    """The model of ``plan``, of a kernel that ``samples`` knows. ``resident`` workgroups share a
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
    """What was recorded of one plan, as ``emulator.timing.issue.Turns``: two lengths, of so many
    ``tiles``, and the shorter under a causal mask. ``fits``: workgroups on a compute unit."""

    title: str
    short: Any
    long: Any
    under: Any | None
    tiles: tuple[float, float]
    resident: int
    fits: int

    def masked_clocks(self, end: str, changed: Mapping[str, float] | None = None) -> float:
        """What the diagonal of a causal mask adds."""
        from ...emulator.timing import issue

        if self.under is None:
            return 0.0
        under, short = (issue.simulate(x, end, changed).clocks for x in (self.under, self.short))
        return max(0.0, under - short)


def runs_of(plan: Plan, resident: int = 0) -> Runs | None:
    """Runs ``plan`` in the emulator; None for a kernel that ``samples`` does not know."""
    from ...emulator.timing import device, issue

    sample = samples.of(plan)
    if sample is None:
        return None
    traced = {n: _trace(plan, sample.run, n) for n in (sample.short, sample.long)}
    facts = code.load(plan, plans.EMULATED)
    fits = device.resident(facts.kernel, traced[sample.short][1])
    copies = resident or fits
    decoded = program(facts.data).code
    short, long = (issue.turns_of(decoded, one[0].traces, copies) for one in traced.values())
    under = None
    if sample.masked is not None:
        masked, _ = _trace(plan, sample.masked, sample.short)
        under = issue.turns_of(decoded, masked.traces, copies)
    tiles = (sample.short / sample.keys, sample.long / sample.keys)
    return Runs(sample.title, short, long, under, tiles, copies, fits)


def _trace(wanted: Plan, run: Callable[[Launcher, int], object], length: int) -> tuple[Any, int]:
    """The counters of the one launch of ``wanted`` that ``run`` makes, and its threads."""
    found: list[tuple[Any, int]] = []

    class Watching(EmulatorRuntime):
        @property
        def empty(self) -> Empty:
            return samples.empty

        def run(self, step: Step, *rest: Any) -> None:
            super().run(step, *rest)
            if (step.plan.kernel, step.plan.constants) == (wanted.kernel, wanted.constants):
                found.append((self.counters, step.threads))

    run(Launcher(Watching(trace=(0,))), length)
    (one,) = found
    return one


def answers(plan: Plan, problem: Problem, shape: Shape, model: Model) -> list[Answer]:
    """Forward, and backward where the problem has one, on an MI300X."""
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
        utilisation=both(lambda t: t.utilisation),
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
    """The workgroups of one launch, head by head, a head's last blocks first, as
    kernels/hip/schedule.h has them: ``parts`` of a head are tiles, and whether a causal diagonal
    runs through them. ``lines``: heads of all sequences. ``asked``: bytes asked of L2."""

    parts: Sequence[tuple[int, bool]]
    lines: int
    asked: float

    def resident(self, most: int) -> int:
        """Workgroups on a compute unit at once where ``most`` fit."""
        from ...emulator.timing import constants

        units = int(constants.DEVICE["units"].low)
        return max(1, min(most, -(-len(self.parts) * self.lines // units)))

    def launch(self, cost: Cost, resident: int, dram: float) -> Any:
        """An ``emulator.timing.device.Launch`` of it."""
        from ...emulator.timing import constants, device

        clocks = [cost.fixed + cost.tile * tiles + cost.masked * cut for tiles, cut in self.parts]
        matrix = sum(cost.fixed_matrix + cost.matrix_of_tile * tiles for tiles, _ in self.parts)
        # A die has neighbouring heads one after the other: as many heads as dies go side by side.
        dies = int(constants.DEVICE["dies"].low)
        side = min(dies, self.lines)
        order = [c for c in clocks for _ in range(side)] * (self.lines // side)
        order += clocks * (self.lines % side)
        return device.Launch(order, matrix * self.lines, resident, dram, self.asked)


def work_of(tiled: TiledKernel, shape: Shape) -> Work:
    """What ``tiled`` does for ``shape``."""
    owns = ROLES[tiled.role].owns_keys
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
    """Whether a causal diagonal runs through what a workgroup walks."""
    return not owns and shape.window_right >= 0 and stop > 0 and first != last
