"""flash-attention 3's interface (``import flash_attn_interface``), implemented with pyfa.

    from pyfa.compat.fa3 import flash_attn_func

Signatures, defaults, return values and conventions are those of ``flash_attn_interface``:

- The LSE is float32, natural logarithm, −inf for a fully masked row.
- Negative bounds of ``window_size`` mean unlimited.
- ``flash_attn_with_kvcache`` has no gradient.
- Wrong arguments raise ``ArgumentError``, a ``RuntimeError``, with flash-attention's argument
  names.

pyfa supports more than flash-attention: see the docstring of ``pyfa.compat.fa2``. ``pack_gqa``,
``sm_margin`` and ``scheduler_metadata`` are accepted and ignored.

Float8: descales are (B, Hk) or (1,) float32, and the output is bfloat16. With inputs of other
dtypes, descales are ignored. Float8 keys also work with 16-bit queries. Float8 has no gradient: the
backward raises ``NotImplementedError``, and under ``torch.compile(fullgraph=True)`` inputs must not
require a gradient.

``qv``: q and qv are concatenated along head_dim, and so are k and v, so that one matrix product
gives both terms of the score. If v and k are views of one latent cache, the call runs as latent
attention, without this concatenation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import api, request, validate, validate_cache
from . import query_values
from .arguments import Window, length, natural, unpacked, window
from .combine import combine
from .errors import ArgumentError, in_words_of

__all__ = [
    "ArgumentError",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_in_their_words = in_words_of(
    return_lse="return_attn_probs", descale="q_descale", cu_seqlens_new="cu_seqlens_k_new"
)


@_in_their_words
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): out (B, Sq, H,
    Dv).

    With ``return_attn_probs`` it returns (out, softmax_lse); the LSE is (B, H, Sq) float32. q, k
    and v receive gradients, and the LSE is differentiable. ``causal`` and ``window_size`` (left,
    right) align to the bottom right. ``qv`` (B, Sq, H, Dv) adds qv·v to the scores, whose default
    scale is then 1/√(D + Dv).

    Raises ``ArgumentError`` (a ``RuntimeError``) or ``TypeError`` for wrong arguments,
    and ``pyfa.UnsupportedProblem`` if no backend can run the call.
    """
    shared = _shared(
        q, k, softmax_scale, causal, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap,
    )  # fmt: skip
    if qv is not None:
        parts = _joined(shared, q, qv, k, v)
        shared |= {"deterministic": deterministic, "return_lse": return_attn_probs}
        return query_values.attended(request.dense(*parts, request.Shared(**shared)))
    return _attend(
        api.attention, q, k, v, deterministic=deterministic, return_lse=return_attn_probs,
        num_splits=natural("num_splits", num_splits), **shared,
    )  # fmt: skip


@_in_their_words
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_func`` with Q, K and V in one tensor qkv (B, S, 3, H, D).

    With ``num_heads_q``, qkv may be (B, S, num_heads_q + 2·Hk, D): first the heads of Q, then those
    of K, then those of V.
    """
    if isinstance(qkv, torch.Tensor) and qkv.dim() == 4:
        if num_heads_q is None or qkv.shape[2] <= num_heads_q or (qkv.shape[2] - num_heads_q) % 2:
            heads = "shape (batch, seqlen, num_heads_q + 2 * heads_k, head_dim)"
            validate.wrong("qkv", f"{heads} for num_heads_q={num_heads_q}", qkv)
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=2)
    else:
        q, k, v = unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@_in_their_words
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_func`` on packed q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk,
    Dv).

    Sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]`` − 1; offsets are (B+1,) int32.
    ``seqused_q`` and ``seqused_k`` (B,) int32 say how many rows of each sequence are used, from its
    beginning; unused queries give output 0 and LSE −inf. Returns out (total_q, H, Dv); the LSE is
    (H, total_q). Raises what ``flash_attn_func`` raises.
    """
    shared = _shared(
        q, k, softmax_scale, causal, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap,
    )  # fmt: skip
    if qv is not None:
        parts = _joined(shared, q, qv, k, v)
        shared |= {"deterministic": deterministic, "return_lse": return_attn_probs}
        asked = request.varlen(
            *parts, request.Shared(**shared), cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q),
            length(max_seqlen_k), seqused_q, seqused_k,
        )  # fmt: skip
        return query_values.attended(asked)
    return _attend(
        api.attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q),
        length(max_seqlen_k), seqused_q=seqused_q, seqused_k=seqused_k, deterministic=deterministic,
        return_lse=return_attn_probs, num_splits=natural("num_splits", num_splits), **shared,
    )  # fmt: skip


@_in_their_words
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them: (out, softmax_lse).

    ``out_partial`` (splits, B, S, H, D) and ``lse_partial`` (splits, B, S, H) are float32. Returns
    out (B, S, H, D) in ``out_dtype`` (float32 by default), and the LSE (B, S, H), −inf for rows
    that are fully masked in every part. With ``out``, the output is written into this tensor.
    """
    return combine(out_partial, lse_partial, out, out_dtype)


@_in_their_words
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append k and v to a cache in place, and compute attention of q (B, Sq, H, D) over it.

    ``k_cache`` and ``v_cache`` are (B_cache, S, Hk, D), or (num_pages, page_size, Hk, D) with
    ``page_table`` (B, pages) int32. ``cache_batch_idx`` (B,) int32 selects each sequence's row of
    the cache or of the table. Packed queries are (total_q, H, D) with ``cu_seqlens_q`` and
    ``max_seqlen_q``. ``cache_seqlens`` (an int or (B,) int32) is the number of keys in the cache
    before the append. New ``k`` and ``v`` (B, S_new, Hk, D), or (total_new, Hk, D) with
    ``cu_seqlens_k_new`` (B+1,) int32, are appended after these keys, and queries see them.
    ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) rotate q and the new k.

    Returns out (B, Sq, H, Dv). With ``return_softmax_lse`` it returns four tensors: out, the LSE
    (B, H, Sq), and two empty tensors in place of flash-attention's partial results. There is no
    gradient. Raises what ``flash_attn_func`` raises.
    """
    shared = _shared(
        q, k_cache, softmax_scale, causal, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap,
    )  # fmt: skip
    if page_table is not None and cache_batch_idx is not None:
        validate.a_tensor("page_table", page_table)
        validate_cache.check_index("cache_batch_idx", cache_batch_idx, page_table)
        page_table, cache_batch_idx = page_table[cache_batch_idx.long()], None
    where: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "page_table": page_table,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_new": None if k is None else cu_seqlens_k_new,
        "max_seqlen_q": None if cu_seqlens_q is None or max_seqlen_q is None
        else length(max_seqlen_q),
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": None if rotary_cos is None else rotary_seqlens,
        "rotary_interleaved": rotary_interleaved,
        "num_splits": natural("num_splits", num_splits),
    }  # fmt: skip
    with torch.no_grad():
        if qv is not None:
            shared["scale"] = query_values.scale_of(softmax_scale, q, v_cache)
            all_shared = request.Shared(**shared, return_lse=return_softmax_lse)
            asked = request.kvcache(q, k_cache, v_cache, all_shared, k, v, **where)
            result = query_values.attended_with_cache(asked, qv)
        else:
            result = api.attention_kvcache(
                q, k_cache, v_cache, k=k, v=v, return_lse=return_softmax_lse, **where, **shared
            )
    if isinstance(result, torch.Tensor):
        return result
    return *result, q.new_empty(0), q.new_empty(0)


@_in_their_words
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return an empty int32 tensor on the device of ``cache_seqlens``, which
    ``flash_attn_with_kvcache`` accepts as ``scheduler_metadata``.

    pyfa needs no metadata, because its kernels read the lengths themselves.
    """
    validate.a_tensor("cache_seqlens", cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)


class _NoGradient(torch.autograd.Function):
    """The output of float8 attention if one of its inputs requires a gradient: its backward
    raises."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("float8 attention has no gradient")


def _attend(
    function: Callable[..., Result],
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any,
) -> Result:  # fmt: skip
    """Call ``function``. As in flash-attention, float8 tensors that require a gradient are
    accepted; the backward of the result raises."""
    if not (torch.is_grad_enabled() and (_is_float8(q) or _is_float8(k) or _is_float8(v))):
        return function(q, k, v, *args, **options)
    given = (q, k, v, *options.get("descale", ()))
    inputs = [x for x in given if isinstance(x, torch.Tensor)]
    if not any(x.requires_grad for x in inputs):
        return function(q, k, v, *args, **options)
    with torch.no_grad():
        result = function(q, k, v, *args, **options)
    apply = _NoGradient.apply
    if isinstance(result, torch.Tensor):
        return apply(result.detach(), *inputs)  # type: ignore[no-untyped-call, no-any-return]
    return tuple(apply(x.detach(), *inputs) for x in result)  # type: ignore[no-untyped-call]


def _is_float8(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.itemsize == 1


def _joined(
    shared: dict[str, Any], q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v of q·k + qv·v, and the changes to ``shared``."""
    shared["scale"] = query_values.scale_of(shared["scale"], q, v)
    *parts, descale = query_values.joined(q, qv, k, v, shared.get("descale"))
    if descale is not None:
        shared["descale"] = descale
    if parts[0].itemsize > 1:
        shared.pop("out_dtype", None)
    return parts[0], parts[1], parts[2]


def _shared(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    window_size: Window,
    attention_chunk: int,
    softcap: float,
) -> dict[str, Any]:
    """Return the arguments that all functions share, under pyfa's names."""
    shared: dict[str, Any] = {
        "scale": softmax_scale,
        "causal": causal,
        "window": window(window_size),
        # FlashAttention-3 has no chunks of a negative length, and takes them for none.
        "attention_chunk": natural("attention_chunk", attention_chunk) or None,
        "softcap": softcap,
    }
    of_q, of_k = _is_float8(q), _is_float8(k)
    if of_q:
        shared["out_dtype"] = torch.bfloat16
    if of_k and not (q_descale is k_descale is v_descale is None):
        one = torch.ones_like(next(x for x in (q_descale, k_descale, v_descale) if x is not None))
        k_scale, v_scale = (one if x is None else x for x in (k_descale, v_descale))
        q_scale = one if q_descale is None else q_descale
        shared["descale"] = (q_scale if of_q else None, k_scale, v_scale)
    return shared
