"""A call that comes again takes a shorter way, which must not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa import api, dispatch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_repeats", {})


def inputs(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 12, 2, 8, requires_grad=requires_grad) for _ in range(3)]


def results(**options: Any) -> tuple[torch.Tensor, ...]:
    """Output, LSE where asked for, and the gradients through both."""
    q, k, v = inputs()
    found = pyfa.attention(q, k, v, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = sum((x.square().sum() for x in outputs), torch.zeros(()))
    return (*outputs, *torch.autograd.grad(loss, (q, k, v)))


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window": (3, 1)}])
def test_the_second_call_gives_what_the_first_gave(options: dict[str, Any]) -> None:
    first = results(**options)
    assert len(api._repeats) == 1
    for _ in range(2):
        for again, before in zip(results(**options), first, strict=True):
            assert torch.equal(again, before)
    assert len(api._repeats) == 1


def test_with_and_without_gradients_are_two_calls() -> None:
    results(causal=True)
    with torch.no_grad():
        assert not pyfa.attention(*inputs(), causal=True).requires_grad
    results(causal=True)
    results(causal=True, deterministic=True)
    assert len(api._repeats) == 3


def test_the_backward_runs_where_its_forward_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    prepare = dispatch.prepare
    from pyfa import ops

    def noted(call: Any, wanted: str, *rest: Any) -> Any:
        ran.append(wanted)
        return prepare(call, wanted, *rest)

    monkeypatch.setattr(ops, "prepare", noted)
    for _ in range(2):
        q, k, v = inputs()
        with pyfa.use_backend("torch"):
            out = pyfa.attention(q, k, v)
        out.sum().backward()
    # Forward and backward of the first call, backward of the second.
    assert ran == ["torch"] * 3


def test_a_second_derivative_is_refused_again() -> None:
    results()
    q, k, v = inputs()
    (grad,) = torch.autograd.grad(pyfa.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_a_backend_may_have_a_shorter_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given a call that has run, and whether the LSE is wanted."""
    asked: list[bool] = []
    backend = dispatch.BACKENDS["torch"]

    def repeat(self: Any, plan: Any, call: Any, with_lse: bool) -> Callable[..., Any]:
        asked.append(with_lse)
        return lambda q, k, v: (q * 0 + 1, None)

    monkeypatch.setattr(type(backend), "repeat", repeat, raising=False)
    q, k, v = inputs(requires_grad=False)
    first, second = pyfa.attention(q, k, v), pyfa.attention(q, k, v)
    assert asked == [False]
    assert not torch.equal(first, second)
    assert torch.equal(second, torch.ones_like(q))
    pyfa.attention(q, k, v, return_lse=True)
    assert asked == [False, True]
