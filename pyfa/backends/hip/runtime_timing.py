"""The timing model over the HIP kernels: what a turn of each costs, and a problem's time.

A model of an MI300X, not measured. A kernel runs in the emulator on two lengths that differ by
turns of its loop, one workgroup is recorded, and the model says when its instructions would issue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ... import bundle
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
    from ...emulator.timing import constants, device, issue, report

    sample = samples.of(plan)
    if sample is None:
        return None
    traced = {n: _trace(plan, sample.run, n) for n in (sample.short, sample.long)}
    threads = traced[sample.short][1]
    facts = code.load(plan, plans.EMULATED)
    copies = resident or device.resident(facts.kernel, threads)
    decoded = program(facts.data).code
    made = {n: issue.turns_of(decoded, one[0].traces, copies) for n, one in traced.items()}
    short, long = made[sample.short], made[sample.long]
    tiles = (sample.short / sample.keys, sample.long / sample.keys)
    estimates = tuple(report.estimate(short, long, tiles, end, copies) for end in constants.ends())
    masked: tuple[float, ...] = (0.0, 0.0)
    if sample.masked is not None:
        under, _ = _trace(plan, sample.masked, sample.short)
        turns = issue.turns_of(decoded, under.traces, copies)
        masked = tuple(
            max(0.0, issue.simulate(turns, end).clocks - issue.simulate(short, end).clocks)
            for end in constants.ends()
        )
    conflicts = (long.lds_conflict_clocks - short.lds_conflict_clocks) / (tiles[1] - tiles[0])
    return Kernel(sample.title, estimates, masked, conflicts / copies, copies)


def _trace(wanted: Plan, run: Callable[[Launcher, int], object], length: int) -> tuple[Any, int]:
    """The counters of the one launch of ``wanted`` that ``run`` makes, and its threads."""
    found: list[tuple[Any, int]] = []

    class Watching(EmulatorRuntime):
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
    """Workgroups head by head, a head's last blocks first, as kernels/hip/schedule.h has them."""
    from ...emulator.timing import constants, device

    walked = tiled.tiling.block_k if not ROLES[tiled.role].owns_keys else tiled.tiling.block_q
    owns = ROLES[tiled.role].owns_keys
    heads = shape.heads_k if owns else shape.heads_q // tiled.tiling.packed
    again = shape.group if owns else 1
    parts = [
        (-(-(stop - begin) // walked) * again, _is_cut(shape, first, last, stop, owns))
        for first, last, begin, stop in blocks(shape, tiled)
    ][::-1]
    count = len(parts) * heads * shape.batch
    most = kernel(plan)
    assert most is not None
    units = int(constants.DEVICE["units"].low)
    resident = max(1, min(most.resident, -(-count // units)))
    one = most if resident == most.resident else kernel(plan, resident)
    assert one is not None
    estimate = one.estimates[end]
    clocks = [estimate.clocks(tiles) + one.masked[end] * cut for tiles, cut in parts]
    matrix = sum(estimate.matrix(tiles) for tiles, _ in parts) * heads * shape.batch
    reads, writes = requested_of(shape, tiled)
    asked = float(sum(reads.values()) + sum(writes.values()))
    # A die has neighbouring heads one after the other: as many heads as dies go side by side.
    dies = int(constants.DEVICE["dies"].low)
    side = min(dies, heads * shape.batch)
    order = [c for c in clocks for _ in range(side)] * (heads * shape.batch // side)
    order += clocks * (heads * shape.batch % side)
    return device.Launch(order, matrix, resident, dram, asked)


def _is_cut(shape: Shape, first: int, last: int, stop: int, owns: bool) -> bool:
    """Whether a causal diagonal runs through what a workgroup walks."""
    return not owns and shape.window_right >= 0 and stop > 0 and first != last
