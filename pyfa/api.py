"""The public functions: they turn arguments into a checked ``Call`` and pass it to a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import binding, dispatch, mods, validate
from . import device as devices
from . import request as requests
from .binding import CACHE, DENSE, PACKED, Result, again, first
from .request import Backends, Descale, Request, Shared
from .validate import Window


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    num_splits: int = 0,
    backend: Backends = None,
    batch_invariant: bool = False,
    score_mod: mods.Mod | None = None,
    mask_mod: mods.Mod | None = None,
    block_mask: Any = None,
    **unknown: object,
) -> Result:
    """Compute exact attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    Returns out (B, Sq, H, Dv) in q's dtype. With ``return_lse`` it also returns the log-sum-exp of
    each row's scores: (B, H, Sq), float32, natural logarithm. H is a multiple of Hk (GQA, MQA). D
    is 1 to 576 and Dv 1 to 512; above 256, hip and cuda run the forward only. Dtypes: float16,
    bfloat16, float32; float8 e4m3 for q, k and v, or for k and v with 16-bit q. q, k, v, a float
    ``bias`` and ``sinks`` receive gradients, and the LSE is differentiable; float8 has no gradient.

    score = score_mod(softcap(scale · q·k)) − slope · ``|i + Sk − Sq − j|`` + bias, then masks, then
    softmax.
    A fully masked row gives output 0, LSE −inf and zero gradients.

    Parameters
    ----------
    causal, window
        Aligned to the bottom right: query i sees key j when j ≤ i + Sk − Sq. ``window`` is (left,
        right) in keys; None or −1 is unlimited. With ``causal``, a right bound above 0, or
        unlimited, counts as 0. A bound below −1 excludes keys next to the query: with (8, −3) query
        i sees the keys from 8 to 3 before it. ``pyfa.Edge(-1)`` stands for the value −1.
    attention_chunk
        Chunk size in keys (Llama 4); None or 0 disables chunking. Query i sees key j only in its
        own chunk: ⌊(i + Sk − Sq) / chunk⌋ = ⌊j / chunk⌋.
    scale
        Any finite number; 1/√D by default.
    softcap
        c in c·tanh(x/c); 0 for none.
    bias
        Broadcasts to (B, H, Sq, Sk). A boolean bias masks where it is False.
    alibi_slopes
        (H,) or (B, H). No gradient.
    sinks
        (H,): one extra logit per head, without a value (GPT-OSS).
    dropout_p, seed
        0 ≤ p < 1. ``seed`` is an int or a one-element int64 tensor on the device; it gives the same
        bits on every backend. None draws a seed on the device from torch's generator. The LSE is
        taken before dropout.
    descale, out_dtype
        ``descale`` is a tuple (for q, for k, for v) of float32 scales that multiply float8 inputs,
        as ``quantize`` makes them; 1 by default. Shapes: (), (1,) or (1, 1) per tensor,
        (B, Hk) per sequence and KV head, (B, Hk, ⌈rows / block⌉) per block of rows, where block is
        a power of two. All are positive and have the same kind of shape. The scale for q is None if
        q is 16-bit. With float8 q, ``out_dtype`` is bfloat16 (default) or float16.
    deterministic
        Gradients are bitwise equal from run to run. torch's global switch has the same effect.
    num_splits
        The number of splits of the keys, whose results are combined. 0 lets the plan choose; 1 does
        not split.
    batch_invariant
        Output, LSE and gradients of a sequence have the same bits, whatever else is in its batch:
        see the guide. ``use_batch_invariant`` and ``PYFA_BATCH_INVARIANT`` have the same effect.
    backend
        A name, or names in order; pyfa tries no others. By default ``use_backend`` decides, then
        ``PYFA_BACKEND``, then the first in the device's order that can run the call.
    score_mod, mask_mod
        Functions with FlexAttention's signatures: ``score_mod(score, b, h, q_idx, kv_idx)`` returns
        the new score, ``mask_mod(b, h, q_idx, kv_idx)`` whether the query sees the key. Indices
        count inside the sequence from the top left. Captured tensors are read at run time. If an
        operation is not supported, a ``ValueError`` names its line. Tiles that a mask_mod masks
        entirely are skipped: see ``explain``.
    block_mask
        FlexAttention's BlockMask. Blocks that it does not list are masked, its full blocks are
        visible. In its other blocks its mask_mod decides, or ``mask_mod`` if it has none.

    Raises ``ValueError`` or ``TypeError`` naming the wrong argument. Raises ``UnsupportedProblem``
    with every backend's reasons if none can run the call.

    Source: Dao et al. 2022 and Dao 2023 (FlashAttention, FlashAttention-2).
    """
    tensors: tuple[Any, ...] = (q, k, v)
    given = DENSE
    if bias is not None or alibi_slopes is not None or sinks is not None:
        terms, which = binding.of_terms(bias, alibi_slopes, sinks)
        tensors += terms
        given += which
    if type(dropout_p) is not float or dropout_p or seed is not None:
        dropout_p, seed = binding.of_dropout(dropout_p, seed, q)
        if dropout_p:
            tensors += (seed,)
            given += 8
    if descale is not None:
        scales, which = binding.of_scales(descale)
        tensors += scales
        given += 16 * which
    rest: tuple[Any, ...] = ()
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        captured, rest = binding.of_mods(score_mod, mask_mod, block_mask, q)
        tensors += captured
    key: tuple[Any, ...] = (
        given, causal, window, scale, softcap, deterministic, return_lse, backend, batch_invariant,
        num_splits,
    )  # fmt: skip
    if window is not None or attention_chunk is not None or dropout_p or out_dtype is not None:
        key += binding.of_rare(window, attention_chunk, dropout_p, out_dtype)
    if rest:
        key += rest
    result = None if unknown else again(key, tensors)
    if result is not None:
        return result
    validate.refuse_unknown("attention", unknown, attention)
    shared = Shared(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, descale,
        out_dtype, deterministic, return_lse, backend, batch_invariant, attention_chunk,
        score_mod, mask_mod, block_mask,
    )  # fmt: skip
    return first(key, tensors, requests.dense(q, k, v, shared, num_splits))


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    num_splits: int = 0,
    backend: Backends = None,
    batch_invariant: bool = False,
    score_mod: mods.Mod | None = None,
    mask_mod: mods.Mod | None = None,
    block_mask: Any = None,
    **unknown: object,
) -> Result:
    """Compute ``attention`` on packed sequences: q (total_q, H, D), k (total_k, Hk, D), v (…, Hk,
    Dv).

    Sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]`` (int32, (B+1,)). ``max_seqlen_q``
    and ``max_seqlen_k`` are Python ints; no sequence may be longer. With ``seqused_q`` or
    ``seqused_k`` (B,) int32 only the first rows of a sequence are used: later queries
    (``seqused_q``) give output 0, LSE −inf and gradient 0.
    With ``page_table`` (B, pages) int32, k and v are (num_pages, page_size, Hk, D). Lengths then
    come from ``seqused_k``, or without it from the differences of ``cu_seqlens_k``; one of the two
    may be None.

    Returns out (total_q, H, Dv) and LSE (H, total_q). ``bias`` is (H | 1, max_seqlen_q,
    max_seqlen_k) with indices inside each sequence. Dropout indices also count inside each
    sequence. ``descale`` per block of rows is (1, Hk, ⌈total / block⌉) for packed tensors, whatever
    their offsets, and (num_pages, Hk, ⌈page_size / block⌉) for pages.

    Other arguments and errors are as in ``attention``. Offsets and lengths that point outside their
    tensors raise ``ValueError``, on a CPU always, on a GPU with ``PYFA_CHECK=1``.
    """
    tensors: tuple[Any, ...] = (q, k, v)
    given = PACKED
    if bias is not None or alibi_slopes is not None or sinks is not None:
        terms, which = binding.of_terms(bias, alibi_slopes, sinks)
        tensors += terms
        given += which
    if type(dropout_p) is not float or dropout_p or seed is not None:
        dropout_p, seed = binding.of_dropout(dropout_p, seed, q)
        if dropout_p:
            tensors += (seed,)
            given += 8
    tensors += (cu_seqlens_q,)
    # Kernels do without the offsets of pages, and read one tensor of offsets once.
    if cu_seqlens_k is cu_seqlens_q:
        given += 256
    elif cu_seqlens_k is not None:
        tensors += (cu_seqlens_k,)
        given += 512
    if seqused_q is not None:
        tensors += (seqused_q,)
        given += 1024
    if seqused_k is not None:
        tensors += (seqused_k,)
        given += 2048
    if page_table is not None:
        tensors += (page_table,)
        given += 4096
    if descale is not None:
        scales, which = binding.of_scales(descale)
        tensors += scales
        given += 16 * which
    rest: tuple[Any, ...] = ()
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        captured, rest = binding.of_mods(score_mod, mask_mod, block_mask, q)
        tensors += captured
    key: tuple[Any, ...] = (
        given, causal, window, scale, softcap, deterministic, return_lse, backend, batch_invariant,
        num_splits, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if window is not None or attention_chunk is not None or dropout_p or out_dtype is not None:
        key += binding.of_rare(window, attention_chunk, dropout_p, out_dtype)
    if rest:
        key += rest
    result = None if unknown else again(key, tensors)
    if result is not None:
        return result
    validate.refuse_unknown("attention_varlen", unknown, attention_varlen)
    shared = Shared(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, descale,
        out_dtype, deterministic, return_lse, backend, batch_invariant, attention_chunk,
        score_mod, mask_mod, block_mask,
    )  # fmt: skip
    request = requests.varlen(
        q, k, v, shared, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
        seqused_k, page_table, num_splits,
    )  # fmt: skip
    return first(key, tensors, request)


def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_new: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: torch.Tensor | None = None,
    num_splits: int = 0,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backends = None,
    batch_invariant: bool = False,
    score_mod: mods.Mod | None = None,
    mask_mod: mods.Mod | None = None,
    block_mask: Any = None,
    tree_mask: torch.Tensor | None = None,
    **unknown: object,
) -> Result:
    """Append k and v to a cache in place, and compute attention of q (B, Sq, H, D) over it.

    ``k_cache`` and ``v_cache`` are (B_cache, S, Hk, D), or (num_pages, page_size, Hk, D) with
    ``page_table`` (B, pages) int32. ``cache_seqlens``, an int or (B,) int32, is the number of keys
    in the cache before the append; by default the cache is full. New ``k`` and ``v`` (B, S_new, Hk,
    D) are appended after them, and queries see them. Packed new keys are (total_new, Hk, D) with
    ``cu_seqlens_new`` (B+1,) int32. ``cache_batch_idx`` (B,) int32 selects each sequence's cache
    row. ``cache_leftpad`` (B,) int32 is its first valid key; positions count from there. Packed
    queries are (total_q, H, D) with ``cu_seqlens_q`` and ``max_seqlen_q``.

    ``rotary_cos`` and ``rotary_sin`` (max_position, R) rotate q and the new k by their position in
    the cache, or from ``rotary_seqlens`` (B,) int32 on. Without a causal mask or window all queries
    share the first position, as in flash-attention. ``rotary_interleaved`` pairs elements 2i and
    2i+1 (GPT-J); otherwise i and i+R (GPT-NeoX). ``num_splits=0`` lets the plan choose.

    ``tree_mask`` (B | 1, Sq, Sq) or (Sq, Sq) bool masks only the last Sq keys of a sequence, for a
    tree of drafted tokens. Where [i, j] is True, query i sees the key that is Sq − j places from
    the end. Every query sees all keys before the last Sq. For packed queries, Sq is
    ``max_seqlen_q``, and indices count inside each sequence. Other masks apply as well; ``bias`` is
    not supported.

    Keys for a float8 cache must be float8, scaled with the scales of the cache rows that they are
    written to. Rotary converts float8 to float32 and rounds again, clamped to the format's largest
    number. ``descale`` per block of rows refers to the rows or pages of the cache.

    There is no dropout and no gradient: an input that requires one raises ``ValueError``. Other
    arguments and errors are as in ``attention``. Lengths and pages outside the cache raise
    ``ValueError``: on a CPU always, on a GPU with ``PYFA_CHECK=1``. Without it, new rows beyond the
    end of the cache are dropped.
    """
    tensors: tuple[Any, ...] = (q, k_cache, v_cache)
    given = CACHE
    if tree_mask is not None:
        tensors += (tree_mask,)  # where a bias would be
        given += 65536
    if bias is not None or alibi_slopes is not None or sinks is not None:
        terms, which = binding.of_terms(bias, alibi_slopes, sinks)
        tensors += terms
        given += which
    if cu_seqlens_q is not None:
        tensors += (cu_seqlens_q,)
        given += 256
    if cache_seqlens is not None:
        tensors += (cache_seqlens,)
        given += 512
    if page_table is not None:
        tensors += (page_table,)
        given += 1024
    if cache_batch_idx is not None:
        tensors += (cache_batch_idx,)
        given += 2048
    if cache_leftpad is not None:
        tensors += (cache_leftpad,)
        given += 4096
    if descale is not None:
        scales, which = binding.of_scales(descale)
        tensors += scales
        given += 16 * which
    rest: tuple[Any, ...] = ()
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        captured, rest = binding.of_mods(score_mod, mask_mod, block_mask, q)
        tensors += captured
    if k is not None:
        tensors += (k,)
        given += 8192
    if v is not None:
        tensors += (v,)
        given += 16384
    if cu_seqlens_new is not None:
        tensors += (cu_seqlens_new,)
        given += 32768
    key: tuple[Any, ...] = (
        given, causal, window, scale, softcap, return_lse, backend, batch_invariant, num_splits,
        max_seqlen_q,
    )  # fmt: skip
    if window is not None or attention_chunk is not None or out_dtype is not None:
        key += binding.of_rare(window, attention_chunk, 0.0, out_dtype)
    if not (rotary_cos is rotary_sin is rotary_seqlens is None and rotary_interleaved is True):
        rotary = rotary_cos, rotary_sin, rotary_seqlens
        tensors += tuple(x for x in rotary if x is not None)
        key += (rotary_interleaved, *(x is None for x in rotary), "rotary")
    if rest:
        key += rest
    result = None if unknown else again(key, tensors)
    if result is not None:
        return result
    validate.refuse_unknown("attention_kvcache", unknown, attention_kvcache)
    shared = Shared(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, 0.0, None, descale,
        out_dtype, False, return_lse, backend, batch_invariant, attention_chunk,
        score_mod, mask_mod, block_mask,
    )  # fmt: skip
    request = requests.kvcache(
        q, k_cache, v_cache, shared, k, v, cache_seqlens, cache_batch_idx, cache_leftpad,
        cu_seqlens_q, max_seqlen_q, page_table, rotary_cos, rotary_sin, rotary_interleaved,
        rotary_seqlens, num_splits, cu_seqlens_new=cu_seqlens_new, tree_mask=tree_mask,
    )  # fmt: skip
    return first(key, tensors, request)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    /,
    *,
    device: str | None = None,
    **same: Any,
) -> dispatch.Explanation:
    """Say which backend runs this attention, with which plan, and why the others do not.

    Takes the arguments of ``attention``, ``attention_varlen`` or ``attention_kvcache`` as keywords.
    ``cu_seqlens_q`` with ``max_seqlen_k`` selects ``attention_varlen``; otherwise a ``cache_…``
    argument or ``page_table`` selects ``attention_kvcache``. With ``latent=True`` v is a view of k,
    as in ``attention_latent``. Tensors may be on the ``meta`` device. ``device`` names a GPU
    ("MI300X") that need not be in this machine. ``explain`` computes nothing and does not modify
    the KV cache. The result can be printed, and ``as_dict()`` gives plain data. ``explain`` raises
    what those functions raise, but never ``UnsupportedProblem``.
    """
    build: Callable[..., Request] = requests.dense
    if "max_seqlen_k" in same:
        build = requests.varlen
    elif any(name.startswith("cache_") or name in ("page_table", "latent") for name in same):
        build = requests.kvcache
    own = list(inspect.signature(build).parameters)[4:]  # behind q, k, v and what all share
    allowed = (*Shared._fields, *own)
    unknown = {name: value for name, value in same.items() if name not in allowed}
    validate.refuse_unknown("explain", unknown, allowed)
    shared = Shared(**{name: same.pop(name) for name in Shared._fields if name in same})
    request = build(q, k, v, shared, **same)
    return dispatch.explain(
        request.call, *request.who, device=None if device is None else devices.by_name(device)
    )
