"""Packed calls with another total of rows: what Triton's kernels get is what a first call gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from test_triton_bound import driver, launches  # noqa: F401  (a fixture)
from totals_cases import CASES, TOTALS, placed, without_sizes

import pyfa
from pyfa import _torch, binding, bound, dispatch
from pyfa.backends.common import program
from pyfa.backends.triton import runtime

ITS_CASES = {name: case for name, case in CASES.items() if name != "append"}


@pytest.fixture
def made(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:  # noqa: F811
    """What is allocated by calls of Triton's backend, as on a GPU."""
    backend = dispatch.BACKENDS["triton"]
    monkeypatch.setattr(type(backend), "why_unavailable", lambda self: None)
    monkeypatch.setattr(backend, "_runners", {}, raising=False)
    found: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        found.append(_torch.empty_cpu(shape, strides, dtype))
        return found[-1]

    monkeypatch.setattr(runtime, "EMPTY", {"cpu": empty})
    return found


def forget() -> None:
    for table in (binding.calls, bound.calls):
        table.clear()


def seen(
    driver: Any, made: list[torch.Tensor], call: Callable[..., Any], totals: tuple[int, int]  # noqa: F811
) -> list[Any]:  # fmt: skip
    """What a call allocates, and all that it gives the driver."""
    made.clear()
    launches(driver)
    with pyfa.use_backend("triton"):
        given = call(*totals)
    found: list[Any] = [(tuple(x.shape), x.stride(), x.dtype) for x in made]
    for name, config, arguments in launches(driver):
        # Numbers this large are addresses.
        places = (placed(x, given, made) if x > 1 << 40 else x for x in arguments)
        found.append((name, config, tuple(places)))
    return found


@pytest.mark.parametrize("case", ITS_CASES.values(), ids=ITS_CASES)
def test_another_total_is_launched_as_by_a_first_call(
    driver: Any, made: list[torch.Tensor], case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    wanted = []
    with pytest.MonkeyPatch.context() as patch:
        without_sizes(patch)
        for totals in TOTALS:
            forget()
            wanted.append(seen(driver, made, case, totals))
    forget()
    bound: list[Any] = []
    laid = program.Program.__init__

    def noted(self: Any, *given: Any) -> None:
        bound.append(self)
        laid(self, *given)

    monkeypatch.setattr(program.Program, "__init__", noted)
    for turn in range(2):
        for totals, want in zip(TOTALS, wanted, strict=True):
            assert seen(driver, made, case, totals) == want, totals
        if turn == 0:
            bound_once = len(bound)
    assert len(bound) == bound_once > 0
