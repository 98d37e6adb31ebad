"""Shapes that went wrong on a GPU, where the interpreter shows nothing."""

from __future__ import annotations

import pytest
import torch
from held import attention_failures

import pyfa
from pyfa.backends import BACKENDS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(96, 1), (59, 1), (111, 8), (64, 8), (128, 8), (40, 15), (256, 2), (17, 1)]
)
def test_values_narrower_than_a_tile(
    backend: str, dim: int, dim_v: int, dtype: torch.dtype
) -> None:
    if str(dtype).removeprefix("torch.") not in BACKENDS[backend].DTYPES:
        pytest.skip(f"{backend} has no {dtype}")
    where = {"device": "cuda", "dtype": dtype}
    q, k = (torch.randn(2, 130, 4, dim, **where) for _ in range(2))
    v, dout = (torch.randn(2, 130, 4, dim_v, **where) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = pyfa.attention(*leaves, causal=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    assert attention_failures(q, k, v, found, dout, causal=True) == []


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "heads", "dim", "causal"),
    [
        (64, 197, 197, 12, 64, False), (32, 257, 257, 16, 64, False), (128, 50, 50, 12, 64, False),
        (64, 77, 77, 12, 64, True), (32, 250, 250, 12, 64, False), (1, 509, 509, 16, 64, True),
        (2, 999, 77, 20, 64, False), (3, 190, 190, 30, 40, True), (1, 1000, 1000, 8, 128, True),
        (4, 131, 131, 8, 112, False),
    ],
)  # fmt: skip
def test_tiles_that_follow_from_the_grid(
    backend: str, batch: int, rows: int, keys: int, heads: int, dim: int, causal: bool
) -> None:
    """Hopper's forward has other tiles for them; what lies behind each sequence is NaN."""
    where = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, dout = (
        torch.full((batch, length + 40, heads, dim), torch.nan, **where)[:, :length]
        for length in (rows, keys, keys, rows)
    )
    for x in (q, k, v, dout):
        x.copy_(torch.randn_like(x))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = pyfa.attention(*leaves, causal=causal, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    for some in (slice(0, 1), slice(batch - 1, batch)):
        given = {name: x[some] for name, x in found.items()}
        held = (q[some], k[some], v[some], given, dout[some])
        assert attention_failures(*held, causal=causal) == []


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_short_sequences_of_grouped_heads_with_gaps(backend: str, dim: int) -> None:
    """Tiles that reach beyond a sequence follow one another when each head has only one, and what
    lies beyond is NaN."""
    stored = [(100, 130), (257, 300), (64, 128), (300, 200), (1, 3), (20, 70)]
    used = [(90, 100), (250, 300), (3, 120), (0, 10), (1, 3), (20, 3)]
    starts, lengths = (
        [torch.tensor(each, dtype=torch.int32, device="cuda") for each in zip(*pairs, strict=True)]
        for pairs in ([(0, 0), *stored], used)
    )
    starts = [torch.cumsum(each, 0, dtype=torch.int32) for each in starts]
    rows, keys = (int(each[-1]) for each in starts)
    where = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = (torch.full((rows, 8, dim), torch.nan, **where) for _ in range(2))
    k, v = (torch.full((keys, 2, dim), torch.nan, **where) for _ in range(2))
    spans = []
    for number, (row_count, key_count) in enumerate(used):
        row, key = (int(each[number]) for each in starts)
        spans.append((slice(row, row + row_count), slice(key, key + key_count)))
        for x, span in (
            (q, spans[-1][0]),
            (dout, spans[-1][0]),
            (k, spans[-1][1]),
            (v, spans[-1][1]),
        ):
            x[span] = torch.randn_like(x[span])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = pyfa.attention_varlen(
        *leaves, *starts, 300, 300, seqused_q=lengths[0], seqused_k=lengths[1], causal=True,
        backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, dout)
    for number, (of_rows, of_keys) in enumerate(spans):
        if used[number][0]:
            found = {"out": out[of_rows][None], "dq": grads[0][of_rows][None]}
            found |= {"dk": grads[1][of_keys][None], "dv": grads[2][of_keys][None]}
            given = q[of_rows][None], k[of_keys][None], v[of_keys][None]
            assert attention_failures(*given, found, dout[of_rows][None], causal=True) == []


@pytest.mark.parametrize(("heads_q", "heads_k"), [(16, 16), (13, 13), (24, 24), (20, 5), (7, 1)])
def test_sections_of_the_heads_of_a_long_packed_sequence(
    backend: str, heads_q: int, heads_k: int
) -> None:
    """Of a long sequence, Hopper's forward takes some heads at a time (packed.h)."""
    lengths = [9000, 500, 7001]
    where = {"device": "cuda", "dtype": torch.bfloat16}
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), n, 128, **where) for n in (heads_q, heads_k, heads_k))
    torch.full_like(q, torch.nan)  # what the output's memory holds before
    given = {"causal": True, "backend": backend}
    found = pyfa.attention_varlen(q, k, v, offsets, offsets, 9000, 9000, **given)
    for x, *one in zip(*(x.split(lengths) for x in (found, q, k, v)), strict=True):
        expected = pyfa.attention(*(y[None] for y in one), **given)[0]
        torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-2)
