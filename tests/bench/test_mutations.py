"""benchmarks/mutations.py: the faults it makes, and what conformance says of them; coverage."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.machinery
import json
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pyfa.backends import BACKENDS
from pyfa.backends.hip import runtime_emulator
from pyfa.backends.native import gaps
from pyfa.conformance import run_cases
from pyfa.conformance.cases import Case, packed
from pyfa.emulator.decode import decode

SPLIT = packed(((1, 1), (65, 17)), "kvcache", num_splits=2)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = importlib.import_module("mutations"), importlib.import_module("machine_faults")
    monkeypatch.setattr(
        runtime_emulator, "program", runtime_emulator.program
    )  # it puts others there
    yield found
    for name in ("mutations", "machine_faults", "launches", "machine", "executed", "processes"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("low", "high", "kind", "name"),
    [
        (0xBF8CC07F, 0, "wait", "s_nop"),
        (0xBF8A0000, 0, "barrier", "s_nop"),
        (0xBF840003, 0, "branch", "s_cbranch_scc1"),
        (0xBF060100, 0, "comparison", "s_cmp_lg_u32"),
        (0xD86C0010, 0x01000002, "offset", "ds_read_b32"),
        (0x02040702, 0, "register", "v_add_f32"),
    ],
)
def test_faults_of_one_instruction(scripts: Any, low: int, high: int, kind: str, name: str) -> None:
    """Encodings by the ISA's document, each changed in one place."""
    made = [fault for fault in scripts[1].faults(low, high) if fault.kind == kind]
    assert made
    for fault in made:
        after = decode(fault.low, fault.high)
        assert (fault.low, fault.high) != (low, high)
        assert after.name == name or kind not in ("wait", "barrier", "branch", "comparison")
    assert not scripts[1].faults(0xFFFFFFFF, 0), "what is no instruction has no faults"


def test_a_dropped_wait_is_caught_and_its_wait_alone(scripts: Any) -> None:
    mutations, _ = scripts
    plain = mutations.run_plainly(SPLIT)
    assert plain.status == "passed"
    options = argparse.Namespace(all=["wait"], kernels="combine", seed=0, faults=0, part=(0, 1))
    _, planted = mutations.drawn([plain], plain.objects, {SPLIT.name}, options)
    verdicts = [mutations.judge(each, 9) for each in planted]
    caught = [verdict for verdict in verdicts if verdict.by]
    assert caught
    assert {verdict.by for verdict in caught} == {"emulator: waits"}
    assert all(re.fullmatch("s_waitcnt .* → s_nop 0", verdict.text) for verdict in verdicts)
    left = [verdict for verdict in verdicts if not verdict.by]
    assert all(verdict.same and not verdict.other for verdict in left), "a wait moves no bits"


def test_a_launch_is_made_again_and_a_change_of_bytes_runs_the_case(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutations, _ = scripts
    plain = mutations.run_plainly(SPLIT)
    kept = [each for several in mutations._kept.values() for each in several]
    assert all(each.again(BACKENDS["emulator"].runtime) for each in kept), "the same bytes again"
    monkeypatch.setattr(mutations, "_named", lambda: {SPLIT.name: SPLIT})
    options = argparse.Namespace(all=["register"], kernels="combine", seed=0, faults=0, part=(0, 1))
    planted = mutations.drawn([plain], plain.objects, {SPLIT.name}, options)[1][:40]
    verdicts = [mutations.judge(each, 9) for each in planted]
    assert {"wrong numbers", ""} <= {verdict.by for verdict in verdicts}
    assert all(verdict.case == SPLIT.name for verdict in verdicts if verdict.by)


def test_a_changed_program_is_the_one_that_decoding_all_of_it_makes(scripts: Any) -> None:
    mutations, faults = scripts
    kinds = set()
    for data in mutations.run_plainly(SPLIT).objects.values():
        before = mutations._programs(data)
        image = before.object.image
        places = before.code.instructions["pc"].tolist()
        # 40 of each object: every one decodes the whole object again, up to 65 ms.
        for pc in places[:: max(7, len(places) // 40)]:
            low, high = (int.from_bytes(image[at : at + 4], "little") for at in (pc, pc + 4))
            for fault in faults.faults(low, high)[:1]:
                kinds.add(fault.kind)
                size = int(before.code.instructions[before.code.index_at(pc)]["size"])
                words = b"".join(word.to_bytes(4, "little") for word in fault[1:])[:size]
                changed = image[:pc] + words + image[pc + size :]
                whole = mutations._prepare(dataclasses.replace(before.object, image=changed)).code
                made = mutations.mutated(data, pc, fault)[0].code
                assert made.names == whole.names
                assert (made.instructions == whole.instructions).all()
    assert {"wait", "branch", "register", "offset"} <= kinds


def test_the_emulators_coverage_is_in_the_report() -> None:
    found = run_cases(BACKENDS["emulator"], [SPLIT])
    covered = found.coverage["combine"]
    assert found.ok
    assert 0 < covered["executed"] < covered["instructions"]
    assert found.as_dict()["coverage"]["combine"] == covered
    console = Console(width=100, record=True, file=StringIO())
    found.print(console)
    assert "combine" in console.export_text()
    assert not run_cases(BACKENDS["torch"], [SPLIT]).coverage


def test_rows_that_no_kernel_writes_are_seen(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    """Memory that nobody wrote holds no zeros, so a gap that is not cleared is not 0 by luck."""
    case = Case(kind="varlen", lengths_q=(33, 40), lengths_k=(33, 40), slack=3)
    assert run_cases(BACKENDS["emulator"], [case]).ok
    monkeypatch.setattr(gaps, "add_forward", lambda *_: None)
    nothing_bound()
    result = run_cases(BACKENDS["emulator"], [case]).results[0]
    assert result.status == "failed"


def test_faults_of_cuda_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("cuda_faults")
    source = """#if A < B
// a < b
DEVICE int least(int a, int b) { return a < b; }
  int x = min(a + 1, b);  // a < b
  if (x >= 3 && y) barrier();
  asm volatile("a < b");
    __syncthreads();
  hold(x);
"""
    found = list(script.faults(source))
    made = {(fault.line, fault.kind, fault.new.strip()) for fault in found}
    assert made == {
        (3, "extremum", "int x = max(a + 1, b);"),
        (3, "arithmetic", "int x = min(a - 1, b);"),
        (4, "comparison", "if (x > 3 && y) barrier();"),
        (4, "logic", "if (x >= 3 || y) barrier();"),
        (4, "call left out", ""),
        (6, "call left out", ""),
    }
    assert script.planted(source, found[-1]).splitlines()[6] == ""
    assert found[-1].before == 'asm volatile("a < b");'
    assert script.in_front("a;\n  b;  // c\n\n// d\ne;\nf;\ng;\n", 6) == "b;\ne;\nf;"


def test_a_cuda_fault_is_found_again_after_the_source_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("cuda_faults")
    source = "f(a);\n  wait();\ng(a);\n  wait();  // for g\nif (a < b) return;\n"
    found = script.found_again(source, 4, "wait();", "")
    assert (found.line, found.before) == (3, "g(a);")
    assert script.found_again(source, 0, "wait();", "").line == 1
    assert script.found_again(source, 9, "if (a < b) return;", "if (a <= b) return;").line == 4
    assert script.found_again(source, 0, "if (a > b) return;", "if (a >= b) return;") is None


def test_faults_of_python_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("mutations_python")
    tree = ast.parse(
        "def f(a: 3, b) -> 3:\n    g(a)\n    return min(a + 1, b) if not a < b else a and b"
    )
    before = ast.unparse(tree)
    made = [(kind, ast.unparse(tree)) for kind, _ in script.changes(tree)]
    assert {kind for kind, _ in made} == {
        "left out", "call", "not left out", "comparison", "logic", "arithmetic", "number",
    }  # fmt: skip
    assert all(after != before for _, after in made)
    assert ast.unparse(tree) == before, "each is taken back"
    assert not any("a: 4" in x or "-> 4" in x for _, x in made), "an annotation is no code"


def test_a_job_may_end_its_process_or_hang() -> None:
    """In a process that has one thread, since the jobs are forked."""
    code = """if True:
        import os, sys, time
        sys.path.insert(0, "benchmarks")
        from processes import judged

        def judge(job):
            if job == "ends":
                os._exit(3)
            if job == "hangs":
                time.sleep(60)
            return "found", job

        jobs = iter(["answers", "hangs", "ends", "answers too"])
        end = time.monotonic() + 20
        print(sorted(judged(jobs, judge, at_once=2, stuck=1.0, end=end)))
        print(list(judged(iter(["hangs"]), judge, at_once=2, stuck=9.0, end=time.monotonic() + 1)))
        """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=50,
    )
    assert done.stdout.splitlines() == [
        "[('answers', ('found', 'answers')), ('answers too', ('found', 'answers too')), "
        "('ends', ('the process ended with 3', '')), ('hangs', ('no answer', ''))]",
        "[]",
    ], done.stderr


# All faults take 5 s to make: one process makes them, for all who draw from them.
draws_faults = pytest.mark.xdist_group("python faults")


@pytest.fixture(scope="module")
def python_faults() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        faults: list[Any] = importlib.import_module("mutations_python").all_faults()
        return faults


@draws_faults
@pytest.mark.parametrize(
    ("file", "new"),
    [
        pytest.param("tiled.py", "exp2", marks=pytest.mark.night),
        # Of a file that ``import pyfa`` imports: the script must not have imported it before.
        ("append.py", "first * c + second * s"),
    ],
)
def test_a_fault_of_the_torch_backend_is_caught(
    file: str, new: str, python_faults: list[Any]
) -> None:
    """In a process that imports the backend with the fault; without one all cases pass."""
    fault = next(x for x in python_faults if x.file == file and new in x.new)
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import mutations_python as m, argparse;"
        "options = argparse.Namespace(jobs=1, stuck=120.0);"
        f"print(m.judge_all([m.Fault(*{tuple(fault)!r})], 'quick', options, 1e9)[0].by)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=150
    )
    assert done.stdout.strip().splitlines()[-1:] == ["wrong numbers"], done.stderr


@draws_faults
def test_a_fault_that_only_a_test_finds(python_faults: list[Any]) -> None:
    fault = next(x for x in python_faults if x.new == "fits = (begin <= capacity)[..., None, None]")
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import mutations_python as m, argparse;"
        "m._caught = lambda level: (__import__('pyfa'), ('', ''))[1];"  # as if all cases passed
        "options = argparse.Namespace(jobs=1, stuck=120.0);"
        f"print(m.judge_all([m.Fault(*{tuple(fault)!r})], 'quick', options, 1e9)[0])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=150
    )
    assert done.stdout.strip().endswith("by='a test', case='tests/test_append_reasons.py')"), (
        done.stderr
    )


@draws_faults
def test_reasons_are_of_faults_that_there_are(
    monkeypatch: pytest.MonkeyPatch, python_faults: list[Any]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("equivalent_faults")
    made = {(fault.file, fault.old, fault.new) for fault in python_faults}
    assert script._PYTHON.keys() <= made
    fault = next(iter(script._PYTHON))
    assert script.of_python(*fault)
    assert not script.of_python(*fault[:2], fault[1])


def test_reasons_are_of_lines_of_cuda_kernels_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And of the one that is meant, where several lines are equal."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("equivalent_faults")
    faults = importlib.import_module("cuda_faults")
    folder = Path(__file__).parents[2] / "kernels"
    made = {
        (faults.code_of(fault.old), faults.code_of(fault.new), faults.in_front(text, fault.line))
        for path in (*folder.rglob("*.cu"), *folder.rglob("*.h"))
        for text in (path.read_text(),)
        for fault in faults.faults(text)
    }
    for parts, _, line, new, _ in script._SOURCE:
        *before, old = line.split("\n")
        plan = " ".join(("cuda/", *parts))
        equal = [x for x in made if x[:2] == (old, new)]
        meant = [x for x in equal if script.of_source(plan, *x)]
        assert meant, line
        assert len(meant) < len(equal) if before else meant == equal, line
        assert not script.of_source(plan, old, new, "another line") or not before


def test_a_fault_that_nothing_imports_does_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script says so instead: the process had imported the file, or another copy of it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("mutations_python")
    fault = script.Fault("append.py", 0, "left out", 1, "f()", "pass")
    options = argparse.Namespace(jobs=1, stuck=9.0)
    with pytest.raises(RuntimeError, match="pyfa was imported before"):
        script.judge_all([fault], "quick", options, 1e9)
    loader = importlib.machinery.SourceFileLoader
    monkeypatch.setattr(loader, "get_code", loader.get_code)
    monkeypatch.setattr(script.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(script, "_caught", lambda level: ("", ""))
    assert script.judge(fault, "quick") == ("", script.NEVER_RAN)
    monkeypatch.delitem(sys.modules, "pyfa")
    monkeypatch.setattr(
        script.processes, "judged", lambda *_, **__: [(fault, ("", script.NEVER_RAN))]
    )
    with pytest.raises(RuntimeError, match=r"Fault\(file='append.py'.* was not imported"):
        script.judge_all([fault], "quick", options, 1e9)


def test_a_cuda_fault_is_caught_by_cases_or_by_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("mutations_cuda")
    judge = importlib.import_module("cuda_judge")
    plan = script.Plan("cuda", "cuda/combine.cu", (("DTYPE", 1),))
    drawn = [script.Drawn(plan, script.Fault("", n, "a", "b"), ["x", "y"]) for n in range(5)]
    options = argparse.Namespace(faults=3, minutes=1.0, seconds=5.0, tools=1)
    jobs = script.Jobs([plan], drawn, options)
    assert jobs.take(next(jobs), judge.COMPILED, "") is None
    same, wrong, racing, hanging, left = (next(jobs) for _ in range(5))
    jobs.take(same, judge.SAME, "")
    for compiled in (wrong, racing, hanging, left):
        jobs.take(compiled, judge.COMPILED, "")
    wrong, racing, hanging, left = (next(jobs) for _ in range(4))
    assert jobs.take(wrong, "wrong numbers", "x").by == "wrong numbers"
    # A case that takes too long, of which the machine may be the reason.
    assert jobs.take(hanging, judge.ALARM, "") is None
    unchanged = next(jobs)
    assert (unchanged.what, unchanged.of) == ("unchanged", hanging.of)
    assert jobs.take(unchanged, judge.ALARM, "").by == "no answer"
    assert jobs.take(left, judge.SURVIVED, "2") is None
    assert jobs.take(next(jobs), judge.UNREACHED, "").by == judge.UNREACHED
    assert jobs.take(racing, judge.SURVIVED, "1") is None
    assert jobs.passed
    mark = next(jobs)
    assert (mark.what, mark.of.cases) == ("mark", ["x"])
    assert jobs.take(mark, judge.EXECUTED, "x") is None
    assert jobs.take(next(jobs), "racecheck", "").by == "racecheck"
    found = script.counted(jobs.found)
    assert (found["faults"], found["caught"], found["no_answer"]) == (3, 2, 1)
    assert len(found["not_executed"]) == 1
    jobs.under_way += 1
    assert jobs.take(unchanged, judge.SURVIVED, "2").by == judge.ENDLESS
    assert script.counted(jobs.found)["caught"] == 3
    assert (jobs.under_way, jobs.passed, jobs.drawn_again[judge.SAME]) == (0, {}, 1)


def test_a_mark_stands_where_a_fault_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("cuda_faults")
    source = """  int x = a +
      b - 1;
  if (a < b) return;
  for (int i = 0; i < n; ++i)
    sum += x;
  return a && b;
"""
    at = {1: 0, 2: 2, 3: 3, 4: 4, 5: 5}
    made = {
        line: script.marked(source, script.Fault("", line, "", "")).splitlines()[1 + place]
        for line, place in at.items()
    }
    assert made == {
        1: "pyfa_executed = 1;   int x = a +",
        2: "  if (pyfa_executed = 1, a < b) return;",
        3: "  for (int i = 0; pyfa_executed = 1, i < n; ++i)",
        4: "pyfa_executed = 1;     sum += x;",
        5: "  return pyfa_executed = 1, a && b;",
    }


def test_divisions_need_no_second_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that several survivors of the HIP faults have."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("equivalent_faults")
    numpy = importlib.import_module("numpy")
    some = numpy.random.default_rng(0).integers(1, 1 << 31, 100_000)
    for divisors in (numpy.arange(1, 100_000), some, 1 << numpy.arange(31)):
        assert script.worst_quotient(divisors) > 2.0**31


def test_a_tool_reports_the_kernel_with_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """And runs cases with splits and others: some kernels run in one of the two alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    judge = importlib.import_module("cuda_judge")
    plan = judge.Plan("cuda", "cuda/gaps.cu")
    names = sorted(judge.level(), key=lambda name: -judge.level()[name].num_splits)
    each = judge.Drawn(plan, judge.Fault("", 0, "", ""), [*names[-9:], *names[:20]])
    log, ran = ["gaps"], []

    class Program:
        def __init__(self, command: list[str], **_: Any) -> None:
            assert ("--padding" in command) == ("memcheck" in command)
            ran.extend(json.loads(Path(command[-1]).read_text())[1][-1])
            text = f"========= Invalid __global__ write of size 16 bytes\n at {log[0]}+0x1"
            Path(command[command.index("--log-file") + 1]).write_text(text)

        def wait(self, seconds: float) -> int:
            return 0

    monkeypatch.setattr(judge, "sanitizer", lambda: "tool")
    monkeypatch.setattr(judge.subprocess, "Popen", Program)
    assert judge.reported(each) == "memcheck"
    splits = [case["num_splits"] for case in ran]
    assert len(splits) == 12
    assert sum(count > 1 for count in splits) == 6
    log[0] = "attn_bwd"
    assert judge.reported(each) == judge.SURVIVED
