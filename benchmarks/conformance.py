"""The conformance suite of one backend in many processes, which share one GPU.

``python benchmarks/conformance.py --backend triton --level full --jobs 16 [--save] [--out FILE]``.
The reference runs on the CPU in one thread a case, and Triton compiles each kernel at its first
use: the full level took 16 processes on 16 cores 6 minutes. ``--tiles sm_80,sm_86`` holds the cuda
backend with the tiles of each of these archs to one reference a case. ``--save`` writes a summary
to ``results/conformance_<backend>_<arch>.json``, ``--out`` the report of ``pyfa conformance``.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import torch

from pyfa import dispatch
from pyfa.backends import BACKENDS
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, REFUSED, CaseResult, Report

_WORST = 10
# Cases handed to a process at once: so few that the last ones end together.
_AT_ONCE = 8


def alike(case: Case) -> tuple[Any, ...]:
    """What decides which kernels a case compiles, so that neighbours find them made."""
    general = bool(case.softcap or case.alibi)
    return (
        case.dtype, case.head_dim, case.head_dim_v, general, case.bias, case.dropout_p > 0.0,
        case.kind, case.layout, case.name,
    )  # fmt: skip


def some(work: tuple[str, list[Case], list[str]]) -> list[CaseResult]:
    """Results by case; with ``tiles`` there is one of each, named ``case @ arch``."""
    backend, cases, tiles = work
    if not tiles:
        return list(runner.run_cases(BACKENDS[backend], cases).results)
    torch.set_num_threads(1)
    where, found = runner.device_of(backend), []
    for case in cases:
        expected = examine.Expected(build.build(case))
        for arch in tiles:
            os.environ["PYFA_ARCH_TILES"] = arch
            dispatch._prepared.clear()  # plans are kept, whatever their tiles
            result = runner.run_case(BACKENDS[backend], case, where, expected)
            found.append(replace(result, name=f"{case.name} @ {arch}"))
    return found


def run(
    backend: str, level: str, jobs: int, limit: float, only: str, tiles: list[str]
) -> tuple[Report, int]:
    """The report of what ran within ``limit`` seconds, and how many results there would be."""
    implementation = BACKENDS[backend]
    cases = grid.cases(level, implementation.FEATURES, implementation.DTYPES)
    cases = sorted((case for case in cases if only in case.name), key=alike)
    parts = [(backend, cases[i : i + _AT_ONCE], tiles) for i in range(0, len(cases), _AT_ONCE)]
    begin = time.monotonic()
    results: list[CaseResult] = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.imap_unordered(some, parts)
        try:
            for _ in parts:
                results += found.next(timeout=max(0.0, limit - (time.monotonic() - begin)))
        except multiprocessing.TimeoutError:
            pool.terminate()
    results.sort(key=lambda result: result.name)
    where = runner.environment(implementation, runner.device_of(backend))
    return Report(backend, level, (), where, tuple(results)), len(cases) * max(1, len(tiles))


def summary(report: Report, cases: int, seconds: float) -> dict[str, Any]:
    """Counts, every reason and how often it was given, the worst ratios, and what failed."""
    refused = [result for result in report.results if result.status == REFUSED]
    failed = [result for result in report.results if result.status in (FAILED, CRASHED)]
    worst = sorted(
        ((check.ratio, result.name, check.name) for result in report.results
         for check in result.checks),
        reverse=True,
    )  # fmt: skip
    return {
        "what": "cases against float64 under the one rule; ratio is error by bound, 1 the most",
        "backend": report.backend,
        "level": report.level,
        "cases": cases,
        "ran": len(report.results),
        "counts": dict(report.counts()),
        "declined": dict(collections.Counter("; ".join(x.reasons) for x in refused)),
        "worst": [[round(ratio, 3), case, check] for ratio, case, check in worst[:_WORST]],
        "failed": {result.name: list(result.messages) for result in failed},
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--level", choices=grid.LEVELS, default="full")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--tiles", default="", help="archs whose tiles the cuda backend takes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    tiles = options.tiles.split(",") if options.tiles else []
    report, cases = run(
        options.backend, options.level, options.jobs, options.limit, options.only, tiles
    )
    found = summary(report, cases, time.monotonic() - begin)
    for key, value in found.items():
        if key == "failed":
            for name, messages in value.items():
                print(f"failed {name}\n    {' '.join(messages).strip().splitlines()[-1][-400:]}")
        else:
            print(f"{key}: {value}")
    if options.out:
        report.save_json(options.out)
    if options.save:
        arch = report.environment["arch"]
        found["tiles"] = tiles or "the device's own"
        if any(each != arch.rstrip("a") for each in tiles):
            found["note"] = "tiles of other archs: executed here, not verified on that hardware"
        print(machine.save(f"conformance_{options.backend}_{arch}", found))


if __name__ == "__main__":
    main()
