"""Work tiles of packed batches by true lengths: right as they are, and caught when they are not."""

import pytest
from planted import faults_found

from pyfa.backends.hip import backward, forward
from pyfa.conformance.cases import Case

_SHORT = (3, 0, 5, 1) * 16
CASES = {
    # More sequences than lanes, and one with two blocks.
    "sections": Case(
        kind="varlen", lengths_q=(*_SHORT, 2, 270, 4), lengths_k=(*_SHORT, 9, 270, 4), heads_q=2,
        heads_k=1, causal=True, slack=3,
    ),
    # Two heads that no XCD has for itself, and two query heads of a KV head side by side.
    "heads": Case(
        kind="varlen", lengths_q=(70, 0, 300), lengths_k=(70, 5, 99), used_q=True, used_k=True,
        slack=3, heads_q=18, heads_k=9,
    ),
    # Two heads of an XCD one after the other.
    "heads of an XCD": Case(
        kind="varlen", lengths_q=(2, 258, 300), lengths_k=(2, 90, 300), heads_q=16, heads_k=16
    ),
    "backward": Case(
        kind="varlen", lengths_q=(*_SHORT, 270), lengths_k=(*_SHORT, 270), heads_q=4, heads_k=2,
        causal=True, slack=20, backward=True,
    ),
}  # fmt: skip

# Each: the case that shows it, the kernel, the exact snippet, what it becomes.
FAULTS = {
    "half of the lanes in a sum": ("sections", forward.KERNEL, "STEP(0x143, 0xc);", ""),
    "earlier sections not counted": (
        "sections", forward.KERNEL, "if (piece < all) break;", "break;",
    ),
    "sequences without the block": (
        "sections", forward.KERNEL, "blocks >= top && before", "before",
    ),
    "the first section's sequence": ("sections", forward.KERNEL, "= first + lane;", "= lane;"),
    "a block twice": ("sections", forward.KERNEL, ": top - 1;", ": max(top - 2, 0);"),
    "one spare head": ("heads", forward.KERNEL, "work.head = id % spare;", "work.head = 0;"),
    "one of a group's heads": ("heads", forward.KERNEL, "+ place % beside;", ";"),
    "one of an XCD's heads": ("heads of an XCD", forward.KERNEL, "+ members * beside +", "+"),
    "a sequence's last keys": (
        "backward", backward.ONE_PASS, "(blocks, lane) - top", "(blocks, lane) - 1",
    ),
    "one sequence too few": (
        "backward", "hip/row_sums.hip", "+ mine <= place", "+ mine < place",
    ),
    "a sequence's first rows": (
        "backward", "hip/dq_convert.hip", "/ size - batch) * size", "/ size) * size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sound(case):
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    case, kernel, snippet, other = FAULTS[fault]
    plant(kernel, snippet, other)
    assert faults_found([CASES[case]])
