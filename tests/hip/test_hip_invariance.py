"""``batch_invariant`` on the HIP kernels, in the emulator: bits, and faults that they show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
KERNEL = "hip/attn_fwd.hip"

# Each: the model that shows it, the exact snippet, what it becomes.
FAULTS = {
    "rescaled because another row is": (
        "plain", "outgrows ? highest * to_base_2 - kPeak : row[n].base",
        "__builtin_fmaxf(row[n].base, highest * to_base_2 - kPeak)",
    ),
    "tiles begin where a window does": (
        "window", "begin = seen.low / BLOCK_K * BLOCK_K", "begin = seen.low"
    ),
}  # fmt: skip


def compared(invariance_cases: ModuleType, name: str, **options: Any) -> Any:
    models = {
        "plain": invariance_cases.Model(2, 1, 64, 64, longest=280),
        "window": invariance_cases.Model(
            2, 2, 64, 64, torch.float16, window=70, sinks=True, longest=280
        ),
    }
    sizes = invariance_cases.Sizes((2,), (16, 1000), (16,), (2,), (2,))
    return invariance_cases.run(
        [models[name]], device="cpu", backend="emulator", sizes=sizes, **{"rows": 3, **options}
    )


@pytest.mark.parametrize("name", ["plain", "window"])
def test_bits_of_a_row_do_not_depend_on_its_company(
    invariance_cases: ModuleType, name: str
) -> None:
    found = compared(invariance_cases, name, with_gradients=1)
    assert sum(found.compared.values()) > 70
    assert found.failures == []


def test_without_it_they_do(invariance_cases: ModuleType) -> None:
    assert compared(invariance_cases, "plain", invariant=False, with_gradients=0).failures


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(
    invariance_cases: ModuleType, plant: Callable[[str, str, str], None], fault: str
) -> None:
    name, snippet, other = FAULTS[fault]
    plant(KERNEL, snippet, other)
    assert compared(invariance_cases, name, with_gradients=0).failures
