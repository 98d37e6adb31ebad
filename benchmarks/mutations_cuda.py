"""How many faults in the source of the CUDA kernels conformance finds, on a GPU.

``python benchmarks/mutations_cuda.py [--faults 100] [--jobs N] [--seed S] [--save]`` runs the quick
level on the cuda backend and notes which kernels each case launches. Then it plants ``--faults``
faults, drawn from the seed, one at a time: a comparison with its edge on the other side, && for ||,
+ for -, max for min, a call left out (barriers, waits, stores, fences). Kernels take turns. A fault
that the compiler makes the same machine code of is none, and another is drawn. It is caught by the
first case that fails or crashes, among those that launch the kernel with the same constants. Each
runs in a process of its own, which is killed after ``--stuck`` seconds: such a fault is counted
apart. Survivors are listed with their line: equivalent, or a case is missing. ``--ran FILE`` keeps
what the level launches; ``--drawn FILE`` draws and compiles without a GPU, or judges what it drew.
``--more N`` tries survivors on so many cases of the full level. ``--save`` writes
``results/mutations_cuda_<arch>.json``.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import machine
import processes
import torch

from pyfa import binding, dispatch, ops
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import code, plans, runtime_compiler
from pyfa.backends.cuda.launcher import Launcher
from pyfa.backends.native.plans import source_of
from pyfa.bound import Table
from pyfa.conformance import grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.errors import CompileError
from pyfa.plan import Plan

_CUDA: Any = BACKENDS["cuda"]
_SAME, _UNCOMPILED, _SURVIVED = "same code", "does not compile", ""

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


class Drawn(NamedTuple):
    """A fault of a plan's source, and the cases that launch the plan, the quickest first."""

    plan: Plan
    fault: Fault
    cases: list[str]


class Ran(NamedTuple):
    case: str
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
    binding.calls, ops.calls = Table(), Table()
    begin = time.perf_counter()
    result = runner.run_case(_CUDA, case, runner.device_of("cuda"))
    plans = tuple(sorted(_launched, key=str))
    return Ran(case.name, result.status, time.perf_counter() - begin, plans)


def compiled(plan: Plan, fault: Fault, arch: str) -> tuple[bytes, str]:
    """The cubin with the fault, or why it is none. Needs no GPU."""
    changed = planted(source_of(plan), fault)
    try:
        data = runtime_compiler.compile_cuda(changed, arch=arch)[0]
    except CompileError:
        return b"", _UNCOMPILED
    return data, _SAME if data == code.load(plan, arch).data else ""


def why_none(work: tuple[Plan, Fault, str]) -> str:
    return compiled(*work)[1]


def judge(plan: Plan, fault: Fault, cases: list[str], arch: str, more: int) -> tuple[str, str]:
    """What catches the fault, and in which case."""
    data, why = compiled(plan, fault, arch)
    if why:
        return why, ""
    load = code.load
    found = code.Code(data, "", "compiled")
    code.load = lambda given, arch: found if replace(given, notes=()) == plan else load(given, arch)
    by_name = {case.name: case for case in _quick()}
    tried = [by_name[name] for name in cases]
    if more:
        tried += alike(tried)[:more]
    for number, case in enumerate(tried):
        result = runner.run_case(_CUDA, case, runner.device_of("cuda"))
        if result.status in (FAILED, CRASHED):
            by = "wrong numbers" if result.status == FAILED else "an error"
            return by + (", full level" if number >= len(cases) else ""), case.name
    return _SURVIVED, ""


def alike(cases: list[Case]) -> list[Case]:
    """Cases of the full level that may launch what ``cases`` launch: of their kind, dtype, heads
    and direction."""

    def of(case: Case) -> tuple[Any, ...]:
        return (
            case.kind, case.dtypes, case.head_dim, case.head_dim_v, case.backward,
            case.deterministic, case.batch_invariant, bool(case.page_size), bool(case.new_keys),
        )  # fmt: skip

    kinds, names = {of(case) for case in cases}, {case.name for case in cases}
    every = grid.cases("full", _CUDA.FEATURES, _CUDA.DTYPES)
    found = [case for case in every if of(case) in kinds and case.name not in names]
    return sorted(found, key=lambda case: hashlib.sha256(case.name.encode()).digest())


def _quick() -> list[Case]:
    return grid.cases("quick", _CUDA.FEATURES, _CUDA.DTYPES)


def judge_all(
    planted: Iterator[Drawn], arch: str, options: argparse.Namespace
) -> list[tuple[Drawn, str, str]]:
    """What catches each fault, up to ``--faults`` that change the code.

    Each has a process of its own, since it may end that or not end. They are forked by this one,
    which has one thread, has imported all and touched no GPU.
    """
    found: list[tuple[Drawn, str, str]] = []

    def one(each: Drawn) -> tuple[str, str]:
        of = plans.compiled_for(arch, each.plan)
        return judge(each.plan, each.fault, each.cases, of, options.more)

    def too_few(_: Drawn) -> bool:
        return sum(by not in (_SAME, _UNCOMPILED) for _, by, _ in found) < options.faults

    wanted = itertools.takewhile(too_few, planted)
    end = time.monotonic() + options.minutes * 60
    every = processes.judged(wanted, one, at_once=options.jobs, stuck=options.stuck, end=end)
    for each, (by, case) in every:
        found.append((each, by, case))
    return found


def drawn(ran: list[Ran], seed: int) -> Iterator[Drawn]:
    """Faults without end, the kernels in turn."""
    by_plan: dict[Plan, list[Ran]] = collections.defaultdict(list)
    for each in sorted(ran, key=lambda each: each.seconds):
        for plan in each.plans:
            if "MOD" not in dict(
                plan.constants
            ):  # the source of a user's functions is in their process
                by_plan[plan].append(each)
    by_kernel: dict[str, list[Plan]] = collections.defaultdict(list)
    for plan in sorted(by_plan, key=str):
        by_kernel[plan.kernel].append(plan)
    draw = random.Random(seed)
    while True:
        for kernel in sorted(by_kernel):
            plan = draw.choice(by_kernel[kernel])
            found = list(faults(source_of(plan)))
            if not found:
                continue
            kind = draw.choice(sorted({fault.kind for fault in found}))
            fault = draw.choice([fault for fault in found if fault.kind == kind])
            yield Drawn(plan, fault, [each.case for each in by_plan[plan]])


def run_quick(options: argparse.Namespace) -> tuple[str, list[Ran]]:
    """The device's arch, and which plans each case of the quick level launches."""
    with multiprocessing.get_context("spawn").Pool(options.jobs, initializer=start) as pool:
        found = list(pool.imap_unordered(run_plainly, _quick()))
        arch = pool.apply(arch_here)
    print(collections.Counter(each.status for each in found))
    return arch, found


def arch_here() -> str:
    return dispatch.of(runner.device_of("cuda")).arch


def draw_some(arch: str, ran: list[Ran], options: argparse.Namespace) -> dict[str, Any]:
    """``--faults`` faults that change the machine code, and how many did not."""
    source = drawn([each for each in ran if each.status == PASSED], options.seed)
    found: list[Drawn] = []
    again: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + options.minutes * 60
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        while len(found) < options.faults and time.monotonic() < end:
            some = [next(source) for _ in range(options.jobs * 2)]
            archs = [plans.compiled_for(arch, each.plan) for each in some]
            work = [(x.plan, x.fault, of) for x, of in zip(some, archs, strict=True)]
            for each, why in zip(some, pool.map(why_none, work, chunksize=1), strict=True):
                if why:
                    again[why] += 1
                else:
                    found.append(each)
    return {"arch": arch, "drawn_again": dict(again),
            "faults": [to_json(each) for each in found[: options.faults]]}  # fmt: skip


def to_json(each: Drawn) -> list[Any]:
    return [fields_of(each.plan), each.fault, each.cases]


def from_json(given: list[Any]) -> Drawn:
    plan, fault, cases = given
    return Drawn(plan_of(plan), Fault(*fault), cases)


def fields_of(plan: Plan) -> list[Any]:
    return [plan.backend, plan.kernel, plan.constants]


def plan_of(fields: list[Any]) -> Plan:
    backend, kernel, constants = fields
    return Plan(backend, kernel, tuple(tuple(pair) for pair in constants))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for the draw, and for the cases"
    )
    parser.add_argument("--more", type=int, default=0, help="cases of the full level, then")
    parser.add_argument("--stuck", type=float, default=60.0)
    parser.add_argument("--ran", type=Path, help="what the quick level launches; made if not there")
    parser.add_argument(
        "--drawn", type=Path, help="faults to judge; if not there, to draw, without a GPU"
    )
    parser.add_argument("--stop-after", choices=("ran",), default="")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    if options.drawn and options.drawn.exists():
        given = json.loads(options.drawn.read_text())
        arch, again = given["arch"], collections.Counter(given["drawn_again"])
        planted = iter([from_json(each) for each in given["faults"]])
    else:
        if options.ran and options.ran.exists():
            arch, rows = json.loads(options.ran.read_text())
            ran = [
                Ran(case, status, seconds, tuple(plan_of(fields) for fields in given))
                for case, status, seconds, given in rows
            ]
        else:
            arch, ran = run_quick(options)
            if options.ran:
                rows = [(*x[:3], [fields_of(plan) for plan in x.plans]) for x in ran]
                options.ran.write_text(json.dumps([arch, rows]))
        print(f"{time.monotonic() - begin:.0f} s: the quick level ran", flush=True)
        if options.stop_after == "ran":
            return
        again = collections.Counter()
        if options.drawn:
            work = draw_some(arch, ran, options)
            options.drawn.write_text(json.dumps(work))
            print(f"{time.monotonic() - begin:.0f} s: {len(work['faults'])} faults drawn")
            return
        planted = drawn([each for each in ran if each.status == PASSED], options.seed)
    found = judge_all(planted, arch, options)
    again += collections.Counter(by for _, by, _ in found if by in (_SAME, _UNCOMPILED))
    found = [each for each in found if each[1] not in (_SAME, _UNCOMPILED)]
    report(found, arch, again, options, time.monotonic() - begin)


def report(
    found: list[tuple[Drawn, str, str]],
    arch: str,
    again: collections.Counter[str],
    options: argparse.Namespace,
    seconds: float,
) -> None:
    by = collections.Counter((each.fault.kind, by or "survived") for each, by, _ in found)
    survivors = [
        {"plan": str(each.plan), "kind": each.fault.kind, "line": each.fault.line,
         "old": each.fault.old.strip(), "new": each.fault.new.strip(), "cases": len(each.cases)}
        for each, by_whom, _ in found if by_whom == _SURVIVED
    ]  # fmt: skip
    for (kind, whom), count in sorted(by.items()):
        print(f"{kind:<16} {whom[:60]:<60} {count}")
    for each in survivors:
        print("survived:", each)
    # A loop without end, or a machine that was busy: not counted as caught.
    no_answer = sum(by_whom == processes.NO_ANSWER for _, by_whom, _ in found)
    caught = len(found) - len(survivors) - no_answer
    print(
        f"{caught} of {len(found)} caught, {no_answer} gave no answer; drawn again: {dict(again)}"
    )
    if options.save:
        results = {
            "what": "faults in the source of CUDA kernels that the quick level runs",
            "seed": options.seed, "faults": len(found), "caught": caught, "no_answer": no_answer,
            "drawn_again": dict(again),
            "rows": [{"kind": kind, "by": whom, "count": count}
                     for (kind, whom), count in sorted(by.items())],
            "survivors": survivors, "seconds": round(seconds),
        }  # fmt: skip
        print(machine.save(f"mutations_cuda_{arch}", results))


if __name__ == "__main__":
    main()
