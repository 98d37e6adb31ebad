"""flash-attention 2's interface (``from flash_attn import …``), implemented with pyfa.

    from pyfa.compat.fa2 import flash_attn_func

Signatures, defaults, return values and conventions are those of flash-attention 2.8:

- The LSE of a fully masked row is +inf.
- Negative bounds of ``window_size`` mean unlimited.
- ``flash_attn_with_kvcache`` accepts tensors that require a gradient, but its output has none.
- Wrong arguments raise ``ArgumentError``, a ``RuntimeError``, with flash-attention's argument
  names.

Dropout drops different positions than in flash-attention. pyfa chooses the backend
(``pyfa.use_backend``, ``PYFA_BACKEND``).

pyfa supports more than flash-attention: float32, CPUs, any head_dim up to 576 (above 256, ``hip``
and ``cuda`` run the forward only), another head_dim for V, softcap with dropout, pages of any size,
and gradients through the returned LSE.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api, validate
from .arguments import Window, length, unpacked, window
from .errors import ArgumentError, in_words_of
from .probabilities import Packed, signed_probabilities

__all__ = [
    "ArgumentError",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_in_their_words = in_words_of(page_table="block_table", return_lse="return_attn_probs")


@_in_their_words
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): out (B, Sq, H,
    Dv).

    With ``return_attn_probs`` it returns (out, softmax_lse, S_dmask). out and the LSE, (B, H, Sq)
    float32, natural logarithm, are differentiable. S_dmask is for tests: its memory is quadratic,
    and it has no gradient. With dropout it is (B, H, Sq, Sk) in q's dtype, with both lengths
    rounded up to multiples of 128. It contains exp(score − the row's maximum), with a negative sign
    where dropout dropped the probability. Without dropout it is empty.

    ``causal`` and ``window_size`` (left, right) align to the bottom right. ``alibi_slopes`` is (H,)
    or (B, H). Raises ``ArgumentError`` (a ``RuntimeError``) or ``TypeError`` for wrong arguments,
    and ``pyfa.UnsupportedProblem`` if no backend can run the call.
    """
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@_in_their_words
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_func`` with K and V in one tensor kv (B, Sk, 2, Hk, D)."""
    k, v = unpacked("kv", kv, 2, 5)
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@_in_their_words
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_func`` with Q, K and V in one tensor qkv (B, S, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, 5)
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
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
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Call ``flash_attn_func`` on packed q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk,
    Dv).

    Sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]`` − 1; offsets are (B+1,) int32. With
    ``block_table`` (B, blocks) int32, k and v are (num_blocks, block_size, Hk, D), and
    ``cu_seqlens_k`` gives only the lengths of the sequences. Returns out (total_q, H, Dv) and, with
    ``return_attn_probs``, softmax_lse (H, total_q) and S_dmask. With dropout, S_dmask is (B, H,
    max_seqlen_q, max_seqlen_k), with both lengths rounded up to multiples of 128; each sequence is
    in the top left corner. Without dropout it is empty. Raises what ``flash_attn_func`` raises.
    """
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
        Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table),
    )  # fmt: skip


@_in_their_words
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_varlen_func`` with K and V in one tensor kv (total_k, 2, Hk, D)."""
    k, v = unpacked("kv", kv, 2, 4)
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
        Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


@_in_their_words
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call ``flash_attn_varlen_func`` with Q, K and V in one tensor qkv (total, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, 4)
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
        Packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
    )  # fmt: skip


@_in_their_words
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a cache in place, and compute attention of q (B, Sq, H, D) over it.

    ``k_cache`` and ``v_cache`` are (B_cache, S, Hk, D), or (num_blocks, block_size, Hk, D) with
    ``block_table`` (B, blocks) int32. ``cache_seqlens`` (an int or (B,) int32) is the number of
    keys in the cache before the append. New ``k`` and ``v`` (B, S_new, Hk, D) are appended after
    these keys, and queries see them. ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2)
    rotate q and the new k.

    Returns out (B, Sq, H, Dv) and, with ``return_softmax_lse``, the LSE (B, H, Sq). There is no
    gradient. With a tensor as ``cache_seqlens`` and a ``block_table``, the call waits for the
    device, as in flash-attention, and raises ``ArgumentError`` if a length exceeds the table. While
    a graph is captured, lengths are not checked.
    """
    return attend_cache(
        q, k_cache, v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes,
        num_splits=num_splits, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def attend_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    block_table: torch.Tensor | None,
    window_size: Window,
    return_softmax_lse: bool,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the result of ``flash_attn_with_kvcache``, also for ``compat.hub``. ``others`` are
    passed on to ``pyfa.attention_kvcache``."""
    if block_table is not None and cache_seqlens is not None:
        _check_capacity(k_cache, k, cache_seqlens, block_table)
    with torch.no_grad():
        result = api.attention_kvcache(
            q, k_cache, v_cache, k=k, cache_seqlens=cache_seqlens, page_table=block_table,
            window=window(window_size), return_lse=return_softmax_lse, **others,
        )  # fmt: skip
    if isinstance(result, torch.Tensor):
        return result
    return result[0], their_lse(result[1])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    packed: Packed | None = None,
    sinks: torch.Tensor | None = None,
) -> Result:
    """Compute the results of this module's six differentiable functions. ``sinks`` is for
    ``compat.hub``; flash-attention 2 has no sinks."""
    # Everything goes by name, since a repeated call would take long to fill a dict and unpack it.
    edges = window(window_size)
    seed = None
    if dropout_p and validate.number("dropout_p", dropout_p) > 0.0:
        # Drawn here, because S_dmask needs the same bits.
        validate.a_tensor("q", q)
        seed = validate.seed(None, q.device)
    if packed is None:
        result = api.attention(
            q, k, v, causal=causal, window=edges, scale=softmax_scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed,
            deterministic=deterministic, return_lse=return_attn_probs,
        )  # fmt: skip
    else:
        packed = packed._replace(
            max_seqlen_q=length(packed.max_seqlen_q), max_seqlen_k=length(packed.max_seqlen_k)
        )
        result = api.attention_varlen(
            q, k, v, *packed[:4], page_table=packed.block_table, causal=causal, window=edges,
            scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=dropout_p, seed=seed, deterministic=deterministic,
            return_lse=return_attn_probs,
        )  # fmt: skip
    if isinstance(result, torch.Tensor):
        return result
    out, lse = result
    if seed is None:
        return out, their_lse(lse), q.new_empty(0)
    probabilities = signed_probabilities(
        q.detach(),
        k.detach(),
        packed,
        causal,
        edges,
        softmax_scale,
        softcap,
        alibi_slopes,
        dropout_p,
        seed,
    )
    return out, their_lse(lse), probabilities


def their_lse(lse: torch.Tensor) -> torch.Tensor:
    """Return the LSE with +inf for fully masked rows, as in flash-attention 2."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _check_capacity(
    k_cache: torch.Tensor,
    k: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    new = () if k is None else (("k", k, 4),)
    for name, x, dims in (("block_table", block_table, 2), ("k_cache", k_cache, 4), *new):
        validate.a_tensor(name, x)
        if x.dim() != dims:
            return  # attention_kvcache refuses it
    if isinstance(cache_seqlens, torch.Tensor):
        if torch.compiler.is_compiling() or not cache_seqlens.numel() or cache_seqlens.is_meta:
            return
        if cache_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        cache_seqlens = int(cache_seqlens.max())
    cache_seqlens = validate.length("cache_seqlens", cache_seqlens)
    capacity = block_table.shape[-1] * k_cache.shape[1]
    keys = cache_seqlens + (0 if k is None else k.shape[1])
    if keys > capacity:
        validate.wrong(
            "cache_seqlens",
            f"at most {capacity} keys, as many as block_table's {block_table.shape[-1]} columns "
            "hold, new ones included",
            keys,
        )
