"""A small GPT learns the same on the HIP kernels' machine code as by exact attention."""

import importlib.util
from pathlib import Path

import pytest

from pyfa.emulator import native

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_gpt.py"


@pytest.mark.night
def test_loss_curve():
    """Within the rule for gradients: 3 times naive's error, and 4 ulp of the largest loss.

    The backward in one pass, and in two.
    """
    native.load()
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    train_gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train_gpt)
    exact, naive, one_pass, two_passes = (
        train_gpt.losses(backend, steps=5, batch=2, seqlen=70)
        for backend in ("float64", "naive", "emulator", "emulator:deterministic")
    )
    assert exact[-1] < 0.6 * exact[0]  # it learns
    allowed = 3 * max(abs(a - b) for a, b in zip(naive, exact, strict=True)) + 4 * 2.0**-21
    for ours in (one_pass, two_passes):
        assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) <= allowed
    assert one_pass != two_passes  # they are two kernels
