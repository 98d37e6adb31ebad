"""Kernels that threads build before a call needs them: ``pyfa/backends/native/builds.py``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa
from pyfa import cache
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import runtime_compiler
from pyfa.backends.native import builds
from pyfa.backends.native.builds import Builds
from pyfa.errors import CodeObjectError, CompileError
from pyfa.plan import Plan

ROOT = Path(__file__).parents[1]
PLANS = [Plan("hip", f"hip/kernel{number}.hip", ()) for number in range(4)]
KEYS = [(plan, "gfx942") for plan in PLANS]
SECONDS = 20.0  # far above what any wait here takes


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda number: monkeypatch.setattr(builds, "_cores", lambda: number)


def test_kernels_are_built_at_the_same_time_and_once(cores: Any) -> None:
    cores(3)
    meeting, made = threading.Barrier(3, timeout=SECONDS), []

    def make(plan: Plan, arch: str) -> str:
        meeting.wait()  # passes only if three are in here
        made.append(plan)
        return plan.kernel

    load = Builds(make)
    load.begin(KEYS[:3])
    assert [load(*key) for key in KEYS[:3]] == [plan.kernel for plan in PLANS[:3]]
    load.begin(KEYS[:3])
    assert [load(*key) for key in KEYS[:3]] == [plan.kernel for plan in PLANS[:3]]
    assert sorted(made, key=str) == PLANS[:3]


def test_threads_are_as_many_as_cores_and_end(cores: Any) -> None:
    cores(2)
    inside, most, lock = 0, 0, threading.Lock()

    def make(plan: Plan, arch: str) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.05)
        with lock:
            inside -= 1

    load = Builds(make)
    load.begin(KEYS)
    names = [thread.name for thread in threading.enumerate()]
    assert 1 <= names.count("pyfa builds kernels") <= 2
    for key in KEYS:
        load(*key)
    builds.settle()
    assert most <= 3  # two threads and this one
    assert "pyfa builds kernels" not in [thread.name for thread in threading.enumerate()]


def test_a_call_does_not_wait_for_a_kernel_that_it_does_not_need(cores: Any) -> None:
    cores(1)
    has_begun, first_may_end = threading.Event(), threading.Event()
    by: dict[Plan, str] = {}

    def make(plan: Plan, arch: str) -> Plan:
        by[plan] = threading.current_thread().name
        if plan is PLANS[0]:
            has_begun.set()
            assert first_may_end.wait(SECONDS)
        return plan

    load = Builds(make)
    load.begin(KEYS[:2])
    assert has_begun.wait(SECONDS)
    assert load(*KEYS[1]) == PLANS[1]  # nobody has begun it
    assert by[PLANS[1]] == threading.current_thread().name
    first_may_end.set()
    assert load(*KEYS[0]) == PLANS[0]
    assert by[PLANS[0]] == "pyfa builds kernels"


def test_one_kernel_is_left_to_the_caller(calls_of: Any) -> None:
    added = calls_of(builds._queue, "add")
    load = Builds(lambda plan, arch: threading.current_thread().name)
    load.begin(KEYS[:1])
    assert load(*KEYS[0]) == threading.current_thread().name
    load.begin(KEYS[:2])  # of which one is there
    assert added == []
    load.begin(KEYS)
    assert len(added) == 3


def test_an_error_reaches_the_call_that_needs_the_kernel(cores: Any) -> None:
    cores(4)
    failing = {PLANS[1]: CompileError("failed for gfx942", "log", "/a/source"),
               PLANS[2]: CodeObjectError("spills")}  # fmt: skip
    made = []

    def make(plan: Plan, arch: str) -> Plan:
        made.append(plan)
        if plan in failing:
            raise failing[plan]
        return plan

    load = Builds(make)
    load.begin(KEYS[:3])
    assert load(*KEYS[0]) == PLANS[0]
    for plan, error in failing.items():
        with pytest.raises(type(error)) as raised:
            load(plan, "gfx942")
        assert raised.value is error
    # A compiler may fail for a reason that goes away, such as a full disk. Refused code is the same
    # the next time.
    refused = failing[PLANS[2]]
    failing.clear()
    assert load(*KEYS[1]) == PLANS[1]
    with pytest.raises(CodeObjectError) as raised:
        load(*KEYS[2])
    assert raised.value is refused
    assert (made.count(PLANS[1]), made.count(PLANS[2])) == (2, 1)
    load.cache_clear()
    assert load(*KEYS[2]) == PLANS[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_builds_what_its_parent_s_threads_had_begun(cores: Any) -> None:
    cores(2)
    parent, go, begun = os.getpid(), threading.Event(), threading.Barrier(3, timeout=SECONDS)

    def make(plan: Plan, arch: str) -> int:
        if os.getpid() == parent:
            begun.wait()
            assert go.wait(SECONDS)
        return os.getpid()

    load = Builds(make)
    load.begin(KEYS)  # two run, two wait
    begun.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        child = os.fork()
    if child == 0:
        right = [load(*key) for key in KEYS] == [os.getpid()] * len(KEYS)
        meeting = threading.Barrier(2, timeout=SECONDS)
        together = Builds(lambda plan, arch: meeting.wait())  # passes only if there are threads
        together.begin(KEYS[:2])
        right = right and {together(*key) for key in KEYS[:2]} == {0, 1}
        os._exit(0 if right else 1)
    go.set()
    begun.reset()
    builds.settle()
    assert os.waitpid(child, 0)[1] == 0
    load.cache_clear()


EXIT = """
import threading, time
from pyfa.backends.native import builds
from pyfa.plan import Plan

builds._cores = lambda: 1
running = threading.Event()

def make(plan, arch):
    print(plan.kernel, flush=True)
    running.set()
    time.sleep(0.5)
    print("built", plan.kernel, flush=True)

load = builds.Builds(make)
load.begin((Plan("hip", name, ()), "gfx942") for name in "abc")
running.wait()
print("exits", flush=True)
"""


def run(code: str, **more: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)} | more,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_an_exit_waits_for_the_kernel_that_is_built_and_for_no_other() -> None:
    assert run(EXIT) == ["a", "exits", "built a"]


def test_without_a_folder_to_write_to_one_warning_is_given(
    cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(4)
    monkeypatch.setenv("PYFA_CACHE_DIR", os.devnull)
    monkeypatch.setattr(cache, "_warned", set())
    meeting = threading.Barrier(4, timeout=SECONDS)

    def make(plan: Plan, arch: str) -> cache.Entry:
        def build() -> bytes:
            meeting.wait()
            return plan.kernel.encode()

        name = plan.kernel[4:11]
        key = cache.key(name, (), "compiler", arch)
        return cache.get_or_build(
            name, key, suffix=".hsaco", source=name, meta={}, build=build
        )  # fmt: skip

    load = Builds(make)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        load.begin(KEYS)
        assert [load(*key).code for key in KEYS] == [plan.kernel.encode() for plan in PLANS]
    assert ["kept in memory only" in str(each.message) for each in given] == [True]


AT_ONCE = """
import threading
from pyfa.backends.cuda import runtime_compiler

began, found = threading.Barrier(4), []

def compile(number):
    began.wait()
    source = 'extern "C" __global__ void f(int *x) { *x = %d; }' % number
    found.append(runtime_compiler.compile_cuda(source, arch="sm_90")[0][:4])

threads = [threading.Thread(target=compile, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found == [b"\\x7fELF"] * 4)
"""


@pytest.mark.skipif(runtime_compiler.why_unavailable() is not None, reason="no NVRTC")
def test_threads_load_nvrtc_at_once() -> None:
    assert run(AT_ONCE) == ["True"]


SHAPES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"heads_k": 1},
    {"dim": 80},
    {"dim": 256},
    {"dim": 64, "dtype": torch.float16, "deterministic": True},
    {"bias": True},
    {"softcap": 3.0, "dropout_p": 0.1, "seed": torch.tensor(1)},
    {"mask_mod": lambda b, h, i, j: i - j < 50},
    {"mask_mod": lambda b, h, i, j: i * 0.5 > j},
    {"score_mod": lambda s, b, h, i, j: s * 2 + i},
    {"rows": 1},
    {"rows": 0},
    {"needs_grad": False},
    {"needs_grad": False, "mask_mod": lambda b, h, i, j: i >= j},
]


@pytest.mark.parametrize("given", SHAPES, ids=lambda given: ", ".join(given) or "plain")
@pytest.mark.parametrize("device", ["H200", "A100-80GB", "MI300X"])
def test_only_kernels_that_are_launched_are_begun(
    device: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    no_gpu = importlib.import_module("no_gpu")
    options = dict(given)
    rows, heads_k = options.pop("rows", 200), options.pop("heads_k", 4)
    dim, dtype = options.pop("dim", 128), options.pop("dtype", torch.bfloat16)
    needs_grad = options.pop("needs_grad", True)
    q = torch.randn(2, rows, 4, dim).to(dtype).requires_grad_(needs_grad)
    k, v = (torch.randn(2, 300, heads_k, dim).to(dtype) for _ in range(2))
    if options.get("bias"):
        bias = torch.randn(2, 4, rows, 300).to(dtype)
        options["bias"] = bias.requires_grad_(device == "MI300X")  # cuda has no gradient of it
    begun: list[Plan] = []
    loaded: list[Plan] = []

    def plain(plan: Plan) -> Plan:
        return replace(plan, backend="", notes=())

    vendor = "hip" if device == "MI300X" else "cuda"
    with no_gpu.amd(device) if vendor == "hip" else no_gpu.nvidia(device):
        launch: Any = BACKENDS[vendor].launch  # type: ignore[attr-defined]
        name = "_load" if vendor == "hip" else "_load_new"
        whole = getattr(launch, name)

        def load(plan: Plan, *more: Any) -> Any:
            loaded.append(plain(plan))
            return whole(plan, *more)

        setattr(launch, name, load)
        launch.begin = lambda wanted, arch: begun.extend(map(plain, wanted))
        if vendor == "hip":
            monkeypatch.setattr(type(BACKENDS["hip"]), "why_not_built", lambda self, problem: ())
        out = pyfa.attention(q, k, v, backend=vendor, **options)
        if needs_grad:
            out.sum().backward()
    assert set(begun) <= set(loaded)
    # All but those of which the first call may have no need: merging splits, rows of no sequence.
    kernels = {plan.kernel.split("/")[-1].split(".")[0] for plan in set(loaded) - set(begun)}
    assert kernels <= {"combine", "gaps"}
    if rows:
        assert len(set(begun)) >= (3 if needs_grad else 1)
