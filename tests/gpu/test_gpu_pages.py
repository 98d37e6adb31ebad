"""Prefill over pages: on Hopper, pages that divide a tile of keys are copied in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import reference, request
from pyfa.conformance.tolerances import judge
from pyfa.request import Shared

LENGTHS = (1, 517, 1500, 2047)  # all end inside a page
CAPACITY = 2304  # whole pages of every size


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_of_every_size(backend: str, dim: int) -> None:
    """With batch_invariant they give the bits of a dense cache, without it values within the rule.
    Blocks are so many that each goes through its chunks. Whatever is unused is NaN."""
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(4, 100, 18, dim, **where)
    k, v = (torch.randn(4, CAPACITY, 2, dim, **where) for _ in range(2))
    used = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    unused = torch.arange(CAPACITY, device="cuda") >= used[:, None]
    options: dict[str, Any] = {"cache_seqlens": used, "causal": True, "return_lse": True}

    cpu = (q.cpu(), *(x.masked_fill(unused[..., None, None], 0.0).cpu() for x in (k, v)))
    asked = request.kvcache(*cpu, Shared(causal=True), cache_seqlens=used.cpu()).call
    exact, naive = (reference.attention(asked, dtype=x)[0] for x in (torch.float64, q.dtype))

    k[unused] = v[unused] = torch.nan
    options["backend"] = backend
    dense = pyfa.attention_kvcache(q, k, v, batch_invariant=True, **options)
    for size in (8, 16, 32, 48, 64):
        count = 4 * CAPACITY // size
        order = torch.randperm(2 * count, device="cuda")[:count]
        caches = [torch.full((2 * count, size, 2, dim), torch.nan, **where) for _ in range(2)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[order] = x.view(count, size, 2, dim)
        options["page_table"] = order.int().view(4, -1)
        same = pyfa.attention_kvcache(q, *caches, batch_invariant=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(same, dense, strict=True)), size
        out, _ = pyfa.attention_kvcache(q, *caches, **options)
        for found in (same[0], out):
            assert judge("out", found.cpu(), exact, naive).message == "", size
