"""Masks over the new rows in the HIP kernels: faults planted there are caught."""

import pytest
import turns
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
# Four products of 16 lines beside the limits of chunks.
CHUNKS = (
    cache((6, 6), (200, 37), heads_q=16, heads_k=2, attention_chunk=98),
    cache((5, 5), (210, 130), heads_q=8, heads_k=1, attention_chunk=70,
          cache_dtype="float8_e4m3fnuz"),
    cache((10, 10), (130, 61), heads_q=6, heads_k=1, attention_chunk=50, head_dim=96,
          head_dim_v=96, dtype="float16", page_size=5, num_splits=2, causal=True, softcap=9.0),
    cache((7, 7), (300, 71), heads_q=6, heads_k=1, attention_chunk=90, head_dim=104, head_dim_v=128,
          page_size=16, leftpad=True, window=(60, 2), sinks=True),
)  # fmt: skip
NIGHT = CHUNKS[1:]
FORWARD = (cache((40, 40), (120, 90), softcap=9.0),)

FAULTS = {
    "a key late": ("column = min(key - shift, last);", "column = min(key - shift - 1, last);"),
    "not masked": ("column >= 0 && !seen[", "column > 4096 && !seen["),
    "the first sequence's mask for all": ("+ batch * p.bias_batch + min", "+ min"),
    "the first row's mask for all": ("min(row, last) * p.bias_row;", "0 * p.bias_row;"),
    "tiles with new rows taken as whole": ("min(seen.all_high, max(s.shift, 0))", "seen.all_high"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", turns.cases([*DECODE, *CHUNKS, *FORWARD], NIGHT), ids=lambda case: case.name
)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert ("attn_fwd" if case in FORWARD else "attn_decode") in kernels_run


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_decode_is_caught(fault, plant):
    plant(decode.KERNEL, *FAULTS[fault])
    assert faults_found(DECODE)


def test_first_product_s_chunks_for_all_are_caught(plant):
    plant(
        decode.KERNEL, "seen = shared.seen[t][M::column()];", "seen = shared.seen[0][M::column()];"
    )
    assert faults_found(CHUNKS[:1])


def test_fault_in_forward_is_caught(plant):
    plant(forward.KERNEL, *FAULTS["not masked"])
    assert faults_found(FORWARD)
