"""What a process does about a fault in a CUDA kernel (``mutations_cuda.py``): compile it, run cases
with it, look whether a case executes its line, run cases under Compute Sanitizer.

``python benchmarks/cuda_judge.py FILE`` is the process that Compute Sanitizer observes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cuda_faults
import sanitize
import torch
from cuda_faults import Fault
from random_cases import expected_on

from pyfa import cache, device
from pyfa.backends import BACKENDS
from pyfa.backends.common import libcuda
from pyfa.backends.cuda import code, plans, runtime_compiler
from pyfa.backends.native.plans import source_of
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED
from pyfa.errors import CompileError
from pyfa.plan import Plan

CUDA: Any = BACKENDS["cuda"]
DEVICE = device.by_name("H200")
SAME, UNCOMPILED, COMPILED, SURVIVED = "same code", "does not compile", "compiled", ""
EXECUTED, UNREACHED = "executed", "not executed"
BROKEN = "an error of this script"
_UNDER_TOOLS = 12  # cases of a fault that run under Compute Sanitizer, which is slow
_TOOL_SECONDS = 45.0
_COMPILE_SECONDS = 90
_CASE_SECONDS = 20  # a case takes less than one
TOOLS = ("memcheck", "racecheck")
# Behind every tensor, so that what is written beside one is written to none.
_PADDING = ("--padding", "512")
ENDLESS = "a case that does not end"
ALARM = f"the process ended with {-signal.SIGALRM}"


class Drawn(NamedTuple):
    """A fault of a plan's source, and the cases that launch the plan, the quickest first."""

    plan: Plan
    fault: Fault
    cases: list[str]
    again: bool = False  # a survivor of the saved results


class Job(NamedTuple):
    """What a process does: "build" compiles a plan, "compile" a fault; "cases", "mark" and "tools"
    judge it; "unchanged" runs the cases without it."""

    what: str
    plan: Plan
    of: Drawn | None = None
    seconds: float = 0.0


@functools.cache
def level() -> dict[str, Case]:
    return {case.name: case for case in grid.cases("full", CUDA.FEATURES, CUDA.DTYPES)}


@functools.cache
def quick() -> frozenset[str]:
    return frozenset(case.name for case in grid.cases("quick", CUDA.FEATURES, CUDA.DTYPES))


def to_json(each: Drawn) -> list[Any]:
    return [fields_of(each.plan), each.fault, each.cases, each.again]


def from_json(given: list[Any]) -> Drawn:
    plan, fault, cases, again = given
    return Drawn(plan_of(plan), Fault(*fault), cases, again)


def fields_of(plan: Plan) -> list[Any]:
    return [plan.backend, plan.kernel, plan.constants]


def plan_of(fields: list[Any]) -> Plan:
    backend, kernel, constants = fields
    return Plan(backend, kernel, tuple(tuple(pair) for pair in constants))


def compiled(plan: Plan, changed: str, arch: str) -> tuple[bytes, str]:
    """Return the cubin of a changed source, from the code cache or the compiler, or why it is none.
    Needs no GPU."""
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
        return b"", UNCOMPILED
    return data, SAME if data == code.load(plan, arch).data else ""


def judge(plan: Plan, data: bytes, cases: list[Case], seconds: float) -> tuple[str, str]:
    """Return what catches a changed cubin, and in which case; of a survivor how many ran."""
    use(plan, data)
    where, ran = runner.device_of("cuda"), 0
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > end:
            break
        signal.alarm(_CASE_SECONDS)  # ends this process
        result = runner.run_case(CUDA, case, where, expected_on(case, where))
        if result.status in (FAILED, CRASHED):
            return "wrong numbers" if result.status == FAILED else "an error", case.name
        ran += 1
    return SURVIVED, str(ran)


def use(plan: Plan, data: bytes) -> None:
    """Launches of ``plan`` in this process execute ``data``. The time that other plans take to
    compile is not the case's."""
    load, found = code.load, code.Code(data, "", "compiled")

    def load_or_wait(given: Plan, arch: str) -> code.Code:
        if replace(given, notes=()) == plan:
            return found
        left = signal.alarm(0)
        try:
            return load(given, arch)
        finally:
            signal.alarm(left)

    code.load = load_or_wait


class _Unexpected(examine.Expected):
    """Of a case that has only to run."""

    @property
    def ref(self) -> Any:
        raise _HasRun


class _HasRun(Exception):
    pass


def reaches(plan: Plan, changed: str, cases: list[Case], arch: str) -> tuple[str, str]:
    """Return whether and which case sets the mark in the changed source."""
    signal.alarm(_COMPILE_SECONDS)
    data, why = compiled(plan, changed, arch)
    if why:  # a mark that changes nothing is in code that was left out
        return UNREACHED if why == SAME else EXECUTED, ""
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
        runner.run_case(CUDA, case, runner.device_of("cuda"), expected)
        for module in modules:
            place, size, mark = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
            error = driver.cuModuleGetGlobal_v2(
                ctypes.byref(place), ctypes.byref(size), module, cuda_faults.MARK.encode()
            ) or driver.cuMemcpyDtoH_v2(ctypes.byref(mark), place, size)
            if error:
                raise RuntimeError(f"the mark was not read: CUDA error {error}")
            if mark.value:
                return EXECUTED, case.name
    return UNREACHED, ""


def answer(job: Job) -> tuple[str, str]:
    """Do a job, in a process of its own: it may end that or not end."""
    try:
        arch = plans.compiled_for(DEVICE.arch, job.plan)
        if job.of is None:
            code.compiled(job.plan, arch)
            return COMPILED, ""
        source, fault = source_of(job.plan), job.of.fault
        cases = [level()[name] for name in job.of.cases]
        if job.what == "compile":
            # NVRTC crashes on some, and unrolls loops of others without end.
            signal.alarm(_COMPILE_SECONDS)
            return compiled(job.plan, cuda_faults.planted(source, fault), arch)[1] or COMPILED, ""
        if job.what == "cases":
            data = compiled(job.plan, cuda_faults.planted(source, fault), arch)[0]
            return judge(job.plan, data, cases, job.seconds)
        if job.what == "unchanged":
            # So long that it comes to the case that did not end.
            seconds = job.seconds + _CASE_SECONDS
            return judge(job.plan, code.load(job.plan, arch).data, cases, seconds)
        if job.what == "mark":
            return reaches(job.plan, cuda_faults.marked(source, fault), cases, arch)
        return reported(job.of), ""
    except Exception:
        return BROKEN, traceback.format_exc()


def sanitizer() -> str:
    """Return where Compute Sanitizer is, "" if it is not installed."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return found if Path(found).exists() else ""


def reported(each: Drawn) -> str:
    """Return the tool of Compute Sanitizer that reports a fault in some of its cases, "" if
    none."""
    if not sanitizer():
        return SURVIVED
    own = "/sm90/" in each.plan.kernel  # of which racecheck understands little
    most = sorted(each.cases, key=lambda name: -level()[name].num_splits)[: _UNDER_TOOLS // 2]
    cases = [*dict.fromkeys((*most, *each.cases))][:_UNDER_TOOLS]
    given = [*to_json(each), [dataclasses.asdict(level()[name]) for name in cases]]
    tools = TOOLS[:1] if own else TOOLS
    kernel = re.compile(rf"\b{Path(each.plan.kernel).stem}\b")
    return next((tool for tool in tools if _reports(tool, given, kernel)), SURVIVED)


def _reports(tool: str, given: list[Any], kernel: re.Pattern[str]) -> bool:
    """Return whether the tool reports something of the kernel with the fault. Others of the same
    case may be Hopper's, of which racecheck reports races that there are not."""
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "log", Path(folder) / "given"
        file.write_text(json.dumps([tool, given]))
        process = subprocess.Popen(
            [sanitizer(), "--tool", tool, *(_PADDING if tool == "memcheck" else ()),
             "--report-api-errors", "no", "--max-connections", "100",
             "--log-file", str(log), sys.executable, __file__, str(file)],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(_TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the program is the tool's child
            process.wait()
        text = log.read_text(errors="replace") if log.exists() else ""
    blocks = re.split(r"(?m)^=========\s*$", text)
    return any(sanitize.is_ours(block, kernel) for block in blocks)


def under(file: Path) -> None:
    """Run cases of a fault in this process, which a tool observes, without their expected
    results."""
    tool, (*fields, cases) = json.loads(file.read_text())
    each = from_json(fields)
    changed = cuda_faults.planted(source_of(each.plan), each.fault)
    if tool == "racecheck":
        changed = sanitize.widened(changed)
    arch = plans.compiled_for(DEVICE.arch, each.plan)
    use(each.plan, compiled(each.plan, changed, arch)[0])
    for options in cases:
        case = Case(**{name: tuple(x) if isinstance(x, list) else x for name, x in options.items()})
        expected = _Unexpected(build.build(case))
        runner.run_case(CUDA, case, runner.device_of("cuda"), expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    under(Path(sys.argv[1]))
