"""Tests that need a GPU: skipped with a reason where PyTorch finds none."""

from __future__ import annotations

import pytest
import torch

from pyfa.backends import BACKENDS


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    torch.manual_seed(0)


@pytest.fixture(params=["hip", "cuda", "triton"])
def backend(request: pytest.FixtureRequest, gpu: None) -> str:
    """Each backend with kernels that runs here."""
    why = BACKENDS[request.param].why_unavailable()
    if why:
        pytest.skip(f"{request.param}: {why}")
    return request.param


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("PyTorch finds one GPU only")
