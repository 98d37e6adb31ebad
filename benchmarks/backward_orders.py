"""Run the HIP kernels' backward in the emulator, each case in several orders of execution.

    CUDA_VISIBLE_DEVICES="" python benchmarks/backward_orders.py --jobs 30 --minutes 9 --save

A seed decides every order that the hardware leaves open. Every case of the level that has a
gradient runs twice: as one pass, whose atomics add dQ in the order of the seed, and with
``deterministic=True`` as two passes, whose workgroups and wavefronts run in that order. A result is
one case with one seed. It must pass the same check as every conformance case. Cases run in the
order of their names' hashes. So the cases within the time limit are a random sample, and the
processes begin with different kernels to compile (``PYFA_CACHE_DIR`` may have them already). A case
that is still running at the limit counts as not run, with all its seeds. Exit code 1 if anything
failed, or nothing passed.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import multiprocessing
import signal
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

import machine
import torch

from pyfa.backends import BACKENDS
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED, REFUSED

ONE_PASS, TWO_PASSES, BIAS_GRADIENT = KERNELS = ("one pass", "two passes", "bias gradient")
# What happened to a case under a seed.
DECLINED, NOT_RUN = "declined", "not run"
OUTCOMES = (PASSED, DECLINED, FAILED, NOT_RUN)
_OUTCOME = {PASSED: PASSED, REFUSED: DECLINED, FAILED: FAILED, CRASHED: FAILED}
WHAT = (
    "cases of the backward under each seed, held to float64 by the one rule; 'bias gradient' "
    "counts those of both that ask for it once more; 'atomics': of the passed, those in which a "
    "kernel with float atomics ran (none of 'two passes' has any); ratio is error by bound, 1 the "
    "most, of a case's worst seed"
)
_TELL_SECONDS = 10.0
_WORST = 10


class Result(NamedTuple):
    """One case under one seed."""

    case: Case
    seed: int
    outcome: str
    atomics: bool  # whether a kernel that ran has float atomics
    ratio: float
    said: str  # why it was declined, or what went wrong


def cases_of(level: str, only: str) -> list[Case]:
    """All cases with a gradient, in one pass and in two."""
    emulator = BACKENDS["emulator"]
    grid_cases = grid.cases(level, emulator.FEATURES, emulator.DTYPES)
    cases = [case for case in grid_cases if case.backward]
    both = [replace(case, deterministic=two) for case in cases for two in (False, True)]
    both = [case for case in dict.fromkeys(both) if only in case.name]
    return sorted(both, key=lambda case: hashlib.sha256(case.name.encode()).digest())


def in_all_orders(work: tuple[Case, int]) -> list[Result]:
    """``case`` under each seed; what it is compared with is made once."""
    case, seeds = work
    torch.set_num_threads(1)
    emulator: Any = BACKENDS["emulator"]
    where = runner.device_of("emulator")
    expected = examine.Expected(build.build(case))
    found = []
    for seed in range(seeds):
        emulator.orders.choose(seed)
        result = runner.run_case(emulator, case, where, expected)
        said = (*result.reasons, *result.messages)
        found.append(
            Result(
                case, seed, _OUTCOME[result.status], emulator.orders.mattered, result.ratio,
                said[0].strip()[-600:] if said else "",
            )
        )  # fmt: skip
    return found


def run(cases: list[Case], seeds: int, jobs: int, minutes: float) -> list[Result]:
    """What was finished within the limit."""
    begin = told = time.monotonic()
    results: list[Result] = []
    # Ctrl-C and the like go to this process alone, which then ends the others.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(jobs, initializer=signal.signal, initargs=quiet) as pool:
        found = pool.imap_unordered(in_all_orders, [(case, seeds) for case in cases])
        try:
            for _ in cases:
                left = minutes * 60 - (time.monotonic() - begin)
                results += found.next(timeout=max(0.0, left))
                if time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    total = len(cases) * seeds
                    print(f"{told - begin:4.0f} s {len(results)} of {total}", file=sys.stderr)
        except multiprocessing.TimeoutError:
            pool.terminate()
    return results


def kernels_of(case: Case) -> list[str]:
    """What a case is counted under."""
    passes = TWO_PASSES if case.deterministic else ONE_PASS
    return [passes, BIAS_GRADIENT] if case.bias_grad else [passes]


def summary(cases: list[Case], results: list[Result], seeds: int) -> dict[str, Any]:
    """Counts by kernel and seed, why cases were declined, what failed, the worst of what passed."""
    outcomes = {(result.case, result.seed): result for result in results}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for kernel in KERNELS:
        asked = [case for case in cases if kernel in kernels_of(case)]
        counts[kernel] = {}
        for seed in range(seeds):
            found = [outcomes.get((case, seed)) for case in asked]
            of = collections.Counter(result.outcome if result else NOT_RUN for result in found)
            row = {outcome: of[outcome] for outcome in OUTCOMES}
            row["atomics"] = sum(r.outcome == PASSED and r.atomics for r in found if r)
            counts[kernel][f"seed {seed}"] = row
    declined = [result for result in results if result.outcome == DECLINED and not result.seed]
    failed = [result for result in results if result.outcome == FAILED]
    of_cases: dict[Case, Result] = {}
    for result in sorted(results, key=lambda result: -result.ratio):
        of_cases.setdefault(result.case, result)
    worst = list(of_cases.values())[:_WORST]
    return {
        "what": WHAT,
        "cases": len(cases),
        "outcomes": counts,
        "declined": dict(collections.Counter(result.said for result in declined)),
        "failed": {f"{result.case.name} @ seed {result.seed}": result.said for result in failed},
        "worst": [[round(r.ratio, 3), r.case.name, f"seed {r.seed}"] for r in worst],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=grid.LEVELS, default="full")
    parser.add_argument("--seeds", type=int, default=5, help="orders of each case")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=60.0, help="then it stops")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--first", type=int, help="so many cases, the first ones by hash")
    parser.add_argument("--save", action="store_true", help="write results/backward_orders.json")
    options = parser.parse_args()
    why = BACKENDS["emulator"].why_unavailable()
    if why:
        parser.error(f"the emulator cannot run here: {why}")
    begin = time.monotonic()
    cases = cases_of(options.level, options.only)[: options.first]
    results = run(cases, options.seeds, options.jobs, options.minutes)
    found = summary(cases, results, options.seeds)
    found["seconds"] = round(time.monotonic() - begin)
    found["options"] = vars(options)
    for key in ("cases", "seconds", "declined", "worst"):
        print(f"{key}: {found[key]}")
    for kernel, rows in found["outcomes"].items():
        for seed, row in rows.items():
            print(f"{kernel}, {seed}: " + ", ".join(f"{n} {name}" for name, n in row.items()))
    for name, said in found["failed"].items():
        print(f"failed {name}\n    {said.splitlines()[-1] if said else ''}")
    if options.save:
        print(machine.save("backward_orders", found))
    passed = any(result.outcome == PASSED for result in results)
    return 0 if passed and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
