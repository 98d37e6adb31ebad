"""Tests that need a GPU: skipped with a reason where PyTorch finds none or Triton cannot run."""

from __future__ import annotations

import pytest
import torch

from pyfa.backends import BACKENDS


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    why = BACKENDS["triton"].why_unavailable()
    if why:
        pytest.skip(f"triton: {why}")
    torch.manual_seed(0)


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("PyTorch finds one GPU only")
