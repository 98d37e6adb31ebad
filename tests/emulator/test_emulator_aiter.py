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


OPEN = "LSE of the second block of a workgroup's rows is off by up to 0.04: theirs or ours, open"


@pytest.mark.parametrize(
    "name",
    [
        "hd128_fp8",
        pytest.param("hd128_fp8_causal", marks=pytest.mark.xfail(reason=OPEN, strict=True)),
    ],
)
def test_float8(name: str) -> None:
    outcome = aiter_kernels.forward(Path(str(CLONE)), name)
    assert outcome.right, outcome


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", aiter_kernels.BACKWARDS)
def test_backward(name: str, seed: int) -> None:
    outcome = aiter_kernels.backward(Path(str(CLONE)), name, seed)
    assert outcome.right, outcome
    assert set(outcome.violations) <= {"waits"}
