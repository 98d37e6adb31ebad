"""Cases in several orders of float atomics: what differs from one to another is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyfa import conformance
from pyfa.backends import BACKENDS
from pyfa.backends.hip.runtime_emulator import Orders
from pyfa.backends.torch.backend import TorchBackend
from pyfa.conformance import Case
from pyfa.conformance.runner import run_case

CASE = Case(lengths_q=(9,), lengths_k=(7,))


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]) -> Orders:
    """Of a torch backend whose output is off in the order of seed 2, as by a lost atomic."""
    chosen, bind, seeds = Orders(), TorchBackend.bind, list[Any]()

    def wrong_in_one_order(self: Any, *arguments: Any) -> Any:
        bound = bind(self, *arguments)

        def run(*tensors: torch.Tensor) -> Any:
            chosen.mattered = True
            seeds.append(chosen.seed)
            out, lse = bound(*tensors)
            return [out * 1.5 if chosen.seed == 2 else out, lse]

        return run

    monkeypatch.setattr(TorchBackend, "orders", chosen, raising=False)
    monkeypatch.setattr(TorchBackend, "bind", wrong_in_one_order)
    nothing_bound()
    return chosen


def run(orders: int) -> conformance.CaseResult:
    return run_case(BACKENDS["torch"], CASE, torch.device("cpu"), orders=orders)


def test_the_order_that_fails_is_named(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(2).status == "passed"
    bad = run(4)
    assert bad.status == "failed"
    assert bad.messages
    assert all("(PYFA_EMULATOR_SEED=2)" in message for message in bad.messages)
    assert bad.ratio > 1 > run(2).ratio
    monkeypatch.setenv("PYFA_EMULATOR_SEED", "2")
    assert run(2).status == "failed"
    assert orders.seed is None


def test_cases_without_float_atomics_run_once(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    real = Orders.choose

    def choose(self: Orders, seed: int | None) -> None:
        seeds.append(seed)
        real(self, seed)

    monkeypatch.setattr(Orders, "choose", choose)
    assert run(2).status == "passed"
    assert seeds == [0, 1, None]
    monkeypatch.setattr(
        Orders, "mattered", property(lambda _: False, lambda *_: None), raising=False
    )
    seeds.clear()
    assert run(4).status == "passed"
    assert seeds == [0, None]


def test_an_error_says_in_which_order(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    def broken(*_: Any) -> Any:
        raise ArithmeticError("lost")

    monkeypatch.setattr(TorchBackend, "bind", broken)
    nothing_bound()
    result = run(3)
    assert result.status == "crashed"
    assert "PYFA_EMULATOR_SEED=0" in result.messages[0]
    assert "ArithmeticError: lost" in result.messages[0]


def test_each_launch_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = Orders()
    first = [orders.next() for _ in range(3)]
    orders.choose(None)
    assert first == [orders.next() for _ in range(3)]
    monkeypatch.setenv("PYFA_EMULATOR_SEED", "7")
    orders.choose(None)
    others = [orders.next() for _ in range(3)]
    assert len({*first, *others}) == 6
    orders.choose(7)
    assert others == [orders.next() for _ in range(3)]


def test_only_the_emulator_can_choose() -> None:
    with pytest.raises(ValueError, match="orders: torch cannot choose"):
        conformance.run("torch", orders=2)
    with pytest.raises(ValueError, match="orders: expected 1 or more; got 0"):
        conformance.run("torch", orders=0)
    assert BACKENDS["hip"].orders is None  # type: ignore[attr-defined]
    assert BACKENDS["emulator"].orders is not None  # type: ignore[attr-defined]
