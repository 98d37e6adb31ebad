"""benchmarks/coverage.py: what is left of a code object, and reasons that what ran refutes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyfa.backends import BACKENDS
from pyfa.backends.hip import code, runtime_emulator
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.conformance import run_cases
from pyfa.conformance.cases import Case, packed
from pyfa.emulator import Covered

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLACK = packed(((5, 9), (40, 33)), "varlen", slack=3)  # its gaps are cleared by the kernel `gaps`
NAMES = (
    "cover", "coverage", "executed", "kernel_cases", "launches", "machine", "machine_faults",
    "mutations", "processes", "source_lines", "unreached",
)  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def gaps() -> tuple[Any, Any, Any, set[int]]:
    """The plan, the program and the code of `gaps`, and the addresses that a case executes."""
    plan = next(plan for plan in catalog.common_plans(TARGET, "gfx942") if "gaps" in plan.kernel)
    found = code.load(plan, "gfx942")
    emulator: Any = BACKENDS["emulator"]
    assert run_cases(emulator, [SLACK]).ok
    program = runtime_emulator.program(found.data)
    ran = emulator.coverage.objects[found.digest].executed
    return plan, program, program.kernel("gaps").code, ran


def test_what_is_left_is_all_that_was_not_executed(script: Any, gaps: Any) -> None:
    unreached = script("unreached")
    _, _, decoded, ran = gaps
    left = unreached.left(decoded, ran)
    assert sum(each.count for each in left) == len(decoded.names) - len(ran) > 0
    assert all(each.ways for each in left)
    everything = {int(pc) for pc in decoded.instructions["pc"]}
    assert unreached.left(decoded, everything) == []


def test_a_division_of_64_bits_is_a_reason(script: Any, gaps: Any) -> None:
    unreached, source_lines = script("unreached"), script("source_lines")
    plan, program, decoded, ran = gaps
    places = source_lines.places(plan, "gfx942", program)
    explained = unreached.Explained(plan, decoded, places)
    counts = {True: 0, False: 0}
    for each in unreached.left(decoded, ran):
        rule = explained.reason(each)
        counts[rule is not None] += each.count
        if rule:
            assert rule.kind == unreached.TOO_LARGE
            lines = [places[way.branch].lines for way in each.ways]
            assert all("place / p.seqlen_q" in line for line, *_ in lines)
        else:
            assert explained.way_in(each)
    assert counts[True] > 100
    assert explained.refuted(ran) == []


def test_a_reason_for_code_that_is_executed_is_refuted(script: Any, gaps: Any) -> None:
    """A rule whose branch goes both ways, and the rule of divisions where one was executed."""
    unreached, source_lines = script("unreached"), script("source_lines")
    plan, program, decoded, ran = gaps
    places = source_lines.places(plan, "gfx942", program)
    lines = ("for (int i = thread; i < heads * units",)
    stale = unreached.Rule(unreached.NEVER, "a row has no elements", lines=lines)
    other = unreached.Rule(unreached.NEVER, "of another kernel", ("append",), lines)
    explained = unreached.Explained(plan, decoded, places, (stale, other))
    assert explained.refuted(ran) == [stale]
    everything = {int(pc) for pc in decoded.instructions["pc"]}
    explained = unreached.Explained(plan, decoded, places)
    assert any(rule.machine for rule in explained.refuted(everything))


def test_code_without_a_rule_has_no_reason(
    script: Any, gaps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coverage, unreached = script("coverage"), script("unreached")
    plan, _, decoded, ran = gaps
    ((found, refuted),) = coverage.left_of(plan, [frozenset(ran)])
    assert refuted == []
    assert sum(found.values()) == len(decoded.names) - len(ran)
    division = next(rule for rule in unreached.RULES if rule.machine)
    without = tuple(rule for rule in unreached.RULES if rule is not division)
    monkeypatch.setattr(unreached, "RULES", without)
    ((bare, _),) = coverage.left_of(plan, [frozenset(ran)])
    assert sum(bare.values()) == sum(found.values())
    assert all(kind != unreached.TOO_LARGE for _, kind, _ in bare)


def test_other_code_with_line_tables_is_an_error(
    script: Any, gaps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_lines = script("source_lines")
    plan, program, _, _ = gaps
    real = source_lines.compiler.assembly
    monkeypatch.setattr(
        source_lines.compiler, "assembly",
        lambda *given, **options: real(*given, **options).replace("\ts_endpgm", "\ts_nop 0"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="with line tables the compiler makes other code"):
        source_lines.places(plan, "gfx942", program)


def test_cases_take_turns_by_their_kernels(script: Any) -> None:
    coverage = script("coverage")
    cases = [Case(heads_q=2 * n) for n in range(1, 7)]
    first = frozenset(("a",))
    of = [(case, first if n < 4 else frozenset(("b",))) for n, case in enumerate(cases)]
    order = coverage.in_turns(of, {cases[3].name})
    assert order[0] == cases[3]
    assert {dict(of)[case] for case in order[1:3]} == {first, frozenset(("b",))}
    assert set(order) == set(cases)


def test_the_quick_level_gets_the_cases_that_are_worth_the_most_in_their_time(
    script: Any,
) -> None:
    cover, ran_of = script("cover"), script("executed").Ran

    def ran(name: str, places: range, seconds: float = 1.0, status: str = "passed") -> Any:
        executed = {"a": ("gaps", [4 * place for place in places])}
        return ran_of(replace(Case(), recipe=name), status, seconds, executed, {})

    quick = ran("plain", range(10))
    slow, short, rest = ran("big", range(60), 9.0), ran("huge", range(20)), ran("equal", range(70))
    failed = ran("offset", range(100), 0.1, "failed")
    static = {"a": Covered("gaps", 80), "b": Covered("gaps", 20)}
    every = [slow, failed, short, rest, quick]

    def added(most: int, seconds: float) -> tuple[list[Any], list[int]]:
        found, count = cover.added(every, {quick.case.name}, static, most, seconds)
        return found, [int((count == times).sum()) for times in (1, 2, 3)]

    assert added(0, 99.0) == ([], [10, 0, 0])
    assert added(1, 99.0) == ([rest], [60, 10, 0])
    # What one case executes is worth less to the next, and what two do still less.
    assert added(2, 99.0) == ([rest, short], [50, 10, 10])
    assert added(3, 99.0)[0] == [rest, short, slow]
    # The time is that of all of them; one that is too slow leaves its place to others.
    assert added(3, 2.5)[0] == [rest, short]
    every.remove(rest)
    assert added(1, 99.0)[0] == [short]
    assert added(9, 99.0) == ([short, slow], [40, 10, 10])
    # What three cases execute is worth nothing.
    same = ran("identity", range(10))
    every.extend((rest, same))
    assert added(9, 99.0)[0] == [rest, short, slow]
    line = json.loads(cover.line_of(quick.case, "quick"))
    assert line == {"level": "quick"}
    assert json.loads(cover.line_of(short.case, "quick")) == {"level": "quick", "recipe": "huge"}


def test_of_a_code_object_that_no_case_launches_nothing_has_a_reason(
    script: Any, gaps: Any
) -> None:
    coverage = script("coverage")
    plan, _, decoded, _ = gaps
    ((found, refuted),) = coverage.left_of(plan, [frozenset()])
    assert found == {("gaps", "", coverage.NOT_LAUNCHED): len(decoded.names)}
    assert refuted == []


def test_each_kind_of_reason_is_counted_and_only_never_is_out_of_reach(script: Any) -> None:
    coverage, unreached = script("coverage"), script("unreached")
    of = coverage.Of()
    for count, kind in enumerate(("", *unreached.KINDS), start=1):
        of.add(("gaps", kind, "a reason"), count)
    *_, row = coverage.rows_of([], {"digest": Covered("gaps", 20)}, of)
    assert [row[key] for key in ("never", "too_large", "other_device")] == [2, 3, 4]
    one = script("executed").Ran(Case(), "passed", 0.0, {"digest": ("gaps", [*range(9)])}, {})
    *_, row = coverage.rows_of([one], {"digest": Covered("gaps", 20)}, of)
    assert row["share_of_reachable"] == 9 / 18


@pytest.mark.parametrize("name", ["coverage_gfx942", "coverage_gfx942_all"])
def test_the_saved_coverage_says_where_each_instruction_is(script: Any, name: str) -> None:
    found = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    unreached = script("unreached")
    rows = {row["kernel"]: row for row in found["coverage"]["full"]}
    left = sum(row["instructions"] for row in found["left"])
    assert rows["all"]["executed"] + left == rows["all"]["instructions"]
    reasons = {(row["kind"], row["reason"]) for row in found["left"] if row["kind"] != "no reason"}
    rules = (*unreached.RULES, unreached.NOWHERE)
    assert reasons <= {(rule.kind, rule.reason) for rule in rules}
    for kind in unreached.KINDS:
        of_kind = sum(row["instructions"] for row in found["left"] if row["kind"] == kind)
        # Of another device only since this kind is known.
        assert of_kind == rows["all"].get(kind.replace(" ", "_"), 0)


def test_each_line_of_a_reason_is_in_the_sources(script: Any) -> None:
    """A rule whose line has changed explains nothing any more, and nothing else would show it."""
    sources = Path(__file__).parents[2] / "kernels"
    code = [
        line.strip()
        for path in (*sources.glob("hip/*"), *sources.glob("common/*"), *sources.glob("*.h"))
        if path.is_file()
        for line in path.read_text().splitlines()
    ]
    lines = {line for rule in script("unreached").RULES for line in rule.lines}
    assert lines
    assert [line for line in sorted(lines) if not any(at.startswith(line) for at in code)] == []
