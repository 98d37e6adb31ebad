"""Tests that need a GPU: skipped with a reason where PyTorch finds none."""

from __future__ import annotations

import pytest
import torch

from pyfa import device
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import plans
from pyfa.conformance import runner


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
def on_hopper(gpu: None) -> None:
    if why := BACKENDS["cuda"].why_unavailable():
        pytest.skip(f"cuda: {why}")
    if not plans.runs_sm90(device.of(runner.device_of("cuda")).arch):
        pytest.skip("the GPU is no Hopper")


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("PyTorch finds one GPU only")
