"""Reports: what a run records, JSON and JUnit, and the comparison of two."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from pyfa import conformance
from pyfa.backends import BACKENDS
from pyfa.backends.torch.backend import TorchBackend
from pyfa.conformance import Case, CaseResult, Report
from pyfa.conformance.tolerances import Check
from pyfa.problem import FEATURES, Problem

SMALL = (
    Case(lengths_q=(9, 9), lengths_k=(7, 7), backward=True, causal=True),
    Case(lengths_q=(5,), lengths_k=(40,), dropout_p=0.5, recipe="identity"),
    Case(kind="varlen", lengths_q=(3, 0), lengths_k=(0, 4)),
    Case(lengths_q=(4,), lengths_k=(4,), dtype="float8_e4m3fn", head_dim=23, head_dim_v=19),
)


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a torch backend that refuses the last case, as it otherwise refuses nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "FEATURES", frozenset(FEATURES) - {"fp8"})
        return conformance.run_cases(BACKENDS["torch"], SMALL)


def printed(thing: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    thing.print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def with_results(report: Report, *results: CaseResult) -> Report:
    return replace(report, results=results)


def test_statuses_and_digests(report: Report) -> None:
    assert [result.status for result in report.results] == ["passed"] * 3 + ["refused"]
    assert report.ok
    assert all("inputs" in r.digests and "lse" in r.digests for r in report.results[:3])
    assert "dropout" in report.results[1].digests
    assert "float8" in report.results[3].reasons[0]
    assert {"pyfa", "torch", "python", "device", "arch"} <= set(report.environment)


def test_progress_names_every_case() -> None:
    seen: list[tuple[int, int, str]] = []
    conformance.run_cases(BACKENDS["torch"], SMALL[:2], on_progress=lambda *step: seen.append(step))
    assert seen == [(0, 2, SMALL[0].name), (1, 2, SMALL[1].name)]


def test_json_round_trip(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    endless = Check("out", math.inf, 1.0, math.nan, 0.0, "too much")
    bad = replace(report.results[0], status="failed", checks=(endless,))
    whole = with_results(report, *report.results, bad)
    whole.save_json(path)
    assert json.loads(path.read_text())["schema"] == conformance.SCHEMA
    again = conformance.load(path)
    assert again.results[:4] == report.results
    assert again.results[4].checks[0].max_error == math.inf
    assert math.isnan(again.results[4].checks[0].mean_error)
    assert not again.ok


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "pyfa conformance report"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        conformance.load(path)


def test_other_schemas_are_refused(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(report.as_dict() | {"schema": 0}))
    with pytest.raises(ValueError, match="schema 0"):
        conformance.load(path)


def test_junit_is_well_formed(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    failed = replace(report.results[0], status="failed", messages=("a < b & \x00c",))
    crashed = replace(report.results[0], status="crashed", messages=("Traceback\n  line",))
    with_results(report, *report.results, failed, crashed).save_junit(path)
    suite = ElementTree.parse(path).getroot()
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "6", "1")
    assert (suite.get("errors"), suite.get("skipped")) == ("1", "1")
    assert len(suite.findall("testcase")) == 6
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("a < b & ")


def test_the_table_names_features_and_failures(report: Report) -> None:
    failed = replace(report.results[0], status="failed", messages=("out: [too] much",))
    text = printed(with_results(report, failed, *report.results[1:]))
    for words in ("causal", "dropout", "varlen", "bfloat16", failed.name, "out: [too] much"):
        assert words in text


def test_nothing_computed_is_not_ok(report: Report) -> None:
    assert not with_results(report).ok
    assert not with_results(report, report.results[3]).ok


def test_a_report_is_the_same_as_itself(report: Report) -> None:
    comparison = conformance.compare(report, report)
    assert comparison.same
    assert comparison.as_dict()["compared"] == 4
    assert "same: 4 of 4" in printed(comparison)


@pytest.mark.parametrize(
    ("index", "change", "reason"),
    [
        (0, {"status": "failed"}, "passed in a, failed in b"),
        (1, {"digests": {"inputs": "", "lse": "", "dropout": ""}}, "dropout bits differ"),
        (2, {"digests": {"inputs": "", "lse": ""}}, "the positions of -inf in the LSE differ"),
        (3, {"status": "passed"}, "refused in a, passed in b"),
    ],
)
def test_differences_are_said(
    report: Report, index: int, change: dict[str, Any], reason: str
) -> None:
    results = list(report.results)
    results[index] = replace(results[index], **change)
    comparison = conformance.compare(report, with_results(report, *results))
    assert not comparison.same
    assert list(comparison.differences) == [results[index].name]
    assert reason in "; ".join(comparison.differences[results[index].name])
    assert reason in printed(comparison)


def test_failing_alike_is_not_the_same(report: Report) -> None:
    failed = with_results(report, replace(report.results[0], status="failed"))
    assert conformance.compare(failed, failed).differences


def test_other_case_sets_are_said(report: Report) -> None:
    comparison = conformance.compare(report, with_results(report, *report.results[1:]))
    assert not comparison.same
    assert comparison.only_a == (report.results[0].name,)
    assert "only in a" in printed(comparison)


def test_common_cases_alone(report: Report) -> None:
    """What one backend was not asked, or refused, is counted; what both ran must still agree."""
    _, second, *rest = report.results
    other = with_results(report, replace(second, status="refused"), *rest)
    comparison = conformance.compare(report, other, common=True)
    assert comparison.same
    # The fourth case both refused: nobody ran it.
    assert comparison.compared == 1
    assert comparison.left_out == {"that only a has": 1, "that a backend refused": 2}
    assert "left out: 1 cases that only a has" in printed(comparison)
    third = replace(report.results[2], status="failed")
    assert not conformance.compare(report, with_results(report, third), common=True).same
    # With nothing in common nothing is the same.
    assert not conformance.compare(report, with_results(report), common=True).same


class Declining(TorchBackend):
    """Declares less than it is asked, and says so."""

    FEATURES = TorchBackend.FEATURES - {"causal"}


class Boasting(TorchBackend):
    """Computes what it does not declare."""

    FEATURES = TorchBackend.FEATURES - {"causal"}

    def why_not(self, problem: Problem) -> Sequence[str]:
        return ()


class Crashing(TorchBackend):
    def bind(self, *args: Any) -> Any:
        def run(*tensors: torch.Tensor) -> Any:
            raise ZeroDivisionError("on purpose")

        return run


@pytest.mark.parametrize(
    ("backend", "status", "words"),
    [
        (Declining(), "refused", "causal masking is not implemented"),
        (Boasting(), "failed", "does not declare causal"),
        (Crashing(), "crashed", "ZeroDivisionError: on purpose"),
    ],
    ids=["declining", "boasting", "crashing"],
)
def test_what_a_backend_may_do_wrong(
    backend: TorchBackend,
    status: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    nothing_bound: Callable[[], None],
) -> None:
    monkeypatch.setitem(BACKENDS, "torch", backend)
    monkeypatch.setattr("pyfa.dispatch._prepared", {})
    nothing_bound()
    (result,) = conformance.run_cases(backend, SMALL[:1]).results
    assert result.status == status
    assert words in "\n".join((*result.messages, *result.reasons))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"level": "slow"}, "level: expected one of quick, full"),
        ({"features": ["casual"]}, "features: expected some of"),
        ({"backend": "tpu"}, "backend: expected one of"),
        ({"max_seqlen": 0}, "max_seqlen: expected 1 or more"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        conformance.run(**arguments)


def test_run_selects_by_feature_and_length() -> None:
    report = conformance.run("torch", "quick", ["batch_idx"], max_seqlen=17)
    assert report.ok
    assert report.selected == ("batch_idx",)
    assert all("batch_idx" in result.features for result in report.results)
