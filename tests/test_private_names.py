"""What pyfa does on a PyTorch that lacks the private names it uses."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pyfa import _torch


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``pyfa._torch`` as imported where ``torch._C`` has none of them."""
    spec = importlib.util.find_spec("pyfa._torch")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_C", SimpleNamespace())
        spec.loader.exec_module(module)
    return module


def test_every_name_has_a_fallback(bare: ModuleType) -> None:
    x = torch.zeros(2, 3)
    assert bare.is_capturing is torch.cuda.is_current_stream_capturing
    assert bare.is_plain(x)
    assert bare.is_unwatched(x)
    assert bare.has_storage(x)
    assert not bare.in_transform()
    assert not bare.is_tracing()
    assert not bare.is_deterministic()
    assert bare.empty_cpu((2, 3), (3, 1), torch.float16).stride() == (3, 1)
    assert bare.TensorGuards is None
    bare.run_backward_directly(type("Function", (), {}))
    bare.hand_to_backward("name", 1)
    assert bare.handed_to_backward("name") is None


def test_the_engine_calls_backward_itself() -> None:
    """No method of PyTorch is between them: PyTorch's own looks for it each time."""
    callers: list[str] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, dout: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe().f_back
            callers.append("" if frame is None else frame.f_code.co_name)
            return 2 * dout

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad(Double.apply(x).sum(), x)
        assert grad.tolist() == [2, 2]
        _torch.run_backward_directly(Double)
    assert callers[0] == "apply"
    assert callers[1] != "apply"
