"""``qv`` of flash-attention 3 and 4 against the sum of two products, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import problem
from pyfa.compat import fa3, fa4, query_values

D, DV, HEADS = 64, 256, 6


def expected(
    q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE (B, H, Sq): scores are (q·k + qv·v) / √(D + Dv)."""
    group = q.shape[2] // k.shape[2]
    q, qv, k, v = (x.double().transpose(1, 2) for x in (q, qv, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT + qv @ v.mT) * (q.shape[-1] + v.shape[-1]) ** -0.5
    if causal:
        shape, behind = scores.shape[-2:], scores.shape[-1] - scores.shape[-2] + 1
        scores = scores.masked_fill(torch.ones(shape).triu(behind).bool(), -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores.softmax(-1) @ v).transpose(1, 2).float(), lse.float()


def inputs(rows: int = 3, keys: int = 20, heads_k: int = 1, one: bool = False) -> Any:
    torch.manual_seed(0)
    q, qv = torch.randn(2, rows, HEADS, D), torch.randn(2, rows, HEADS, DV)
    if one:
        cache = torch.randn(2, keys, heads_k, DV + D)
        return q, qv, cache[..., DV:], cache[..., :DV]
    return q, qv, torch.randn(2, keys, heads_k, D), torch.randn(2, keys, heads_k, DV)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("heads_k", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_and_packed(one: bool, heads_k: int, causal: bool) -> None:
    q, qv, k, v = inputs(heads_k=heads_k, one=one)
    want, want_lse = expected(q, qv, k, v, causal)
    starts_q, starts_k = (torch.arange(3, dtype=torch.int32) * x.shape[1] for x in (q, k))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    options: dict[str, Any] = {"causal": causal}
    lengths = starts_q, starts_k, 3, 20
    for out, lse in (
        fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **options),
        fa4.flash_attn_func(q, k, v, qv, return_lse=True, **options),
        fa4.flash_attn_varlen_func(q, k, v, qv, return_lse=True, **options),
    ):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
    options["qv"] = qv.flatten(0, 1)
    for out, lse in (
        fa3.flash_attn_varlen_func(*packed, *lengths, return_attn_probs=True, **options),
        fa4.flash_attn_varlen_func(
            *packed, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, return_lse=True, **options
        ),
    ):
        torch.testing.assert_close(out, want.flatten(0, 1))
        torch.testing.assert_close(lse, want_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("one", [False, True])
def test_cache_with_pages_new_keys_and_rotary(one: bool) -> None:
    q, qv, k, v = inputs(rows=2, keys=20, one=one)
    new_k, new_v = torch.randn(2, 2, 1, D), torch.randn(2, 2, 1, DV)
    angle = torch.randn(32, D // 2)
    used = torch.tensor([10, 4], dtype=torch.int32)
    tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False}
    k, v = (k, v) if one else (k.clone(), v.clone())
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, new_k, new_v, qv, cache_seqlens=used, causal=True, return_softmax_lse=True,
        **tables,
    )  # fmt: skip

    def turned(x: torch.Tensor, start: int) -> torch.Tensor:
        c, s = (table[start : start + x.shape[0]][:, None] for table in (angle.cos(), angle.sin()))
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    for b, n in enumerate(used.tolist()):
        torch.testing.assert_close(k[b, n : n + 2], turned(new_k[b], n))
        assert torch.equal(v[b, n : n + 2], new_v[b])
        one_q = turned(q[b], n)[None]
        want, want_lse = expected(
            one_q, qv[b : b + 1], k[b : b + 1, : n + 2], v[b : b + 1, : n + 2], True
        )
        torch.testing.assert_close(out[b], want[0])
        torch.testing.assert_close(lse[b], want_lse[0])


# Arguments of ``flash_attn_with_kvcache`` for two sequences of two rows over a cache of 90 keys.
PLAIN: dict[str, Any] = {
    "cache_seqlens": torch.tensor([90, 33], dtype=torch.int32), "causal": True
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "window": {"causal": False, "window_size": (20, 3)},
    "chunk": {"attention_chunk": 16},
    "leftpad": {"cache_leftpad": torch.tensor([3, 30], dtype=torch.int32)},
    "batch index": {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)},
    "packed": {"cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32), "max_seqlen_q": 3},
}


@pytest.mark.parametrize("heads", [16, 100])  # of decode, and of the kernel for many rows
@pytest.mark.parametrize("feature", OPTIONS)
def test_emulated_kernels_have_the_options(feature: str, heads: int) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16
    cache, q = torch.randn(2, 90, 1, 576).to(dtype), torch.randn(2, 2, heads, 576).to(dtype)
    options = PLAIN | OPTIONS[feature]

    def run(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
        whole, keys = q.to(dtype), cache.to(dtype)
        if "cu_seqlens_q" in options:
            whole = whole.flatten(0, 1)
        with pyfa.use_backend(backend):
            return fa3.flash_attn_with_kvcache(
                whole[..., 512:], keys[..., 512:], keys[..., :512], qv=whole[..., :512],
                return_softmax_lse=True, **options,
            )[:2]  # fmt: skip

    out, lse = run("emulator", dtype, options)
    want, want_lse = run("torch", torch.float32, options)
    # An output is a mean of values of about 1, rounded to 8 bits.
    torch.testing.assert_close(out.float(), want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)
    if feature != "plain":  # a kernel that ignores the option would fail
        plain, _ = run("torch", torch.float32, PLAIN)
        assert (plain.flatten() - want.flatten()).abs().max() > 0.1


def test_parts_of_one_cache_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[problem.Call] = []
    monkeypatch.setattr(
        query_values.binding, "attend", lambda asked: seen.append(asked.call) or torch.zeros(1)
    )
    for one in (False, True):
        q, qv, k, v = inputs(one=one)
        for call in (
            lambda: fa3.flash_attn_func(q, k, v, qv=qv),  # noqa: B023
            lambda: fa3.flash_attn_with_kvcache(q, k, v, qv=qv),  # noqa: B023
        ):
            call()
            assert seen[-1].latent
            assert seen[-1].k.shape[-1] == D + DV
            assert (seen[-1].k.data_ptr() == v.data_ptr()) is one
            assert seen[-1].v.data_ptr() == seen[-1].k.data_ptr()


def test_gradients_flow() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    q, qv, k, v = leaves
    out = fa3.flash_attn_func(q, k, v, qv=qv, causal=True)
    flow = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, flow)
    scores = (torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0])
              + torch.einsum("bqhd,bkd->bhqk", qv, v[:, :, 0])) * (D + DV) ** -0.5  # fmt: skip
    scores = scores.masked_fill(torch.ones(3, 20).triu(18).bool(), -torch.inf)
    want = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v[:, :, 0])
    for x, y in zip(got, torch.autograd.grad(want, leaves, flow), strict=True):
        torch.testing.assert_close(x, y)


def test_float8_scales_of_k_and_v_may_differ() -> None:
    q, qv, k, v = inputs(rows=1)
    low = [(x * 0.5).to(torch.float8_e4m3fn) for x in (q, qv, k, v)]
    scales = [torch.tensor(x).view(2, 1) for x in ([0.5, 2.0], [4.0, 0.25], [1.0, 0.5])]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = fa3.flash_attn_func(low[0], low[2], low[3], qv=low[1], **names)
    of_q, of_k, of_v = (x[:, None, :, None] for x in scales)
    exact = [low[0].float() * of_q, low[1].float() * of_q, low[2].float() * of_k,
             low[3].float() * of_v]  # fmt: skip
    want, _ = expected(*exact)
    assert out.dtype == torch.bfloat16
    # Scales are powers of two, which bfloat16 queries take in exactly.
    torch.testing.assert_close(out, want.bfloat16())


def test_wrong_shapes_are_named() -> None:
    q, qv, k, v = inputs()
    with pytest.raises(RuntimeError, match=r"^qv: expected shape \(2, 3, 6, 256\)"):
        fa3.flash_attn_func(q, k, v, qv=qv[:1])
    with pytest.raises(RuntimeError, match=r"^k: expected q's head_dim"):
        fa3.flash_attn_func(q, k[..., :32], v, qv=qv)
    with pytest.raises(RuntimeError, match=r"^qv: expected shape \(2, 3, 6, 256\)"):
        fa4.flash_attn_func(q, k, v, qv.half())
