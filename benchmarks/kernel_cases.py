"""Find a conformance case of each kernel that ships for gfx942, and run it in the emulator.

``python benchmarks/kernel_cases.py [--run] [--save]``. A wheel contains the kernels that a case of
the full level has run in the emulator, so a kernel without a case is left out. Cases are called up
to their launches, which are recorded in place of compiled and run: those of the quick level, then
of the full level until each kernel is selected. ``--run`` runs few of them, which select all of the
kernels, in the emulator and holds them to float64. ``--save`` writes
``results/kernel_selection_gfx942.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import machine
from executed import ARCH

from pyfa import binding, bound, dispatch
from pyfa.backends import BACKENDS
from pyfa.backends.common.program import Program
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.bound import Table
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED
from pyfa.errors import UnsupportedProblem
from pyfa.plan import Plan

EMULATOR = BACKENDS["emulator"]
SHIPPED = {str(plan): plan for plan in catalog.all_plans(TARGET, ARCH)}


def forget() -> None:
    """Forget the calls that are bound to their launches, so that the next one is bound anew."""
    dispatch._prepared.clear()
    binding.calls, bound.calls = Table(), Table()


def selected(case: Case) -> set[str]:
    """The kernels that ship and that ``case`` launches."""
    found: set[Plan] = set()

    def launch_of(self: Launcher, program: Program, tensors: Sequence[Any]) -> Any:
        found.update(step.plan for step in program.steps)
        return lambda *_: None

    forget()
    inputs = build.build(case)
    with (
        mock.patch.object(Launcher, "launch_of", launch_of),
        mock.patch.object(Launcher, "begin"),
    ):
        try:
            examine._execute(inputs, EMULATOR.NAME, runner.device_of(EMULATOR.NAME), case.backward)
        except UnsupportedProblem:
            return set()
    forget()
    return {str(replace(plan, backend="hip", notes=())) for plan in found} & SHIPPED.keys()


def size(case: Case) -> int:
    """About how many products of a row and a key the case has."""
    rows = sum(q * k for q, k in zip(case.lengths_q, case.lengths_k, strict=True))
    return rows * case.heads_q * (case.head_dim + case.head_dim_v) * (1 + 3 * case.backward)


def few(kernels_of: dict[Case, set[str]]) -> list[Case]:
    """Small cases that together select all that any does: each selects one that those before it
    do not. Those without a row and a key come last, since their kernels do nothing."""
    left = set[str]().union(*kernels_of.values())
    found = []
    for case in sorted(kernels_of, key=lambda case: (size(case) == 0, size(case))):
        if kernels_of[case] & left:
            found.append(case)
            left -= kernels_of[case]
    return found


def emulated(cases: list[Case]) -> dict[str, Any]:
    """What came of the cases in the emulator, and how many of the kernels ran."""
    begin, failed = time.monotonic(), dict[str, list[str]]()
    for case in cases:
        result = runner.run_case(EMULATOR, case, runner.device_of(EMULATOR.NAME))
        if result.status in (FAILED, CRASHED):
            failed[case.name] = list(result.messages)
        print(f"{time.monotonic() - begin:4.0f} s {result.status} {case.name}", file=sys.stderr)
    digests: Any = getattr(EMULATOR, "kernel_digests", dict)
    return {
        "what": "few small cases that select all of them, in the emulator; functionally emulated, "
        "not verified on hardware",
        "cases": len(cases),
        "kernels": len(digests().keys() & SHIPPED.keys()),
        "failed": failed,
        "seconds": round(time.monotonic() - begin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run few of the cases")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    kernels_of: dict[Case, set[str]] = {}
    levels: dict[str, int] = {}
    left = set(SHIPPED)
    for level in grid.LEVELS:
        for case in grid.cases(level, EMULATOR.FEATURES, EMULATOR.DTYPES):
            # Kernels with a user's function do not ship, and are compiled before the launch.
            if left and case not in kernels_of and not (case.score_mod or case.mask_mod):
                kernels_of[case] = selected(case)
                left -= kernels_of[case]
        levels[level] = len(SHIPPED) - len(left)
        print(f"{time.monotonic() - begin:4.0f} s {level}: {levels[level]}", file=sys.stderr)
        if level == "quick":
            files = {SHIPPED[name].kernel for name in left}
            files -= {SHIPPED[name].kernel for name in SHIPPED.keys() - left}
    found: dict[str, Any] = {
        "what": "kernels that ship for gfx942 which a conformance case selects, by its launches, "
        "which are recorded and not run",
        "kernels": len(SHIPPED),
        "selected": levels,
        "sources_not_in_quick": sorted(files),
        "not_selected": sorted(left),
    }
    if options.run:
        found["emulated"] = emulated(few(kernels_of))
    for key, value in found.items():
        print(f"{key}: {value}")
    if options.save:
        print("wrote", machine.save("kernel_selection_gfx942", found))


if __name__ == "__main__":
    main()
