"""Chunks and windows with a negative edge in the HIP kernels: faults planted there are caught."""

import pytest
import turns
from planted import faults_found

from pyfa.backends.hip import backward, decode
from pyfa.conformance import cases


def cache(lengths_q, lengths_k, **fields):
    lengths = {"lengths_q": lengths_q, "lengths_k": lengths_k}
    return cases.Case(**{"kind": "kvcache", "heads_q": 2} | lengths | fields)


# One plan each, so that a fault is one compilation: decode of one tile, two-pass backward of
# scores of every kind, which owns keys and then rows.
DECODE = (
    # Rows at the end of a chunk and in the next one.
    cache((5, 5), (200, 200), attention_chunk=98),
    # Rows in front of the first key.
    cache((6, 6), (3, 3), attention_chunk=4),
    cache((3, 3), (130, 61), attention_chunk=50, causal=True, page_size=16, num_splits=2),
    cache((3, 3), (130, 61), window=(40, -3), alibi="heads"),
    # The last element of a key, which is read again in place of those beyond the head.
    cache((1, 1), (90, 33), attention_chunk=50, head_dim=40, head_dim_v=40, hostile="k=-inf"),
)
BACKWARD = (
    cases.dense(65, 97, batch=1, backward=True, deterministic=True, alibi="heads",
                attention_chunk=24),
    cases.dense(65, 97, batch=1, backward=True, deterministic=True, alibi="heads",
                attention_chunk=70),
    cases.dense(65, 97, batch=1, backward=True, deterministic=True, alibi="heads",
                window=(9, -2)),
)  # fmt: skip
# float16 at head_dim 256, whose pass that owns keys takes 510 of a lane's 512 registers.
WIDE = (
    cases.dense(33, 97, batch=1, dtype="float16", head_dim=256, head_dim_v=256, backward=True,
                window=(60, -9), alibi="heads", softcap=2.0, recipe="mixed"),
    cases.dense(65, 70, batch=1, dtype="float16", head_dim=256, head_dim_v=256, backward=True,
                attention_chunk=40, bias="heads", sinks=True, dropout_p=0.2),
)  # fmt: skip

# Each: what it is, the exact snippet, what it becomes.
OF_DECODE = {
    "chunks a key late": ("int place = key + p.k_start;", "int place = key + p.k_start - 1;"),
    "a chunk in front of the first key": ("place < 0 ? -p.attention_chunk :", "place < 0 ? 0 :"),
    "a chunk's last key left out": (
        "max(last + p.attention_chunk, 0)",
        "max(last + p.attention_chunk - 1, 0)",
    ),
    "masks skipped in the first row's chunk": (
        "seen.all_low = max(seen.all_low, min(last, most));",
        "seen.all_low = max(seen.all_low, min(first, most));",
    ),
    "the chunk's beginning not masked": ("r < seen.low || ", ""),
    "the first line's chunk for all": (
        "Range seen = shared.seen[t][M::column()];", "Range seen = shared.seen[t][0];",
    ),
    "part of the key not cleared": (
        "if constexpr (kFloat8) return;", "if constexpr (kFloat8 || BANDED) return;",
    ),
    "the window not moved": ("(long long)s.shift + p.window_shift", "(long long)s.shift"),
    "the first row's chunk for all": (
        "chunk_begin(p, first + s.shift), chunk_begin(p, last + s.shift)",
        "chunk_begin(p, first + s.shift), chunk_begin(p, first + s.shift)",
    ),
}  # fmt: skip
OF_BACKWARD = {
    "rows counted from key 0": (
        "chunk_begin(p, first) - s.shift", "chunk_begin(p, first)",
    ),
    "the last row of a chunk left out": (
        "max(last + p.attention_chunk, 0)", "max(last + p.attention_chunk - 1, 0)",
    ),
    "the window moved the other way": ("s.shift + p.window_shift", "s.shift - p.window_shift"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", turns.cases([*DECODE, *BACKWARD, *WIDE], night=WIDE), ids=lambda case: case.name
)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert ("attn_bwd" if case.backward else "attn_decode") in kernels_run


@pytest.mark.parametrize("fault", OF_DECODE)
def test_fault_in_decode_is_caught(fault, plant):
    plant(decode.KERNEL, *OF_DECODE[fault])
    assert faults_found(DECODE)


@pytest.mark.parametrize("fault", OF_BACKWARD)
def test_fault_in_backward_is_caught(fault, plant):
    plant(backward.KERNEL, *OF_BACKWARD[fault])
    assert faults_found(BACKWARD)
