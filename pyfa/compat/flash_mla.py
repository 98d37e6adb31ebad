"""FlashMLA's interface (``import flash_mla``), implemented with pyfa.

    from pyfa.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

Signatures, defaults, return values and conventions are those of ``flash_mla``:

- The LSE of a fully masked row is +inf.
- ``attn_sink`` scales the output and does not change the LSE. pyfa scales the 16-bit output, which
  is therefore rounded twice.
- A key listed twice in ``indices`` counts twice.
- ``softmax_scale`` is 1/√head_dim by default, which is not the scale of DeepSeek's models.

pyfa also supports CPUs, any number of heads, any page size, and ``indices`` over 16-bit caches.

Float8 caches have one of two formats:

- 656 bytes per token (DeepSeek-V3.2): 512 e4m3 elements, four float32 scales for 128 elements each,
  and 64 bfloat16 elements.
- 584 bytes per token: 448 e4m3 and 64 bfloat16 elements, and 8 bytes of scales. The scales follow
  the last token of a page: for each token 7 scales (powers of two, for 64 elements each) and an
  unused byte.

Float8 without ``indices`` raises ``NotImplementedError``. With a float8 cache, or with
``extra_k_cache``, the listed tokens are copied before attention; the copies of float8 tokens are
bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import binding, latent, request, validate
from .errors import ArgumentError, in_words_of, refuse

__all__ = [
    "ArgumentError",
    "FlashMLASchedMeta",
    "dequantize_tokens",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "quantize_tokens",
]

_DIM, _DIM_V, _TILE, _TOKEN_BYTES = 576, 512, 128, 656
_SCALES_AT, _ROPE_AT = 512, 528
# The other layout: 448 elements in float8 and 64 not, whose scales stand behind a page's tokens.
_PAGED_BYTES, _PAGED_TOKEN, _PAGED_TILE, _PAGED_NOPE, _PAGED_SCALES = 584, 576, 64, 448, 7
_LARGEST = 448.0  # of e4m3fn
_CHUNK_BYTES = 1 << 28  # of gathered keys, where a row's largest score is asked for
_BYTES = (torch.float8_e4m3fn, torch.uint8, torch.int8)

_in_their_words = in_words_of(
    sinks="attn_sink", topk_lengths="topk_length", page_table="block_table", cache="k_cache",
    v_dim="head_dim_v",
)  # fmt: skip


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The result of ``get_mla_metadata``: empty, because pyfa's kernels read the lengths."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return (a ``FlashMLASchedMeta``, None), as FlashMLA does; arguments are ignored."""
    return FlashMLASchedMeta(), None


@_in_their_words
@torch.no_grad()
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q (B, Sq, H, D) over pages k_cache (blocks, page_block_size, Hk, D).

    Without ``indices``, a sequence's keys are the first ``cache_seqlens[b]`` tokens of its pages.
    ``cache_seqlens`` is (B,) int32; ``block_table`` is (B, pages) int32.

    ``indices`` (B, Sq, topk) int32 lists the keys of each query token instead; Hk must then be 1.
    An entry is block · page_block_size + offset. Negative entries and entries beyond the end of the
    cache list no key. Only the first ``topk_length`` (B,) entries count. ``block_table`` and
    ``cache_seqlens`` are ignored.

    ``extra_k_cache`` with ``extra_indices_in_kvcache`` adds tokens of another cache; of these
    entries, only the first ``extra_topk_length`` (B,) count. ``tile_scheduler_metadata`` and
    ``num_splits`` are always ignored.

    Returns (out (B, Sq, H, head_dim_v), softmax_lse (B, H, Sq) float32).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        for name, x in (
            ("extra_k_cache", extra_k_cache),
            ("extra_indices_in_kvcache", extra_indices_in_kvcache),
            ("topk_length", topk_length), ("extra_topk_length", extra_topk_length),
        ):  # fmt: skip
            if x is not None:
                validate.wrong(name, "None without indices", x)
        refuse(
            "is_fp8_kvcache", is_fp8_kvcache or None, "float8 without indices is not implemented"
        )
        shared = request.Shared(causal=causal, scale=scale, return_lse=True)
        asked = request.kvcache(
            q, k_cache, k_cache[..., :head_dim_v], shared, cache_seqlens=cache_seqlens,
            page_table=block_table, latent=True,
        )  # fmt: skip
        return _in_their_convention(*_both(binding.attend(asked)), attn_sink)
    if causal:
        validate.wrong("causal", "False with indices", causal)
    if extra_k_cache is None and not is_fp8_kvcache:
        # Pages in their own order: what counts in a sequence counts in memory.
        table = torch.arange(k_cache.shape[0], dtype=torch.int32, device=q.device)
        return _in_their_convention(*_both(latent.attention_latent(
            q, k_cache, v_dim=head_dim_v, page_table=table.expand(q.shape[0], -1),
            indices=indices, topk_lengths=topk_length, scale=scale, return_lse=True,
        )), attn_sink)  # fmt: skip
    found = [_gathered(k_cache, indices, topk_length, is_fp8_kvcache)]
    if extra_k_cache is not None:
        if extra_indices_in_kvcache is None:
            validate.wrong("extra_indices_in_kvcache", "the keys of extra_k_cache", None)
        found.append(
            _gathered(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, is_fp8_kvcache)
        )
    tokens, exist = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    own = torch.arange(exist[0].numel(), dtype=torch.int32, device=q.device).view_as(exist[0])
    out, lse = _both(latent.attention_latent(
        q, tokens.flatten(1, 2)[:, :, None], v_dim=head_dim_v, scale=scale, return_lse=True,
        indices=own.where(exist, -1).int(),
    ))  # fmt: skip
    return _in_their_convention(out, lse, attn_sink)


@_in_their_words
@torch.no_grad()
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of q (Sq, H, D) over those rows of kv (Sk, 1, D) that ``indices`` lists.

    ``indices`` is (Sq, 1, topk). Entries that are negative or at least Sk list no key. Only the
    first ``topk_length`` (Sq,) entries of a row are read. Returns (out, max_logits, lse): out is
    (Sq, H, d_v); max_logits and lse are (Sq, H) float32. max_logits is the largest scaled score of
    a row, −inf if the row is fully masked.
    """
    validate.a_tensor("indices", indices)
    if indices.dim() != 3 or indices.shape[1] != 1:
        validate.wrong("indices", "shape (seqlen_q, 1, topk)", indices)
    lists = indices.transpose(0, 1)
    ends = None if topk_length is None else topk_length[None]
    out, lse = _both(latent.attention_latent(
        q[None], kv[None], v_dim=d_v, indices=lists, topk_lengths=ends, scale=sm_scale,
        return_lse=True,
    ))  # fmt: skip
    out, lse = _in_their_convention(out, lse, attn_sink)
    return out[0], _max_logits(q, kv, lists[0], topk_length, sm_scale), lse[0].T.contiguous()


def quantize_tokens(cache: torch.Tensor) -> torch.Tensor:
    """Quantize bfloat16 (…, 576) to FlashMLA's tokens of 656 bytes: (…, 656) uint8.

    Only the first 512 elements are quantized; the other 64 stay bfloat16. Each 128 elements have
    one scale: their largest magnitude divided by 448, but at least 1e-4, rounded up to a power of
    two.
    """
    if cache.shape[-1] != _DIM or cache.dtype != torch.bfloat16:
        validate.wrong("cache", f"bfloat16 tokens of {_DIM} elements", cache)
    tiles = cache[..., :_DIM_V].float().unflatten(-1, (-1, _TILE))
    scales = (tiles.abs().amax(-1) / _LARGEST).clamp_min(1e-4).log2().ceil().exp2()
    values = (tiles / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rope = cache[..., _DIM_V:].contiguous()
    return torch.cat([x.view(torch.uint8) for x in (values, scales, rope)], -1)


def dequantize_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Convert tokens of 656 bytes, (…, 656) float8_e4m3fn, uint8 or int8, to bfloat16 (…, 576)."""
    if tokens.dtype not in _BYTES or tokens.shape[-1] != _TOKEN_BYTES:
        validate.wrong(
            "k_cache", f"tokens of {_TOKEN_BYTES} bytes (float8_e4m3fn or uint8)", tokens
        )
    bits = tokens.view(torch.uint8).contiguous()
    # e4m3fn on every GPU: read as AMD's e4m3fnuz these bytes would be half as much.
    values = bits[..., :_SCALES_AT].contiguous().view(torch.float8_e4m3fn).float()
    scales = bits[..., _SCALES_AT:_ROPE_AT].contiguous().view(torch.float32)
    whole = torch.empty((*bits.shape[:-1], _DIM), dtype=torch.bfloat16, device=bits.device)
    tiles = values.unflatten(-1, (-1, _TILE)) * scales[..., None]
    whole[..., :_DIM_V] = tiles.flatten(-2)
    whole[..., _DIM_V:] = bits[..., _ROPE_AT:].contiguous().view(torch.bfloat16)
    return whole


def _both(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = result
    return out, lse


def _in_their_convention(
    out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``lse`` (…, H, Sq) and ``out`` (…, Sq, H, Dv) as FlashMLA does, with the effect of the
    sink."""
    if attn_sink is not None:
        validate.a_tensor("attn_sink", attn_sink)
        if attn_sink.shape != out.shape[-2:-1]:
            validate.wrong("attn_sink", f"shape {tuple(out.shape[-2:-1])}", attn_sink)
        share = torch.sigmoid(lse.mT - attn_sink.float())
        # The output of a fully masked row is 0, although −inf − −inf is NaN.
        share = share.masked_fill(lse.mT == -torch.inf, 0.0)
        out = (out.float() * share[..., None]).to(out.dtype)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _gathered(
    cache: torch.Tensor, indices: torch.Tensor, ends: torch.Tensor | None, float8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that ``indices`` list, (B, Sq, topk, D), and which of them exist."""
    validate.a_tensor("indices", indices)
    blocks, size = cache.shape[:2]
    exist = (indices >= 0) & (indices < blocks * size)
    if ends is not None:
        exist &= torch.arange(indices.shape[-1], device=indices.device) < ends[:, None, None]
    places = indices.long().where(exist, 0)
    page, row = places // size, places % size
    if not float8:
        return cache[page, row, 0], exist
    if cache.dtype in _BYTES and cache.shape[-1] == _PAGED_BYTES:
        return _of_pages(cache.view(torch.uint8), page, row), exist
    if cache.dtype not in _BYTES or cache.shape[-1] != _TOKEN_BYTES:
        known = f"{_TOKEN_BYTES} or {_PAGED_BYTES} bytes a token (float8_e4m3fn or uint8)"
        validate.wrong("k_cache", known, cache)
    return dequantize_tokens(cache.view(torch.uint8)[page, row, 0]), exist


def _of_pages(cache: torch.Tensor, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return (…, 512) bfloat16 of the tokens at ``row`` of ``page``, for pages with scales after
    the tokens."""
    blocks, size = cache.shape[:2]
    step, begin = cache.stride(0), cache.storage_offset()
    tokens = cache.as_strided((blocks, size, _PAGED_TOKEN), (step, _PAGED_TOKEN, 1))[page, row]
    behind = begin + size * _PAGED_TOKEN
    exponents = cache.as_strided((blocks, size, 8), (step, 8, 1), behind)[page, row]
    scales = torch.exp2(exponents[..., :_PAGED_SCALES].float() - 127.0)
    values = tokens[..., :_PAGED_NOPE].contiguous().view(torch.float8_e4m3fn).float()
    tiles = values.unflatten(-1, (_PAGED_SCALES, _PAGED_TILE)) * scales[..., None]
    rope = tokens[..., _PAGED_NOPE:].contiguous().view(torch.bfloat16)
    return torch.cat((tiles.flatten(-2).bfloat16(), rope), -1)


def _max_logits(
    q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, ends: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the largest scaled score of each row and head, (Sq, H)."""
    rows, topk = lists.shape
    exist = (lists >= 0) & (lists < kv.shape[0])
    if ends is not None:
        exist &= torch.arange(topk, device=q.device) < ends[:, None]
    found = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if topk == 0:
        return found
    step = max(1, _CHUNK_BYTES // (topk * kv.shape[-1] * 4))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        keys = kv[lists[part].long().where(exist[part], 0), 0].float()
        scores = torch.einsum("rhd,rkd->rhk", q[part].float(), keys) * scale
        found[part] = scores.masked_fill(~exist[part][:, None], -torch.inf).amax(-1)
    return found
