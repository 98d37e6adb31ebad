"""Devices with another number of XCDs than MI300X: MI300A has six, which is no power of two."""

from collections.abc import Callable

import pytest
import torch
from planted import faults_found

from pyfa.backends.hip import decode, forward, plans
from pyfa.conformance.cases import Case
from pyfa.device import DEVICES

# Pairs of a sequence and a head that six do not divide, so that some dies have one more; of packed
# batches also heads side by side on a die.
CASES = {
    "forward": Case(lengths_q=(70, 70), lengths_k=(300, 300), heads_q=10, heads_k=5, causal=True),
    "packed forward": Case(
        kind="varlen", lengths_q=(70, 0, 300), lengths_k=(70, 5, 99), heads_q=18, heads_k=9,
        slack=3, causal=True,
    ),
    "decode": Case(
        kind="kvcache", lengths_q=(1, 1, 1), lengths_k=(400, 97, 0), heads_q=12, heads_k=3,
        num_splits=3, slack=3,
    ),
    "decode, many rows": Case(
        kind="kvcache", lengths_q=(2, 2), lengths_k=(300, 90), heads_q=50, heads_k=5, num_splits=2,
        head_dim=128, head_dim_v=128,
    ),
    "backward": Case(
        lengths_q=(40, 40), lengths_k=(300, 300), heads_q=14, heads_k=7, causal=True,
        backward=True,
    ),
    "packed backward": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), heads_q=14, heads_k=7,
        slack=3, backward=True,
    ),
}  # fmt: skip

# Each: the case that shows it, the kernel, the exact snippet, what it becomes.
FAULTS = {
    "heads of eight dies": (
        "forward", forward.KERNEL, "id % dies * (pairs / dies)", "id % 8 * (pairs / dies)",
    ),
    "parts of eight dies": (
        "decode", decode.KERNEL, "first * dies + id - place * dies;", "first * dies + id % 8;",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def six(monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]) -> None:
    """The emulator stands for an MI300A, and no call is bound to another device."""
    monkeypatch.setattr(plans, "_STANDS_FOR", DEVICES["MI300A"])


@pytest.mark.parametrize("case", CASES)
def test_six_dies(case: str) -> None:
    assert plans.device_at(torch.device("cpu")).dies == 6
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, plant: Callable[[str, str, str], None]) -> None:
    case, kernel, snippet, other = FAULTS[fault]
    plant(kernel, snippet, other)
    assert faults_found([CASES[case]])
