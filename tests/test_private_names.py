"""What pyfa does on a PyTorch that lacks the private names it uses."""

import importlib.util
from types import ModuleType, SimpleNamespace

import pytest
import torch


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
    bare.hand_to_backward("name", 1)
    assert bare.handed_to_backward("name") is None
