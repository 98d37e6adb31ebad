"""benchmarks/fuzz_arguments.py: what is refused by name passes, and every other answer is found."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("fuzz_arguments")


def test_wrong_arguments_are_refused_by_name(script: Any) -> None:
    answers = [script.one((number, "test", "torch")) for number in range(25)]
    assert {answer["what"] for answer in answers} <= {"", "the right call is refused"}
    assert len({answer["name"] for answer in answers}) > 8, "one argument, each time another"


@pytest.mark.parametrize("what", ["accepted", "a raw error", "written to"])
def test_another_answer_is_found(script: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = pyfa.attention

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        if not given.pop("wrong", False):
            return true(q, k, v, **given)
        if what == "a raw error":
            raise IndexError("list index out of range")
        if what == "written to":
            q.zero_()
            raise ValueError("wrong: expected nothing")
        return true(q, k, v, **given)

    wrong = script.Wrong("an argument too many", {"wrong": True}, ("wrong",))
    monkeypatch.setattr(script, "FUNCTIONS", {"dense": broken})
    monkeypatch.setattr(script, "wrongs", lambda *_: [wrong])
    answers = {script.one((number, "test", "torch"))["what"] for number in range(3)}
    assert answers == {what}


@pytest.mark.parametrize(
    ("error", "names", "right"),
    [
        (ValueError("window: expected (left, right); got 5"), ("window",), True),
        (ValueError("k: expected q's dtype; got int64"), ("window",), False),
        (TypeError("f() got an unexpected keyword argument 'x'"), ("x",), True),
        (TypeError("unsupported operand type(s)"), ("window",), False),
        (RuntimeError("window: no"), ("window",), False),
    ],
)
def test_what_names_an_argument(
    script: Any, error: Exception, names: tuple[str, ...], right: bool
) -> None:
    assert script.says(error, names) is right
