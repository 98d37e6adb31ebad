"""What the torch backend does on a GPU alone: PyTorch's operators for GPUs are replaced here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import request
from pyfa.backends.torch import sdpa, tiled
from pyfa.backends.torch.rows import Rows
from pyfa.problem import Call

ROWS, KEYS, HEADS, DIM = 3, 5, 2, 8


@pytest.fixture
def call() -> Call:
    """A call whose tensors are on no CPU, and hold nothing."""
    q, k = (torch.empty(1, n, HEADS, DIM, device="meta") for n in (ROWS, KEYS))
    return request.dense(q, k, k, request.Shared()).call


def test_an_lse_of_inf_is_nan(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel writes +inf for the sum of a row with a NaN."""
    lse = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    monkeypatch.setattr(sdpa, "_GPU_FORWARD", lambda q, *_, **__: (q, lse))
    found = sdpa.forward(call)
    assert found is not None
    expected = torch.tensor([1.0, torch.nan, -torch.inf, torch.nan])
    assert torch.equal(found[1].nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))


def test_what_the_backward_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sdpa._GPU_BACKWARD
    told: dict[str, Any] = {}

    def backward(*args: Any, **options: Any) -> Any:
        names = [argument.name for argument in true._schema.arguments]
        told.update(zip(names, args, strict=False), **options)
        return true(*args, **options)

    monkeypatch.setattr(sdpa, "_GPU_BACKWARD", backward)
    lse = torch.empty(1, HEADS, ROWS, device="meta")
    found = sdpa.backward(call, call.q, lse, call.q)
    assert [x.shape for x in found[:3]] == [x.shape for x in call[:3]]
    assert {name: told[name].shape for name in ("query", "key", "value", "out", "grad_out")} == {
        "query": (1, HEADS, ROWS, DIM), "key": (1, HEADS, KEYS, DIM),
        "value": (1, HEADS, KEYS, DIM), "out": (1, HEADS, ROWS, DIM),
        "grad_out": (1, HEADS, ROWS, DIM),
    }  # fmt: skip
    numbers = {name: told[name] for name in ("max_q", "max_k", "dropout_p", "is_causal", "scale")}
    assert numbers == {
        "max_q": ROWS, "max_k": KEYS, "dropout_p": 0.0, "is_causal": False, "scale": DIM**-0.5,
    }  # fmt: skip


def test_no_pages_have_no_rows_although_lengths_are_not_read() -> None:
    pages = torch.empty(0, 4, HEADS, DIM, device="meta")
    lengths, table = (torch.empty(shape, device="meta").int() for shape in ((1,), (1, 2)))
    assert Rows(7, pages, False, lengths, page_table=table).longest == 0


class _Elsewhere(torch.Tensor):
    is_cpu = False


def test_the_gradient_of_a_captured_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to add: one of them keeps the order of a sum on a CPU, the other on a GPU."""
    torch.manual_seed(0)
    q, bias = torch.randn(1, 9, HEADS, DIM), torch.randn(9, requires_grad=True)

    def gradient() -> torch.Tensor:
        out = pyfa.attention(
            q, q, q, score_mod=lambda score, b, h, i, j: score + bias[j], backend="torch"
        )
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out.square().sum(), bias)[0]

    expected = gradient()
    assert expected.any()
    monkeypatch.setattr(
        tiled, "_zeros_of", lambda x: torch.zeros(x.numel()).as_subclass(_Elsewhere)
    )
    torch.testing.assert_close(gradient().as_subclass(torch.Tensor), expected)
