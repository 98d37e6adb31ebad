"""Run the conformance suite of one backend in many processes that share one GPU.

``python benchmarks/conformance.py --backend triton --level full --jobs 16 [--save] [--out FILE]``.
The reference runs on the CPU in one thread a case, and Triton compiles each kernel at its first
use: the full level took 16 processes on 16 cores 6 minutes. ``--tiles sm_80,sm_86`` holds the cuda
backend with the tiles of each of these archs to one reference a case. ``--sample 300 --always fp8``
runs the 300 cases whose names hash smallest, and all whose names hold "fp8". ``--save`` writes a
summary to ``results/conformance_<backend>_<arch>.json``, of a sample to ``…_sample.json``, and of
the cases of ``--only X`` to ``…_X.json`` or ``…_X_sample.json``; ``--out`` the report of ``pyfa
conformance``. With ``--sms 2`` CUDA's persistent blocks are as few as on a GPU with two SMs, so
that each takes many work tiles, which the suite's small calls do not have for every SM of a GPU.
The result file's name then ends in ``_2_sms``.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import few_sms
import machine
import torch

from pyfa import binding, bound, dispatch
from pyfa.backends import BACKENDS
from pyfa.bound import Table
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, REFUSED, CaseResult, Report

_WORST = 10
# Cases handed to a process at once: so few that the last ones end together.
_AT_ONCE, _TURNS = 8, 8
_TELL_SECONDS = 10.0


def alike(case: Case) -> tuple[Any, ...]:
    """What decides which kernels a case compiles, so that neighbors find them made."""
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
            dispatch._prepared.clear()  # plans are kept, whatever their tiles, and so are calls
            binding.calls, bound.calls = Table(), Table()
            result = runner.run_case(BACKENDS[backend], case, where, expected)
            found.append(replace(result, name=f"{case.name} @ {arch}"))
    return found


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for, those that compile alike side by side."""
    implementation = BACKENDS[options.backend]
    cases = grid.cases(options.level, implementation.FEATURES, implementation.DTYPES)
    cases = [case for case in cases if options.only in case.name]
    if options.sample:
        drawn = sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest())
        left = drawn[options.sample :] if options.always else []
        cases = drawn[: options.sample] + [case for case in left if options.always in case.name]
    return sorted(cases, key=alike)


def run(options: argparse.Namespace, tiles: list[str]) -> tuple[Report, int]:
    """The report of what ran within the limit, and how many results there would be."""
    backend, cases = options.backend, chosen(options)
    at_once = max(1, min(_AT_ONCE, len(cases) // (options.jobs * _TURNS)))
    parts = [(backend, cases[i : i + at_once], tiles) for i in range(0, len(cases), at_once)]
    begin = told = time.monotonic()
    results: list[CaseResult] = []
    start = few_sms.run_on, (options.sms,)
    with multiprocessing.get_context("spawn").Pool(options.jobs, *start) as pool:
        found = pool.imap_unordered(some, parts)
        try:
            for _ in parts:
                left = options.limit - (time.monotonic() - begin)
                results += found.next(timeout=max(0.0, left))
                if time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    print(f"{told - begin:4.0f} s {len(results)} results", file=sys.stderr)
        except multiprocessing.TimeoutError:
            pool.terminate()
    results.sort(key=lambda result: result.name)
    where = runner.environment(BACKENDS[backend], runner.device_of(backend))
    report = Report(backend, options.level, (), where, tuple(results))
    return report, len(cases) * max(1, len(tiles))


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


def name_of(options: argparse.Namespace, arch: str) -> str:
    """The result file's name. A part of the cases has its own, and so have grids for fewer SMs."""
    part = [options.only] * bool(options.only) + ["sample"] * bool(options.sample)
    part += [f"{options.sms}_sms"] * bool(options.sms)
    return "_".join(["conformance", options.backend, arch, *part])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--level", choices=grid.LEVELS, default="full")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--sample", type=int, default=0, help="so many cases, drawn by hash")
    parser.add_argument("--always", default="", help="cases that a sample does not leave out")
    parser.add_argument("--tiles", default="", help="archs whose tiles the cuda backend takes")
    parser.add_argument("--sms", type=int, default=0, help="as many as cuda's grids are made for")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    tiles = options.tiles.split(",") if options.tiles else []
    for name in ("tiles", "sms"):
        if getattr(options, name) and options.backend != "cuda":
            parser.error(f"--{name} is for --backend cuda, not {options.backend}")
    report, cases = run(options, tiles)
    if not cases:
        parser.error(f"--only: expected a part of a case's name, got {options.only!r}")
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
        if options.only:
            found["only"] = f"cases whose names hold '{options.only}'"
        if options.sample:
            found["sample"] = f"{options.sample} by hash, and all of '{options.always}'"
        if options.sms:
            found["sms"] = options.sms
        if any(each != arch.rstrip("a") for each in tiles):
            found["note"] = "tiles of other archs: executed here, not verified on that hardware"
        print(machine.save(name_of(options, arch), found))


if __name__ == "__main__":
    main()
