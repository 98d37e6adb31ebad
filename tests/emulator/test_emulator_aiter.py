"""AITER's public gfx942 programs, unmodified, against float64: PYFA_TEST_AITER names a clone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import aiter_kernels

sys.path.pop(0)

CLONE = os.environ.get("PYFA_TEST_AITER")
pytestmark = pytest.mark.skipif(not CLONE, reason="PYFA_TEST_AITER names no clone of ROCm/aiter")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", aiter_kernels.FORWARDS)
def test_forward(name: str, seed: int) -> None:
    outcome = aiter_kernels.forward(Path(str(CLONE)), name, seed)
    assert outcome.right, outcome
    assert not outcome.violations


def test_float8() -> None:
    outcome = aiter_kernels.forward(Path(str(CLONE)), "hd128_fp8")
    assert outcome.right, outcome


def test_float8_causal_scales_its_second_block_twice() -> None:
    """As its instructions say: it is right where that changes nothing, and wrong as predicted."""
    name, clone = "hd128_fp8_causal", Path(str(CLONE))
    assert aiter_kernels.forward(clone, name, descale=(0.5, 2.0, 2.0)).right
    assert aiter_kernels.forward(clone, name, twice=True).right
    assert not aiter_kernels.forward(clone, name).right


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", aiter_kernels.BACKWARDS)
def test_backward(name: str, seed: int) -> None:
    outcome = aiter_kernels.backward(Path(str(CLONE)), name, seed)
    assert outcome.right, outcome
    assert set(outcome.violations) <= {"waits"}
