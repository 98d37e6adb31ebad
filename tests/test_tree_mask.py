"""``tree_mask`` of ``attention_kvcache``: what it means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import reference, request


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PARENT = [-1, 0, 0, 1, 1, 2]  # of each drafted token


def ancestors() -> torch.Tensor:
    seen = torch.eye(len(PARENT), dtype=torch.bool)
    for token, before in enumerate(PARENT):
        if before >= 0:
            seen[token] |= seen[before]
    return seen


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_drafted_token_sees_its_own_branch(backend: str, page_size: int) -> None:
    torch.manual_seed(0)
    dtype, rows = torch.bfloat16, len(PARENT)
    q, k, v = (torch.randn(2, rows, n, 64).to(dtype) for n in (8, 2, 2))
    caches, used = torch.randn(2, 2, 48, 2, 64).to(dtype), ints(40, 7)
    where: dict[str, Any] = {}
    if page_size:
        where["page_table"] = torch.arange(6).int().view(2, 3)
        caches = caches.reshape(2, 6, page_size, 2, 64)
    options: dict[str, Any] = {"return_lse": True, "backend": backend}
    out, lse = pyfa.attention_kvcache(
        q, *caches.clone(), k=k, v=v, cache_seqlens=used, tree_mask=ancestors(), **where, **options
    )
    dense = caches.reshape(2, 2, 48, 2, 64)
    for b, context in enumerate(used.tolist()):
        for branch in ([0, 1, 3], [0, 1, 4], [0, 2, 5]):
            rows_k, rows_v = (
                torch.cat([cache[b : b + 1, :context], new[b : b + 1, branch]], 1)
                for cache, new in zip(dense, (k, v), strict=True)
            )
            alone, alone_lse = pyfa.attention(
                q[b : b + 1, branch], rows_k, rows_v, causal=True, **options
            )
            torch.testing.assert_close(out[b : b + 1, branch], alone)
            torch.testing.assert_close(lse[b : b + 1, :, branch], alone_lse)


def test_the_reference_takes_it_as_a_bias_over_all_keys() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 2, 8), torch.randn(2, 9, 2, 8)
    mask = torch.rand(2, 5, 5) < 0.5
    call = request.kvcache(q, k, k, request.Shared(), tree_mask=mask).call
    seen = torch.ones(2, 1, 5, 9, dtype=torch.bool)
    seen[..., 4:] = mask[:, None]
    wanted = call._replace(bias=seen, tree=False)
    for x, y in zip(reference.attention(call), reference.attention(wanted), strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(reference.attention(call)[0], reference.attention(call._replace(
        bias=torch.ones_like(mask)))[0])  # fmt: skip


@pytest.mark.parametrize("layout", ["shared", "strided", "one for all"])
def test_any_layout(layout: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 2, 8), torch.randn(3, 9, 2, 8)
    mask = torch.rand(3, 4, 4) < 0.5
    given = {
        "shared": mask[:1].expand(3, -1, -1), "strided": mask.mT, "one for all": mask[0],
    }[layout]  # fmt: skip
    same = mask.mT.contiguous() if layout == "strided" else mask[0].repeat(3, 1, 1)
    for backend in ("torch", "emulator"):
        half = (x.bfloat16() for x in (q, k, k))
        a, b = (x.bfloat16() for x in (q, k))
        found = pyfa.attention_kvcache(*half, tree_mask=given, backend=backend)
        want = pyfa.attention_kvcache(a, b, b, tree_mask=same, backend=backend)
        assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree_mask": torch.ones(4, 4)}, "tree_mask: expected dtype bool"),
        ({"tree_mask": torch.ones(4, 5, dtype=torch.bool)}, r"shape \(2, 4, 4\) or \(4, 4\)"),
        ({"tree_mask": torch.ones(3, 4, 4, dtype=torch.bool)}, r"shape \(2, 4, 4\) or \(4, 4\)"),
        ({"bias": torch.zeros(4, 9)}, "tree_mask: expected None with bias"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    q, k = torch.randn(2, 4, 2, 8), torch.randn(2, 9, 2, 8)
    given = {"tree_mask": torch.ones(2, 4, 4, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        pyfa.attention_kvcache(q, k, k, **given)


@pytest.mark.parametrize("device", ["H200", "MI300X"])
def test_speculative_rows_stay_on_decode(device: str) -> None:
    """Up to 16 rows of each sequence, whatever the group. On Hopper more than 32 rows of a KV head
    run on the forward, whose blocks then have the rows of all its heads, except with tree_mask."""

    def kernel(rows: int, heads_k: int, **options: Any) -> str:
        q, k = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((8, rows, 64, 128), (8, 8192, heads_k, 128))
        )
        lengths = torch.empty(8, dtype=torch.int32, device="meta")
        told = pyfa.explain(q, k, k, cache_seqlens=lengths, device=device, **options)
        name = "hip" if device == "MI300X" else "cuda"
        (plan,) = (answer.plan for answer in told.answers if answer.backend == name)
        assert plan is not None
        return plan.kernel.rsplit("/", 1)[-1].split(".")[0]

    mask = torch.empty(16, 16, dtype=torch.bool, device="meta")
    for heads_k in (1, 8, 16):
        grouped = "attn_decode" if device == "MI300X" else "attn_fwd"
        assert kernel(16, heads_k, causal=True) == grouped
        assert kernel(16, heads_k, tree_mask=mask) == "attn_decode"
        assert kernel(17, heads_k, causal=True) == "attn_fwd"
    assert kernel(16, 64) == "attn_decode"
    assert kernel(64, 64) == "attn_fwd"
