"""How many faults in the source of the CUDA kernels conformance finds, on a GPU.

``python benchmarks/mutations_cuda.py [--faults 100] [--jobs N] [--seed S] [--save]`` runs the quick
level on the cuda backend and notes which kernels each case launches. Then it plants ``--faults``
faults, drawn from the seed, one at a time: a comparison with its edge on the other side, && for ||,
+ for -, max for min, a call left out (barriers, waits, stores, fences). Kernels take turns. A fault
that the compiler makes the same machine code of is none, and another is drawn. It is caught by the
first case that fails, crashes or does not end, among those that launch the kernel with the same
constants. Each runs in a process of its own, which is killed after ``--stuck`` seconds. Survivors
are listed with their line: equivalent, or a case is missing. ``--save`` writes
``results/mutations_cuda_<arch>.json``.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import machine
import torch

from pyfa import api, dispatch, ops
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import code
from pyfa.backends.cuda.launcher import Launcher
from pyfa.bound import Table
from pyfa.conformance import grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.errors import CompileError
from pyfa.plan import Plan

_CUDA: Any = BACKENDS["cuda"]
_SAME, _UNCOMPILED, _SURVIVED, _STUCK = "same code", "does not compile", "", "no answer"

_SWAPS = {
    "comparison": ((" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "),
                   (" == ", " != "), (" != ", " == ")),
    "logic": ((" && ", " || "), (" || ", " && ")),
    "arithmetic": ((" + ", " - "), (" - ", " + "), (" * ", " + ")),
    "extremum": (("max(", "min("), ("min(", "max(")),
}  # fmt: skip
# A call whose result nobody takes, in a line of its own.
_CALL = re.compile(r"^\s*(?:if \([^;{}]*\) )?[A-Za-z_][\w:]*(?:<[^;()]*>)?\([^;{}]*\);\s*$")
_NO_CODE = ("#", "//", "static_assert", "template", "DEVICE", "constexpr", "extern", "struct")


class Fault(NamedTuple):
    """``new`` in the place of ``old`` in one line of a flattened source."""

    kind: str
    line: int
    old: str
    new: str


class Ran(NamedTuple):
    case: Case
    status: str
    seconds: float
    plans: tuple[Plan, ...]


def faults(source: str) -> Iterator[Fault]:
    """All that can be planted in a flattened source."""
    for number, line in enumerate(source.splitlines()):
        text = line.split("//")[0]
        if not text.strip() or text.strip().startswith(_NO_CODE) or "asm" in text or '"' in text:
            continue
        for kind, swaps in _SWAPS.items():
            for old, new in swaps:
                at = text.find(old)
                while at >= 0:
                    changed = text[:at] + new + text[at + len(old) :]
                    yield Fault(kind, number, line, changed)
                    at = text.find(old, at + 1)
        if _CALL.match(text):
            yield Fault("call left out", number, line, "")


def planted(source: str, fault: Fault) -> str:
    lines = source.splitlines()
    assert lines[fault.line] == fault.old
    lines[fault.line] = fault.new
    return "\n".join(lines) + "\n"


def start() -> None:
    torch.set_num_threads(1)
    true = Launcher._load

    def noting(self: Launcher, plan: Plan, threads: int, index: int) -> Any:
        _launched.add(replace(plan, notes=()))
        return true(self, plan, threads, index)

    Launcher._load = noting  # type: ignore[method-assign]


_launched: set[Plan] = set()


def run_plainly(case: Case) -> Ran:
    _launched.clear()
    api.calls, ops.calls = Table(), Table()
    begin = time.perf_counter()
    result = runner.run_case(_CUDA, case, runner.device_of("cuda"))
    plans = tuple(sorted(_launched, key=str))
    return Ran(case, result.status, time.perf_counter() - begin, plans)


def judge(plan: Plan, fault: Fault, cases: list[str]) -> tuple[str, str]:
    """What catches the fault, and in which case."""
    arch = code.plans.compiled_for(dispatch.of(torch.device("cuda")).arch, plan)
    before = code.load(plan, arch).data
    source_of = code.source_of
    changed = planted(source_of(plan), fault)

    def source(given: Plan) -> str:
        return changed if replace(given, notes=()) == plan else source_of(given)

    code.source_of = source
    code.load.cache_clear()
    try:
        if code.load(plan, arch).data == before:
            return _SAME, ""
    except CompileError:
        return _UNCOMPILED, ""
    by_name = {case.name: case for case in _quick()}
    for name in cases:
        result = runner.run_case(_CUDA, by_name[name], runner.device_of("cuda"))
        if result.status in (FAILED, CRASHED):
            return ("wrong numbers" if result.status == FAILED else "an error"), name
    return _SURVIVED, ""


def _quick() -> list[Case]:
    return grid.cases("quick", _CUDA.FEATURES, _CUDA.DTYPES)


def judged(
    work: tuple[Plan, Fault, list[str]], options: argparse.Namespace
) -> tuple[Plan, Fault, str, str, int]:
    plan, fault, cases = work
    given = json.dumps([[plan.backend, plan.kernel, plan.constants], fault, cases])
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one"], input=given, capture_output=True, text=True,
            timeout=options.stuck, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return plan, fault, _STUCK, "", len(cases)
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last:
        return plan, fault, f"the process ended: {done.stderr.strip()[-200:]}", "", len(cases)
    by, case = json.loads(last[0])
    return plan, fault, by, case, len(cases)


def one() -> None:
    """A process for one fault, which comes on stdin."""
    (backend, kernel, constants), fault, cases = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    plan = Plan(backend, kernel, tuple(tuple(pair) for pair in constants))
    print(json.dumps(judge(plan, Fault(*fault), cases)))


def drawn(ran: list[Ran], seed: int) -> Iterator[tuple[Plan, Fault, list[str]]]:
    """Faults without end, the kernels in turn."""
    by_plan: dict[Plan, list[Ran]] = collections.defaultdict(list)
    for each in sorted(ran, key=lambda each: each.seconds):
        for plan in each.plans:
            by_plan[plan].append(each)
    by_kernel: dict[str, list[Plan]] = collections.defaultdict(list)
    for plan in sorted(by_plan, key=str):
        by_kernel[plan.kernel].append(plan)
    draw = random.Random(seed)
    while True:
        for kernel in sorted(by_kernel):
            plan = draw.choice(by_kernel[kernel])
            found = list(faults(code.source_of(plan)))
            kind = draw.choice(sorted({fault.kind for fault in found}))
            fault = draw.choice([fault for fault in found if fault.kind == kind])
            yield plan, fault, [each.case.name for each in by_plan[plan]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--stuck", type=float, default=90.0)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.one:
        one()
        return
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs, initializer=start) as pool:
        ran = list(pool.imap_unordered(run_plainly, _quick(), chunksize=4))
    print(f"{time.monotonic() - begin:.0f} s: {collections.Counter(x.status for x in ran)}")
    source = drawn([each for each in ran if each.status == PASSED], options.seed)
    found: list[tuple[Plan, Fault, str, str, int]] = []
    drawn_again: collections.Counter[str] = collections.Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        while len(found) < options.faults and time.monotonic() - begin < options.minutes * 60:
            wanted = max(options.jobs, options.faults - len(found))
            work = [next(source) for _ in range(wanted)]
            for each in pool.map(lambda given: judged(given, options), work):
                if each[2] in (_SAME, _UNCOMPILED):
                    drawn_again[each[2]] += 1
                elif len(found) < options.faults:
                    found.append(each)
    by = collections.Counter((fault.kind, by or "survived") for _, fault, by, _, _ in found)
    survivors = [
        {"plan": str(plan), "kind": fault.kind, "old": fault.old.strip(), "new": fault.new.strip(),
         "cases": count}
        for plan, fault, by_whom, _, count in found if by_whom == _SURVIVED
    ]  # fmt: skip
    for (kind, whom), count in sorted(by.items()):
        print(f"{kind:<16} {whom[:60]:<60} {count}")
    for each in survivors:
        print("survived:", each)
    print(f"{len(found) - len(survivors)} of {len(found)} caught; drawn again: {dict(drawn_again)}")
    if options.save:
        arch = runner.environment(_CUDA, runner.device_of("cuda"))["arch"]
        results = {
            "what": "faults in the source of CUDA kernels that the quick level runs",
            "seed": options.seed, "faults": len(found), "caught": len(found) - len(survivors),
            "drawn_again": dict(drawn_again),
            "rows": [{"kind": kind, "by": whom, "count": count}
                     for (kind, whom), count in sorted(by.items())],
            "survivors": survivors, "seconds": round(time.monotonic() - begin),
        }  # fmt: skip
        print(machine.save(f"mutations_cuda_{arch}", results))


if __name__ == "__main__":
    main()
