"""``pyfa inspect --timing``: the timing model of an MI300X for a kernel's hot loop."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import problem
from .console import print_table, print_text

if TYPE_CHECKING:
    from ..backends.hip.runtime_timing import Answer, Kernel
    from ..plan import Plan

WORDS = "model, not measured"
DEVICE = "MI300X"
MFMA_FLOPS = 2048  # of a compute unit in a clock, fp16 and bf16; float8 twice as many
_FLAGS = ("batch", "seqlen", "heads", "head_dim", "dtype", "causal", "window", "features")
_NOTE = (
    f"A {WORDS}; ranges cover its assumptions (docs/mi300x.md). It distinguishes variants of one "
    "kernel that differ by about 8 %. util.: share of the clocks of full tiles in which the matrix "
    "units are busy. fixed: clocks of a workgroup outside its tiles. vector to issue: the other "
    "clocks, by what the wavefronts wait for. loop end: the part of these between the last product "
    "of one iteration and the first of the next. conflicts: LDS clocks per tile beyond those that "
    "its bytes take. TFLOP/s: of the matrix units, with full tiles only."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--timing`` and the flags of its problem, without defaults."""
    parser.add_argument(
        "--timing",
        action="store_true",
        help=f"estimate the time on an {DEVICE} ({WORDS}). If you also describe a problem, "
        "the estimate is for its plan, and the hot loop is listed by slots (a few MFMAs and the "
        "instructions that overlap with them)",
    )
    problem.add_flags(parser)
    parser.set_defaults(**dict.fromkeys(_FLAGS))


def problem_of(options: argparse.Namespace) -> argparse.Namespace | None:
    """Return the requested problem, with defaults filled in; None without one."""
    given = {name: getattr(options, name) for name in _FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    parser = argparse.ArgumentParser()
    problem.add_flags(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **given})


def plans_of(options: argparse.Namespace, kernel: str) -> tuple[list[Plan], list[Answer]]:
    """Return the plans called ``kernel`` that a problem uses on an MI300X, and the plan it would
    use there."""
    from ..backends.hip import runtime_timing
    from ..backends.hip.target import TARGET
    from ..backends.native import tiling
    from ..backends.native.plans import name_of

    whole = argparse.Namespace(**vars(options), device=DEVICE, backend="hip", compile=False)
    explanation, model, _ = problem.modeled(whole)
    taken = [one.plan for one in explanation.answers if one.backend == "hip" and one.plan]
    if not taken:
        raise ValueError("the hip backend does not take this problem (see pyfa explain)")
    pairs = tiling.pairs_of(TARGET, taken[0], explanation.problem, model.shape)
    wanted = [plan for _, plan in pairs if name_of(plan) == kernel]
    if not wanted:
        names = ", ".join(sorted({name_of(plan) for _, plan in pairs}))
        raise ValueError(f"kernel: this problem runs {names}; got {kernel}")
    return wanted, runtime_timing.answers(taken[0], explanation.problem, model.shape, model)


def as_dict(plan: Plan, one: Kernel) -> dict[str, Any]:
    """Return one plan, for JSON."""
    return {
        "title": one.title,
        "constants": dict(plan.constants),
        "resident": one.resident,
        "lds_conflict_clocks": one.conflict_clocks,
        "masked_clocks": list(one.masked),
        "matrix_tflops": list(_full_rate(plan, one)),
        "ends": [estimate.as_dict() for estimate in one.estimates],
    }


def answer_as_dict(answer: Answer) -> dict[str, Any]:
    """Return one direction of a problem, for JSON."""
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}


def _full_rate(plan: Plan, one: Kernel) -> tuple[float, ...]:
    """Return TFLOP/s of the matrix units at each end of the range, with full tiles everywhere."""
    from ..device import DEVICES

    float8 = dict(plan.constants).get("DTYPE") == 2
    rate = MFMA_FLOPS * (2 if float8 else 1) * DEVICES[DEVICE].units
    return tuple(e.utilization * rate * e.hz / 1e12 for e in one.estimates)


def show(
    kernel: str, found: Sequence[tuple[Plan, Kernel]], answers: Sequence[Answer], slots: bool
) -> None:
    """Print the model's figures."""
    print(f"{kernel} on {DEVICE}: {WORDS}")
    print()
    causes = [cause for cause in found[0][1].estimates[0].lost if cause != "start and end"]
    rows = []
    for plan, one in found:
        rates = _full_rate(plan, one)
        for number, estimate in enumerate(one.estimates):
            rows.append(
                [
                    one.title if not number else "",
                    estimate.end,
                    f"{estimate.utilization:.3f}",
                    f"{estimate.clocks_of_tile:.0f}",
                    f"{estimate.fixed_clocks:.0f}",
                    *(f"{estimate.lost[cause]:.3f}" for cause in causes),
                    f"{estimate.end_of_loop:.3f}",
                    f"{one.conflict_clocks:.0f}",
                    f"{one.resident}",
                    f"{rates[number]:.0f}",
                ]
            )
    short = {"vector unit": "vector", "dependency": "depend."}
    head = ["plan", "end", "util.", "clk/tile", "fixed", *(short.get(c, c) for c in causes),
            "loop end", "conflicts", "per CU", "TFLOP/s"]  # fmt: skip
    print_table(head, rows)
    if slots:
        for _, one in found:
            _show_slots(one)
    for answer in answers:
        print()
        print_text(f"{answer.role}: {line(answer)}", "  ")
    print()
    print_text(_NOTE)


def _show_slots(one: Kernel) -> None:
    for estimate in one.estimates:
        print()
        print(f"{one.title}, {estimate.end}: a turn of the hot loop, slot by slot ({WORDS})")
        rows = [
            [
                slot.name,
                *(f"{n}" for n in (slot.matrix, slot.vector, slot.transcendental, slot.lds)),
                *(f"{n}" for n in (slot.memory, slot.scalar)),
                *(f"{x:.0f}" for x in (slot.matrix_clocks, slot.clocks, sum(slot.lost.values()))),
                ", ".join(f"{c} {x:.0f}" for c, x in slot.lost.items() if x >= 1),
            ]
            for slot in estimate.slots
        ]  # fmt: skip
        head = ["slot", "MFMA", "VALU", "exp", "LDS", "memory", "scalar", "MFMA clk", "clk"]
        print_table([*head, "lost clk", "to"], rows)


def line(answer: Answer) -> str:
    """Describe one direction of a problem in a line that includes the kind of figure."""

    def spread(values: tuple[float, float], scale: float, style: str) -> str:
        low, high = sorted(x * scale for x in values)
        return f"{low:{style}} to {high:{style}}"

    by = answer.bound[0] if answer.bound[0] == answer.bound[1] else " or ".join(answer.bound)
    return (
        f"{spread(answer.tflops, 1, '.0f')} TFLOP/s, "
        f"{spread(answer.bytes_per_second, 1e-12, '.2f')} TB/s, "
        f"{spread(answer.seconds, 1e6, '.0f')} us, matrix units "
        f"{spread(answer.utilization, 1, '.2f')} busy, bound by {by} ({WORDS})"
    )
