"""``compat.flash_mla``: FlashMLA's conventions against plain float64 attention, and its tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pyfa.compat import flash_mla

HEADS, SIZE = 3, 8


def paged(lengths: list[int], dim: int = 576) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages with NaN wherever no sequence has a token, their table, and the lengths."""
    torch.manual_seed(0)
    pages = [-(-n // SIZE) for n in lengths]
    cache = torch.full((sum(pages) + 1, SIZE, 1, dim), torch.nan)
    table = torch.full((len(lengths), max(pages)), 2147480000, dtype=torch.int32)
    order = torch.randperm(sum(pages) + 1).tolist()
    for b, n in enumerate(lengths):
        for place in range(n):
            page = order[sum(pages[:b]) + place // SIZE]
            table[b, place // SIZE] = page
            cache[page, place % SIZE] = torch.randn(1, dim)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def plain(
    q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: out (H, 512) with the sink's share, LSE (H,) without."""
    if not keys.shape[0]:
        return torch.zeros(q.shape[0], 512), torch.full((q.shape[0],), math.inf)
    scores = q.double() @ keys.double().T * scale
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1) @ keys[:, :512].double()
    if sink is not None:
        out = out / (1 + (sink.double() - lse).exp())[:, None]
    return out.float(), lse.float()


def test_dense_with_zero_lengths_and_their_lse() -> None:
    cache, table, used = paged([17, 0, 1])
    q = torch.randn(3, 2, HEADS, 576)
    meta, none = flash_mla.get_mla_metadata(used, 2 * HEADS, 1)
    assert none is None
    for causal in (False, True):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, cache, table, used, 512, meta, None, causal=causal
        )
        for b, n in enumerate(used.tolist()):
            rows = cache[table[b, : -(-n // SIZE)].long()].flatten(0, 2)
            for i in range(2):
                seen = max(0, n - 1 + i) if causal else n
                want, want_lse = plain(q[b, i], rows[:seen], 576**-0.5, None)
                torch.testing.assert_close(out[b, i], want)
                torch.testing.assert_close(lse[b, :, i], want_lse)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_lists_with_sinks_and_extra_tokens(float8: bool, extra: bool) -> None:
    cache, _, _ = paged([40])
    cache = cache.bfloat16()
    whole = cache.view(-1, 576)
    tokens: Any = cache
    if float8:
        tokens = flash_mla.quantize_tokens(cache.nan_to_num())
        whole = flash_mla.dequantize_tokens(tokens).view(-1, 576)
    q = torch.randn(2, 2, HEADS, 576).bfloat16()
    known = torch.nonzero(~cache.view(-1, 576)[:, 0].isnan())[:, 0].int()
    lists = known[torch.randint(0, len(known), (2, 2, 12))]
    lists[..., 3] = -1
    lists[1, 1] = -1
    lists[..., 5] = lists[..., 4]  # counts twice
    ends = torch.tensor([9, 12], dtype=torch.int32)
    sink = torch.tensor([0.5, math.inf, -math.inf])
    more: dict[str, Any] = {}
    if extra:
        more = {"extra_k_cache": tokens, "extra_indices_in_kvcache": lists.flip(-1)[..., :5]}
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, tokens, None, None, 512, flash_mla.get_mla_metadata()[0], None, 0.1, False, float8,
        lists, sink, topk_length=ends, **more,
    )  # fmt: skip
    for b in range(2):
        for i in range(2):
            named = [n for n in lists[b, i, : ends[b]].tolist() if n >= 0]
            if extra:
                named += [n for n in lists[b, i].flip(-1)[:5].tolist() if n >= 0]
            want, want_lse = plain(q[b, i], whole[named], 0.1, sink)
            torch.testing.assert_close(out[b, i], want.bfloat16())
            torch.testing.assert_close(lse[b, :, i], want_lse)


def test_sparse_prefill() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(5, HEADS, 576), torch.randn(30, 1, 576)
    lists = torch.randint(-2, 34, (5, 1, 11), dtype=torch.int32)
    ends = torch.tensor([11, 0, 4, 11, 1], dtype=torch.int32)
    sink = torch.randn(HEADS)
    out, top, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.05, 512, sink, ends)
    for i in range(5):
        named = [n for n in lists[i, 0, : ends[i]].tolist() if 0 <= n < 30]
        want, want_lse = plain(q[i], kv[named, 0], 0.05, sink)
        torch.testing.assert_close(out[i], want)
        torch.testing.assert_close(lse[i], want_lse)
        largest = (q[i] @ kv[named, 0].T * 0.05).amax(-1) if named else torch.full((3,), -math.inf)
        torch.testing.assert_close(top[i], largest)


def test_tokens_bit_by_bit() -> None:
    """Every byte of e4m3fn, times scales that are powers of two, as FlashMLA's kernels read it."""
    every = torch.arange(256, dtype=torch.uint8)
    token = torch.zeros(2, 656, dtype=torch.uint8)
    token[:, :512] = torch.cat((every, every.flip(0)))
    scales = torch.tensor([[1.0, 0.5, 4.0, 2.0**-10], [2.0, 1.0, 0.25, 8.0]])
    token[:, 512:528] = scales.view(torch.uint8)
    rope = torch.randn(2, 64).bfloat16()
    token[:, 528:] = rope.view(torch.uint8)
    found = flash_mla.dequantize_tokens(token)

    def value(byte: int) -> float:
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        if (exponent, mantissa) == (15, 7):
            return math.nan
        size = mantissa * 2.0**-9 if not exponent else (8 + mantissa) * 2.0 ** (exponent - 10)
        return -size if sign else size

    want = torch.tensor([[value(b) for b in row] for row in token[:, :512].tolist()])
    want = (want * scales.repeat_interleave(128, 1)).bfloat16()
    assert torch.equal(found[:, :512].isnan(), want.isnan())
    assert torch.equal(found[:, :512].nan_to_num(), want.nan_to_num())
    assert torch.equal(found[:, 512:], rope)
    numbers = found.nan_to_num()
    # What came from tokens goes back into the same numbers.
    again = flash_mla.dequantize_tokens(flash_mla.quantize_tokens(numbers))
    assert torch.equal(again, numbers)
    as_e4m3 = token.view(torch.float8_e4m3fn)
    assert torch.equal(flash_mla.dequantize_tokens(as_e4m3).nan_to_num(), numbers)


def test_tokens_of_584_bytes() -> None:
    """Two pages of three tokens, padded: 448 float8 and 64 bfloat16 each, then all their scales."""
    torch.manual_seed(0)
    size, used = 3, 3 * 584
    pages = torch.zeros(2, used + 24, dtype=torch.uint8)
    want = torch.randn(2, size, 512).to(torch.float8_e4m3fn).float()
    exponents = torch.randint(120, 132, (2, size, 7), dtype=torch.uint8)
    tokens = pages[:, : size * 576].view(2, size, 576)
    tokens[..., :448] = want[..., :448].to(torch.float8_e4m3fn).view(torch.uint8)
    tokens[..., 448:] = want[..., 448:].bfloat16().view(torch.uint8)
    pages[:, size * 576 : used].view(2, size, 8)[..., :7] = exponents
    want[..., :448] *= torch.exp2(exponents.float() - 127).repeat_interleave(64, -1)
    cache = pages[:, :used].view(2, size, 1, 584)
    q = torch.randn(1, 1, HEADS, 512).bfloat16()
    lists = torch.tensor([[[5, 0, -1, 2]]], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, None, None, 0.1, False, True, lists
    )
    keys = want.view(6, 512)[[5, 0, 2]]
    found, found_lse = plain(q[0, 0], keys, 0.1, None)
    torch.testing.assert_close(out[0, 0], found.bfloat16())
    torch.testing.assert_close(lse[0, :, 0], found_lse)


def test_scales_are_those_of_the_format() -> None:
    x = torch.zeros(1, 576).bfloat16()
    x[0, 0], x[0, 128], x[0, 256] = 449.0, 448.0, 1e-6
    scales = flash_mla.quantize_tokens(x)[:, 512:528].contiguous().view(torch.float32)
    assert scales.tolist() == [[2.0 if float(x[0, 0]) > 448 else 1.0, 1.0, 2.0**-13, 2.0**-13]]


def test_what_is_refused_says_why() -> None:
    cache, table, used = paged([3])
    q = torch.randn(1, 1, HEADS, 576)
    lists = torch.zeros(1, 1, 4, dtype=torch.int32)
    call = flash_mla.flash_mla_with_kvcache
    other = torch.zeros(1, 8, 1, 580, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match=r"^is_fp8_kvcache: float8 without indices"):
        call(q, cache, table, used, 512, is_fp8_kvcache=True)
    with pytest.raises(RuntimeError, match=r"^k_cache: expected 656 or 584 bytes a token"):
        call(q, other, None, None, 512, is_fp8_kvcache=True, indices=lists)
    with pytest.raises(RuntimeError, match=r"^causal: expected False with indices"):
        call(q, cache, None, None, 512, causal=True, indices=lists)
    with pytest.raises(RuntimeError, match=r"^topk_length: expected None without indices"):
        call(q, cache, table, used, 512, topk_length=used)
    with pytest.raises(RuntimeError, match=r"^attn_sink: expected shape \(3,\)"):
        call(q, cache, table, used, 512, attn_sink=torch.zeros(4))
