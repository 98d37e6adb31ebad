"""An interrupted build of a bundle: what passed in the emulator is not run again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyfa import sources
from pyfa.backends import BACKENDS
from pyfa.cli import bundling, parser
from pyfa.conformance import grid, report, runner
from pyfa.conformance.cases import Case

CASES = ("a", "b", "c", "d")


class InTurn:
    """In place of the pool of processes: a case runs here, when its result is asked for."""

    class Later:
        def __init__(self, result: Any) -> None:
            self.result = result

    def submit(self, function: Any, case: Any) -> Any:
        return self.Later(partial(function, case))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that were run, of a suite of four; each runs code of its own and of all."""
    names: list[str] = []
    cases = [SimpleNamespace(name=name) for name in CASES]
    monkeypatch.setattr(grid, "cases", lambda *_: cases)
    monkeypatch.setattr(bundling, "_is_wanted", lambda *_: True)

    def run_case(emulator: Any, case: Any, device: Any) -> Any:
        names.append(case.name)
        emulator.launch.digests.update({case.name: f"code {case.name}", "all": "code"})
        status = report.FAILED if case.name == "c" else report.PASSED
        return SimpleNamespace(status=status)

    monkeypatch.setattr(runner, "run_case", run_case)
    monkeypatch.setattr(bundling, "_pool", lambda: nullcontext(InTurn()))
    monkeypatch.setattr(bundling, "as_completed", list)
    monkeypatch.setattr(BACKENDS["emulator"].launch, "digests", {})  # type: ignore[attr-defined]
    return names


def emulate(path: Path | None) -> tuple[dict[str, list[str]], list[str]]:
    return bundling._emulate(True, (), bundling.Notes(path))


WANTED = ({"code a": ["a"], "code b": ["b"], "code d": ["d"], "code": ["a", "b", "d"]}, ["c"])


def test_the_rest_runs_and_what_failed(ran: list[str], tmp_path: Path) -> None:
    assert emulate(tmp_path / "notes") == WANTED
    assert emulate(tmp_path / "notes") == WANTED
    assert ran == [*CASES, "c"]


def test_after_an_interrupt(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_case = runner.run_case

    def interrupted(emulator: Any, case: Any, device: Any) -> Any:
        if case.name == "b":
            raise KeyboardInterrupt
        return run_case(emulator, case, device)

    monkeypatch.setattr(runner, "run_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        emulate(tmp_path / "notes")
    monkeypatch.setattr(runner, "run_case", run_case)
    assert emulate(tmp_path / "notes") == WANTED
    assert ran == list(CASES)


def test_half_a_line_is_not_a_note(ran: list[str], tmp_path: Path) -> None:
    emulate(tmp_path / "notes")
    text = (tmp_path / "notes").read_text()
    (tmp_path / "notes").write_text(text[:-5])
    assert emulate(tmp_path / "notes") == WANTED
    assert emulate(tmp_path / "notes") == WANTED
    assert ran == [*CASES, "c", "d", "c"]


def test_other_sources_run_all(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(tmp_path / "notes")
    kernels = tmp_path / "kernels"
    (kernels / "hip").mkdir(parents=True)
    (kernels / "hip" / "attn_fwd.hip").write_text("// another\n")
    monkeypatch.setattr(sources, "directory", lambda: kernels)
    emulate(tmp_path / "notes")
    assert ran == [*CASES, *CASES]


def test_without_notes(ran: list[str]) -> None:
    assert emulate(None) == emulate(None) == WANTED
    assert ran == [*CASES, *CASES]


def test_the_suites_names_are_those_of_one_case_each() -> None:
    """By which the notes know them."""
    emulator: Any = BACKENDS["emulator"]
    names = [case.name for case in grid.cases("full", emulator.FEATURES, emulator.DTYPES)]
    assert len(names) == len(set(names))


def test_processes_run_only_what_is_bundled() -> None:
    """Here that is nothing, in the pool itself."""
    case = Case(lengths_q=(1,), lengths_k=(64,), head_dim=64)
    with bundling._pool() as pool:
        assert pool.submit(bundling._digests, case).result() == (report.REFUSED, [])
    status, digests = bundling._digests(case)
    assert status == report.PASSED
    assert digests


def test_the_command_takes_a_file() -> None:
    asked = ["compile", "--arch", "gfx942", "--bundle", "--resume", "build/notes"]
    assert parser().parse_args(asked).resume == Path("build/notes")
