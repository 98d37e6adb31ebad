"""What breaks 32-bit offsets, 16-bit grids and generous buffers: very large problems."""

from __future__ import annotations

import pytest
import torch
from held import attention_failures

import pyfa

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def room(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free:.0f} GB are free")


def test_more_than_two_to_the_31_elements_forward_and_backward(backend: str) -> None:
    """One head of 4.3 GB. A window makes of the last rows a small problem by themselves."""
    room(60)
    rows, seen, last = (1 << 24) + 4096, 63, 200
    q, k, v = (torch.randn(1, rows, 1, 128, **BF16).requires_grad_() for _ in range(3))
    assert q.numel() > 1 << 31
    options = {"causal": True, "window": (seen, 0)}
    out = pyfa.attention(q, k, v, backend=backend, **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    # Earlier rows see keys of the slice too, so that only the last keys' gradients are whole.
    ends = {name: x[:, -last:] for name, x in found.items()}
    sliced = [x[:, -last - seen :] for x in (q, k, v, dout)]
    assert attention_failures(*sliced[:3], ends, sliced[3], **options) == []


def test_pages_beyond_two_to_the_31_elements(backend: str) -> None:
    room(20)
    pages, page = 33_000, 64
    k_cache, v_cache = (torch.zeros(pages, page, 8, 128, **BF16) for _ in range(2))
    assert k_cache.numel() > 1 << 31
    for cache in (k_cache, v_cache):
        cache[-32:].normal_()
    table = torch.arange(pages - 32, pages, dtype=torch.int32, device="cuda").view(2, 16)
    used = torch.tensor([700, 1024], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 3, 32, 128, **BF16)
    options = {"cache_seqlens": used, "causal": True, "backend": backend}
    far = pyfa.attention_kvcache(q, k_cache, v_cache, page_table=table, **options)
    small = [cache[-32:].clone() for cache in (k_cache, v_cache)]
    near = pyfa.attention_kvcache(q, *small, page_table=table - (pages - 32), **options)
    assert torch.equal(far, near)
    assert bool(near.any())


def test_more_heads_fit_the_l2_cache_than_there_are(backend: str) -> None:
    """One key takes so little of it that the heads that fit, times the blocks of a head, are a
    multiple of 2^32: the number of heads that run side by side must be cut to those there are."""
    q = torch.randn(1, 49_152, 64, 8, **BF16)
    k, v = (torch.randn(1, 1, 1, 8, **BF16) for _ in range(2))
    out = pyfa.attention(q, k, v, backend=backend)
    assert torch.equal(out, v.expand_as(out))


def test_more_pairs_of_sequence_and_head_than_a_grid_axis_has(backend: str) -> None:
    batch, heads = 16_400, 8
    assert batch * heads > 1 << 16
    q, k, v = (torch.randn(batch, 16, heads, 32, **BF16).requires_grad_() for _ in range(3))
    out = pyfa.attention(q, k, v, causal=True, backend=backend)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    ends = {name: x[-3:] for name, x in found.items()}
    assert attention_failures(q[-3:], k[-3:], v[-3:], ends, dout[-3:], causal=True) == []


def test_millions_of_rows_on_one_key(backend: str) -> None:
    """All heads whose keys fit the L2 are walked through together: their number times the blocks
    of rows, 15 times 2^32 for an L2 of 60 MB, was a divisor in 32 bits."""
    rows = 1 << 22
    q, k, v = torch.randn(1, rows, 2, 8, **BF16), *torch.randn(2, 1, 1, 2, 8, **BF16)
    out = pyfa.attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(out[:, -1], v[:, -1])
    assert not bool(out[:, :-1].any())


def test_a_long_training_step_needs_no_more_than_its_tensors(backend: str) -> None:
    """1 x 131,072 x 16 x 128, forward and backward, within 1.3 times the bytes of q, k, v, out and
    their gradients."""
    room(12)
    shape = (1, 131_072, 16, 128)
    warm = [torch.randn(1, 256, 16, 128, **BF16).requires_grad_() for _ in range(3)]
    pyfa.attention(*warm, causal=True, backend=backend).sum().backward()
    del warm
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, k, v = (torch.randn(shape, **BF16).requires_grad_() for _ in range(3))
    out = pyfa.attention(q, k, v, causal=True, backend=backend)
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tensors = 8 * q.numel() * q.element_size()
    print(f"peak {peak / 1e9:.3f} GB, {peak / tensors:.3f} x q, k, v, out and their gradients")
    assert peak <= 1.3 * tensors
