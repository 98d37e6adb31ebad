"""Masks over the new rows in the HIP kernels: faults planted there are caught."""

import pytest
from planted import faults_found

from pyfa.backends.hip import decode, forward
from pyfa.conformance import cases


def cache(lengths_q, lengths_k, **fields):
    lengths = {"lengths_q": lengths_q, "lengths_k": lengths_k}
    return cases.Case(**{"kind": "kvcache", "heads_q": 2, "tree": True} | lengths | fields)


# One plan each, so that a fault is one compilation.
DECODE = (
    # The mask begins in a group of keys that all rows see but for it; more rows than keys.
    cache((6, 6, 6), (200, 37, 3)),
    cache((3, 3), (130, 61), page_size=16, num_splits=2),
)
FORWARD = (cache((40, 40), (120, 90), softcap=9.0),)

FAULTS = {
    "a key late": ("column = min(key - shift, last);", "column = min(key - shift - 1, last);"),
    "not masked": ("column >= 0 && !seen[", "column > 4096 && !seen["),
    "the first sequence's mask for all": ("+ batch * p.bias_batch + min", "+ min"),
    "the first row's mask for all": ("min(row, last) * p.bias_row;", "0 * p.bias_row;"),
    "tiles with new rows taken as whole": ("min(seen.all_high, max(s.shift, 0))", "seen.all_high"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*DECODE, *FORWARD], ids=lambda case: case.name)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert ("attn_fwd" if case in FORWARD else "attn_decode") in kernels_run


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_decode_is_caught(fault, plant):
    plant(decode.KERNEL, *FAULTS[fault])
    assert faults_found(DECODE)


def test_fault_in_forward_is_caught(plant):
    plant(forward.KERNEL, *FAULTS["not masked"])
    assert faults_found(FORWARD)
