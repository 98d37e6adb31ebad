"""Count the faults in the CUDA kernels' source that the suite finds, on a GPU.

``python benchmarks/mutations_cuda.py [--faults 100] [--jobs N] [--seed S] [--save]`` plans the
cases of the full level for an H200, takes those ``--plans`` that most cases have, some of each
kernel, and plants ``--faults`` faults in them, drawn from the seed, one at a time: a comparison
with its edge on the other side, && for ||, + for -, max for min, a call left out (barriers, waits,
stores, fences). Kernels take turns. A fault that the compiler makes the same machine code of is
none, and another is drawn. It is in one plan here, and in the source of all: what is caught is a
lower bound. It is caught by the first case that fails or crashes, among those that may launch its
plan: those of the quick level, then at most ``--most`` others. Each runs in a process of its own,
which ends where a case takes 20 seconds: such a fault is counted apart.

A survivor is tried again in two ways. With a mark in the place of its line, a variable that is set:
where no case sets it, the line is not executed, and the fault is counted apart. (A trap would take
a second each, one at a time.) And with the quickest cases under Compute Sanitizer: memcheck, or
racecheck for a call left out of a kernel that has no TMA, for what is read or written beside a
tensor, or too early, need not show in numbers. What survives all of it is listed with its line, and
with the reason in ``equivalent_faults.py`` where it is equivalent.

``--drawn FILE`` draws and compiles without a GPU, or judges what it drew: what it compiled is in
the code cache. ``--save`` writes ``results/mutations_cuda_<arch>.json``.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import equivalent_faults
import machine
import processes
import sanitize
import torch
from random_cases import expected_on

from pyfa import bench, cache, device
from pyfa.backends import BACKENDS
from pyfa.backends.common import libcuda
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import code, plans, runtime_compiler
from pyfa.backends.native.plans import source_of
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED
from pyfa.errors import CompileError
from pyfa.plan import Plan
from pyfa.problem import Problem

_CUDA: Any = BACKENDS["cuda"]
_DEVICE = device.by_name("H200")
_SAME, _UNCOMPILED, _SURVIVED = "same code", "does not compile", ""
_EXECUTED, _UNREACHED = "executed", "not executed"
_MARK = "pyfa_executed"
_BROKEN = "an error of this script"
_UNDER_TOOLS = 4  # cases of a fault that run under Compute Sanitizer, which is slow
_TOOL_SECONDS = 25.0
_COMPILE_SECONDS = 60.0
_CASE_SECONDS = 20  # a case takes less than one
_ALARM = f"the process ended with {-signal.SIGALRM}"

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


def marked(source: str, fault: Fault) -> str:
    """The source with a mark where the fault would be: at the beginning of its statement."""
    lines = source.splitlines()
    number = fault.line
    while number and not _ENDS.search(lines[number - 1].split("//")[0].rstrip()):
        number -= 1
    line = lines[number]
    for begin in ("if (", "while (", "return ", "for ("):
        at = line.find(begin)
        if at >= 0 and line[:at].strip() in ("", "}", "else", "} else"):
            at = line.find("; ", at) + 2 if begin == "for (" else at + len(begin)
            empty = line[at : at + 1] in (";", ")")
            lines[number] = f"{line[:at]}{_MARK} = 1{'' if empty else ', '}{line[at:]}"
            break
    else:
        lines[number] = f"{_MARK} = 1; {line}"
    return "\n".join([f'extern "C" __device__ volatile int {_MARK};', *lines]) + "\n"


# The end of a statement, of what stands in front of one, or of a line of the preprocessor.
_ENDS = re.compile(r"^\s*#|[;{}:>]$|^$|\belse$|^\s*(if|for|while) \(.*\)$")


def compiled(plan: Plan, changed: str, arch: str) -> tuple[bytes, str]:
    """The cubin of a changed source, from the code cache or the compiler, or why it is none. Needs
    no GPU."""
    compiler = runtime_compiler.version()
    try:
        data = cache.get_or_build(
            "fault",
            cache.key(changed, (), compiler, arch),
            suffix=".cubin",
            source=changed,
            meta={"arch": arch, "compiler": compiler, "options": "", "plan": str(plan)},
            build=lambda: runtime_compiler.compile_cuda(changed, arch=arch)[0],
        ).code
    except CompileError:
        return b"", _UNCOMPILED
    return data, _SAME if data == code.load(plan, arch).data else ""


def judge(plan: Plan, changed: str, cases: list[Case], arch: str) -> tuple[str, str]:
    """What catches a changed source, and in which case."""
    data, why = compiled(plan, changed, arch)
    if why:
        return why, ""
    use(plan, data)
    where = runner.device_of("cuda")
    for case in cases:
        signal.alarm(_CASE_SECONDS)  # ends this process
        result = runner.run_case(_CUDA, case, where, expected_on(case, where))
        if result.status in (FAILED, CRASHED):
            return "wrong numbers" if result.status == FAILED else "an error", case.name
    return _SURVIVED, ""


def use(plan: Plan, data: bytes) -> None:
    """Launches of ``plan`` in this process execute ``data``."""
    load, found = code.load, code.Code(data, "", "compiled")
    code.load = lambda given, arch: found if replace(given, notes=()) == plan else load(given, arch)


class _Unexpected(examine.Expected):
    """Of a case that has only to run."""

    @property
    def ref(self) -> Any:
        raise _HasRun


class _HasRun(Exception):
    pass


def reaches(plan: Plan, changed: str, cases: list[Case], arch: str) -> tuple[str, str]:
    """Which case sets the mark in the changed source."""
    data, why = compiled(plan, changed, arch)
    if why:  # a mark that changes nothing is in code that was left out
        return _UNREACHED if why == _SAME else _EXECUTED, ""
    use(plan, data)
    driver: Any = libcuda.library()
    load, modules = driver.cuModuleLoadData, []

    def loaded(module: Any, image: bytes) -> int:
        error: int = load(module, image)
        modules.extend([module._obj] if image == data and not error else [])
        return error

    driver.cuModuleLoadData = loaded
    for case in cases:
        signal.alarm(_CASE_SECONDS)
        expected = _Unexpected(build.build(case))
        runner.run_case(_CUDA, case, runner.device_of("cuda"), expected)
        for module in modules:
            place, size, mark = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
            error = driver.cuModuleGetGlobal_v2(
                ctypes.byref(place), ctypes.byref(size), module, _MARK.encode()
            ) or driver.cuMemcpyDtoH_v2(ctypes.byref(mark), place, size)
            if error:
                raise RuntimeError(f"the mark was not read: CUDA error {error}")
            if mark.value:
                return _EXECUTED, case.name
    return _UNREACHED, ""


@functools.cache
def _level() -> dict[str, Case]:
    return {case.name: case for case in grid.cases("full", _CUDA.FEATURES, _CUDA.DTYPES)}


@functools.cache
def _quick() -> frozenset[str]:
    return frozenset(case.name for case in grid.cases("quick", _CUDA.FEATURES, _CUDA.DTYPES))


def judge_all(
    planted_: Iterator[Drawn], arch: str, options: argparse.Namespace
) -> list[tuple[Drawn, str, str]]:
    """What catches each fault.

    Each has a process of its own, since it may end that or not end. They are forked by this one,
    which has one thread, has imported all and touched no GPU.
    """
    found: list[tuple[Drawn, str, str]] = []

    def one(each: Drawn) -> tuple[str, str]:
        return changed(each, planted, judge)

    def mark(each: Drawn) -> tuple[str, str]:
        return changed(each, marked, reaches)

    def changed(
        each: Drawn, change: Callable[[str, Fault], str], what: Callable[..., tuple[str, str]]
    ) -> tuple[str, str]:
        try:
            source = change(source_of(each.plan), each.fault)
            of = plans.compiled_for(arch, each.plan)
            cases = [_level()[name] for name in each.cases[: options.cases]]
            return what(each.plan, source, cases, of)
        except Exception:
            return _BROKEN, traceback.format_exc()

    def in_processes(
        some: Iterator[Drawn], what: Any, share: float
    ) -> Iterator[tuple[Drawn, tuple[str, str]]]:
        end = _BEGIN + options.minutes * 60 * share
        every = processes.judged(some, what, at_once=options.jobs, stuck=options.stuck, end=end)
        for each, (by, case) in every:
            if by == _BROKEN:
                raise RuntimeError(case)
            yield each, (processes.NO_ANSWER if by == _ALARM else by, case)

    for each, (by, case) in in_processes(planted_, one, 0.8):
        found.append((each, by, case))
    say(f"{len(found)} judged")
    left = [each for each, by, _ in found if by == _SURVIVED]
    unreached = []
    for each, (by, case) in in_processes(iter(left), mark, 1.0):
        print("left:", by, each.plan, each.fault, len(each.cases), case, flush=True)
        if by == _UNREACHED:
            unreached.append(each)
    say(f"{len(left)} survived; cases do not reach {len(unreached)}")
    left = [each for each in left if each not in unreached]
    with ThreadPoolExecutor(options.jobs) as pool:
        left = left if options.tools else []
        reports = dict(zip(map(id, left), pool.map(reported, left), strict=True))
    return [(each, _UNREACHED if each in unreached else by or reports.get(id(each), ""), case)
            for each, by, case in found]  # fmt: skip


def reported(each: Drawn) -> str:
    """The tool of Compute Sanitizer that reports a fault in its quickest cases, "" if none."""
    races = each.fault.kind == "call left out" and "/sm90/" not in each.plan.kernel
    tool = "racecheck" if races else "memcheck"
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with tempfile.TemporaryDirectory() as folder:
        log, given = Path(folder) / "log", Path(folder) / "given"
        few = each._replace(cases=each.cases[:_UNDER_TOOLS])
        given.write_text(json.dumps([tool, to_json(few)]))
        try:
            subprocess.run(
                [sanitizer, "--tool", tool, "--report-api-errors", "no", "--max-connections", "100",
                 "--log-file", str(log), sys.executable, __file__, "--under", str(given)],
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_TOOL_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _SURVIVED
        text = log.read_text(errors="replace") if log.exists() else ""
    blocks = re.split(r"(?m)^=========\s*$", text)
    return tool if any(sanitize.is_ours(block) for block in blocks) else _SURVIVED


def under(given: Path) -> None:
    """Runs the cases of a fault in this process, which a tool observes."""
    tool, fields = json.loads(given.read_text())
    each = from_json(fields)
    changed = planted(source_of(each.plan), each.fault)
    if tool == "racecheck":
        changed = sanitize.widened(changed)
    torch.set_num_threads(1)
    arch = plans.compiled_for(_DEVICE.arch, each.plan)
    judge(each.plan, changed, [_level()[name] for name in each.cases], arch)


def say(what: str) -> None:
    print(f"{time.monotonic() - _BEGIN:.0f} s: {what}", flush=True)


_BEGIN = time.monotonic()


def drawn(options: argparse.Namespace) -> Iterator[Drawn]:
    """Faults without end, the kernels in turn."""
    by_plan: dict[Plan, list[str]] = collections.defaultdict(list)
    for name in sorted(_level(), key=lambda name: (name not in _quick(), digest(name))):
        for plan in may_launch(_level()[name]):
            by_plan[plan].append(name)
    by_kernel: dict[str, list[Plan]] = collections.defaultdict(list)
    for plan in sorted(by_plan, key=str):
        by_kernel[plan.kernel].append(plan)
    draw = random.Random(options.seed)
    for kernel, some in by_kernel.items():
        some.sort(key=lambda plan: -len(by_plan[plan]))
        alike: dict[Any, Plan] = {}  # but for the dtype
        for plan in some:
            rest = tuple(pair for pair in plan.constants if pair[0] != "DTYPE")
            alike.setdefault(rest if len(some) > 2 else plan, plan)
        by_kernel[kernel] = [*alike.values()][: -(-options.plans // len(by_kernel))]
    while True:
        for kernel in sorted(by_kernel):
            plan = draw.choice(by_kernel[kernel])
            found = list(faults(source_of(plan)))
            if not found:
                continue
            kind = draw.choice(sorted({fault.kind for fault in found}))
            fault = draw.choice([fault for fault in found if fault.kind == kind])
            quick = sum(name in _quick() for name in by_plan[plan])
            yield Drawn(plan, fault, by_plan[plan][: quick + options.most])


def may_launch(case: Case) -> list[Plan]:
    """The plans of a case on an H200. The sources of users' functions are in the processes that
    registered them: these cases have none here."""
    if case.score_mod or case.mask_mod or case.block_mask:
        return []
    narrow = case.dtypes[1] if case.dtypes[1] != case.dtype else ""
    problem = Problem(
        case.batch, max(case.lengths_q, default=0), max(case.lengths_k, default=0), case.heads_q,
        case.heads_k, case.head_dim, case.head_dim_v, case.dtype, case.features, _DEVICE,
        square=case.lengths_q == case.lengths_k, page_size=case.page_size,
        aligned=case.layout not in ("unaligned", "gapped"),
        positive=case.scale is None or case.scale > 0.0, dtype_k=narrow,
        dtype_out=case.out_dtype or ("bfloat16" if case.dtype.startswith("float8") else ""),
        scales=case.scales if isinstance(case.scales, int) else 0,
    ).bucketed()  # fmt: skip
    if _CUDA.why_not(problem):
        return []
    found = _CUDA.kernels(problem)
    if case.kind != "kvcache":
        found = [plan for plan in found if not plan.kernel.endswith("combine.cu")]
    if case.new_keys:
        code_of = DTYPE_CODES.get(case.cache_dtype or case.dtype)
        found += [] if code_of is None else [_CUDA.target.plan_of("cuda", "append", code_of)]
    return [replace(plan, notes=()) for plan in found]


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def draw_some(arch: str, options: argparse.Namespace) -> dict[str, Any]:
    """``--faults`` faults that change the machine code, and how many did not."""
    source = enumerate(drawn(options))
    found: dict[int, Drawn] = {}
    again: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + options.minutes * 60

    def why_none(given: tuple[int, Drawn]) -> tuple[str, str]:
        """Compiles a fault, and the mark in its place, for the code cache."""
        plan, fault, _ = given[1]
        of = plans.compiled_for(arch, plan)
        why = compiled(plan, planted(source_of(plan), fault), of)[1]
        if not why:
            compiled(plan, marked(source_of(plan), fault), of)
        return why, ""

    while len(found) < options.faults and time.monotonic() < end:
        some = itertools.islice(source, options.faults - len(found))
        # A process for each: NVRTC crashes on some, and unrolls loops of others without end.
        judged = processes.judged(
            some, why_none, at_once=options.jobs, stuck=_COMPILE_SECONDS, end=end
        )
        for (number, each), (why, _) in judged:
            if why:
                again[why if why == _SAME else _UNCOMPILED] += 1
            else:
                found[number] = each
    return {"arch": arch, "drawn_again": dict(again),
            "faults": [to_json(found[number]) for number in sorted(found)]}  # fmt: skip


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
    parser.add_argument("--plans", type=int, default=40, help="that have faults")
    parser.add_argument("--most", type=int, default=60, help="cases of the full level, for each")
    parser.add_argument("--cases", type=int, default=200, help="of these, for each fault")
    parser.add_argument("--stuck", type=float, default=300.0, help="seconds for one fault")
    parser.add_argument(
        "--drawn", type=Path, help="faults to judge; if not there, to draw, without a GPU"
    )
    parser.add_argument("--tools", type=int, default=1, help="0: without Compute Sanitizer")
    parser.add_argument("--recount", action="store_true", help="of saved results: reasons alone")
    parser.add_argument("--under", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.under:
        under(options.under)
        return
    if options.recount:
        recount(_DEVICE.arch)
        return
    begin = time.monotonic()
    if options.drawn and options.drawn.exists():
        work = json.loads(options.drawn.read_text())
    else:
        # Elsewhere: to plan asks the driver, and no process can be forked that may do so again.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:
            work = pool.submit(draw_some, _DEVICE.arch, options).result()
        if options.drawn:
            options.drawn.write_text(json.dumps(work))
            say(f"{len(work['faults'])} faults drawn")
            return
    arch, again = work["arch"], collections.Counter(work["drawn_again"])
    given = iter([from_json(each) for each in work["faults"]])
    found = judge_all(given, arch, options)
    report(found, arch, again, options, time.monotonic() - begin)


def report(
    found: list[tuple[Drawn, str, str]],
    arch: str,
    again: collections.Counter[str],
    options: argparse.Namespace,
    seconds: float,
) -> None:
    unreached = [each for each, by, _ in found if by == _UNREACHED]
    found = [each for each in found if each[1] != _UNREACHED]
    rows, survivors = collections.Counter[tuple[str, str]](), []
    for each, by, _ in found:
        line = {
            "plan": str(each.plan), "kind": each.fault.kind, "line": each.fault.line,
            "old": each.fault.old.strip(), "new": each.fault.new.strip(), "cases": len(each.cases),
        }  # fmt: skip
        if by == _SURVIVED:
            why = equivalent_faults.of_source(str(each.plan), line["old"], line["new"])
            by = "equivalent" if why else "survived"
            survivors.append(line | ({"equivalent": why} if why else {}))
        rows[each.fault.kind, by] += 1
    for (kind, by), count in sorted(rows.items()):
        print(f"{kind:<16} {by[:60]:<60} {count}")
    for line in survivors:
        print("survived:", line)
    # A loop without end, or a machine that was busy: not counted as caught.
    no_answer = sum(by == processes.NO_ANSWER for _, by, _ in found)
    caught = len(found) - len(survivors) - no_answer
    equivalent = sum("equivalent" in line for line in survivors)
    print(f"{caught} of {len(found)} caught, {equivalent} equivalent, {no_answer} gave no answer; "
          f"drawn again: {dict(again)}, {len(unreached)} not executed")  # fmt: skip
    if options.save:
        results = {
            "what": "faults in the source of CUDA kernels, in lines that the full level executes",
            "seed": options.seed, "most_cases": options.most, "tools": bool(options.tools),
            "faults": len(found),
            "caught": caught, "equivalent": equivalent, "no_answer": no_answer,
            "drawn_again": dict(again),
            "not_executed": [
                {"plan": str(each.plan), "line": each.fault.line, "old": each.fault.old.strip()}
                for each in unreached
            ],
            "rows": [{"kind": kind, "by": by, "count": count}
                     for (kind, by), count in sorted(rows.items())],
            "survivors": survivors, "seconds": round(seconds),
        }  # fmt: skip
        print(machine.save(f"mutations_cuda_{arch}", results))


def recount(arch: str) -> None:
    """Looks up the survivors of the saved results again: reasons may have been found since."""
    path = machine.RESULTS / f"mutations_cuda_{arch}.json"
    results = json.loads(path.read_text())
    for line in results["survivors"]:
        why = equivalent_faults.of_source(line["plan"], line["old"], line["new"])
        line.pop("equivalent", None)
        line |= {"equivalent": why} if why else {}
    left = collections.Counter((line["kind"], "equivalent" if "equivalent" in line else "survived")
                               for line in results["survivors"])  # fmt: skip
    rows = [row for row in results["rows"] if row["by"] not in ("equivalent", "survived")]
    rows += [{"kind": kind, "by": by, "count": count} for (kind, by), count in left.items()]
    results["rows"] = sorted(rows, key=lambda row: (row["kind"], row["by"]))
    results["equivalent"] = sum("equivalent" in line for line in results["survivors"])
    path.write_text(bench.to_text(results) + "\n")
    print(f"{results['caught']} caught, {results['equivalent']} equivalent of {results['faults']}")


if __name__ == "__main__":
    main()
