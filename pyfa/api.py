"""The public functions: they turn arguments into a checked ``Call`` and pass it to a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import binding, dispatch, mods, validate, validate_cache
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

    Returns out (B, Sq, H, Dv) in q's dtype, or in ``out_dtype`` for float8 q. With ``return_lse``
    it returns (out, lse): lse is the log-sum-exp of each row's scores, (B, H, Sq) float32, natural
    logarithm.

    H must be a multiple of Hk (GQA, MQA). D may be 1 to 576 and Dv 1 to 512. Above 256, hip and
    cuda run the forward only, and refuse dropout, ``score_mod``, ``mask_mod``, float8 and batch
    invariance. q, k and v are float16, bfloat16, float32 or float8 e4m3; float8 k and v also work
    with 16-bit q. q, k, v, a float ``bias`` and ``sinks`` receive gradients, and the LSE is
    differentiable. Float8 attention has no gradients.

    The position of query i is p = i + Sk − Sq, so the last query has the position of the last key.
    For query i and key j, the score is score_mod(softcap(scale · q·k)) − slope · ``|p − j|`` +
    bias. Then masks and softmax are applied. A fully masked row gives output 0, LSE −inf and zero
    gradients.

    Parameters
    ----------
    causal
        Query i sees keys j ≤ p: the mask is aligned to the bottom right.
    window
        (left, right): query i sees keys p − left to p + right. None or −1 is unlimited. With
        ``causal``, a right bound above 0 has no effect. A bound below −1 excludes keys next to the
        query: with (8, −3) query i sees keys p − 8 to p − 3. For the bound −1 itself pass
        ``pyfa.Edge(-1)``.
    attention_chunk
        Chunk size in keys (Llama 4); None or 0 disables chunking. Query i sees only the keys j of
        its own chunk: ⌊j / chunk⌋ = ⌊p / chunk⌋.
    scale
        Any finite number; 1/√D by default.
    softcap
        The cap c in c · tanh(score / c); 0 disables it.
    bias
        Broadcasts to (B, H, Sq, Sk). A boolean bias masks where it is False.
    alibi_slopes
        (H,) or (B, H): the slope of each head in the formula above. It receives no gradient.
    sinks
        (H,): one extra logit per head, which takes part in the softmax but has no value (GPT-OSS).
    dropout_p, seed
        ``dropout_p`` is the probability p of dropping an element, 0 ≤ p < 1. ``seed`` is an int or
        a one-element int64 tensor on the device. The same seed drops the same positions on every
        backend. If ``seed`` is None, pyfa draws a seed from torch's generator for the device. The
        LSE is taken before dropout.
    descale, out_dtype
        ``descale`` is a tuple (for q, for k, for v) of positive float32 scales that multiply float8
        inputs, as ``quantize`` returns them; 1 by default. Each scale has one of these shapes: (),
        (1,) or (1, 1) for one scale per tensor, (B, Hk) for one per sequence and KV head, (B, Hk,
        ⌈rows / block⌉) for one per block of rows, where block is a power of two. Either all scales
        are per block of rows, or none is. The scale for q is None if q is 16-bit. With float8 q,
        ``out_dtype`` is bfloat16 (default) or float16.
    deterministic
        If True, gradients are bitwise equal from run to run.
        ``torch.use_deterministic_algorithms(True)`` has the same effect.
    num_splits
        The number of splits of the keys. Attention is computed over each split separately, and the
        results are merged. 1 means no split. With 0, the default, pyfa chooses.
    batch_invariant
        If True, output, LSE and gradients of a sequence have the same bits in any batch.
        ``use_batch_invariant`` and ``PYFA_BATCH_INVARIANT`` have the same effect.
    backend
        The name of a backend, or several to try in order; pyfa tries no others. Without it,
        ``use_backend`` decides, then ``PYFA_BACKEND``, then the first backend in the device's
        order that can run the call.
    score_mod, mask_mod
        Functions with FlexAttention's signatures. ``score_mod(score, b, h, q_idx, kv_idx)`` returns
        the new score. ``mask_mod(b, h, q_idx, kv_idx)`` returns whether the query sees the key.
        Indices count from the first query and the first key of the sequence. Captured tensors are
        read at run time. Kernels with block lists skip the tiles that a ``mask_mod`` masks
        completely.
    block_mask
        FlexAttention's BlockMask. Blocks that it does not list are masked. Its full blocks are
        visible. In partial blocks the BlockMask's own mask_mod decides or, if it has none, the
        argument ``mask_mod``.

    Notes
    -----
    A wrong argument raises a ``ValueError`` or ``TypeError`` that names it. If a ``score_mod`` or
    ``mask_mod`` uses an operation that is not supported, the error names the source line. If no
    backend can run the call, ``UnsupportedProblem`` lists every backend's reasons.

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
    """Compute attention of packed q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk, Dv).

    Returns out (total_q, H, Dv). With ``return_lse`` it returns (out, lse), lse (H, total_q).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k
        (B+1,) int32: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]`` − 1.
    max_seqlen_q, max_seqlen_k
        Python ints: upper bounds on the sequence lengths.
    seqused_q, seqused_k
        (B,) int32: how many rows of each sequence are used, counted from its first row. Unused
        queries give output 0, LSE −inf and gradient 0.
    page_table
        (B, pages) int32: k and v are pages (num_pages, page_size, Hk, D). The number of keys of a
        sequence is ``seqused_k``, or the difference of its offsets in ``cu_seqlens_k``. One of the
        two may be None.
    bias
        (H | 1, max_seqlen_q, max_seqlen_k), indexed by the positions inside each sequence.
    descale
        As in ``attention``. Scales per block of rows are (1, Hk, ⌈total / block⌉) for packed
        tensors, whatever their offsets, and (num_pages, Hk, ⌈page_size / block⌉) for pages.

    Notes
    -----
    Other arguments and errors are as in ``attention``. Offsets and lengths that point outside their
    tensors raise ``ValueError`` on a CPU, and on a GPU with ``PYFA_CHECK=1``.
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
    """Append k and v to a cache in place, and compute attention of q (B, Sq, H, D) over the cache.

    Returns what ``attention`` returns. There is no dropout and no gradient: an input that requires
    one raises ``ValueError``.

    Parameters
    ----------
    q
        (B, Sq, H, D), or packed (total_q, H, D) with ``cu_seqlens_q`` and ``max_seqlen_q``.
    k_cache, v_cache, page_table
        The cache (B_cache, S, Hk, D), or pages (num_pages, page_size, Hk, D) with ``page_table``
        (B, pages) int32.
    k, v
        New keys and values (B, S_new, Hk, D), or packed (total_new, Hk, D) with ``cu_seqlens_new``
        (B+1,) int32. They are written after the first ``cache_seqlens`` keys of the cache, and the
        queries see them. For a float8 cache, k and v must be float8 with the scales of the cache
        rows to which they are written.
    cache_seqlens
        An int or (B,) int32: the number of keys in the cache before the append. It is required if k
        and v are passed. Without k and v, the whole cache is used by default.
    cache_batch_idx
        (B,) int32: the index in the cache's first dimension that each sequence uses.
    cache_leftpad
        (B,) int32: the index of each sequence's first valid key. Masks and ALiBi count positions
        from this key. ``cache_seqlens`` includes the padding.
    rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
        Tables (max_position, R) that rotate q and the new k. If ``rotary_interleaved`` is True,
        elements 2i and 2i+1 are paired (GPT-J), otherwise i and i+R (GPT-NeoX). The position of the
        first new token is ``rotary_seqlens`` (B,) int32. The default is ``cache_seqlens``, which
        includes the padding of ``cache_leftpad``. Without a causal mask, a window or chunks, all
        queries are rotated to this position, as in flash-attention. Float8 inputs are rounded again
        after the rotation.
    bias
        Broadcasts to (B, H, Sq, S), where S is the capacity: with pages, the number of pages of a
        sequence times page_size. Index 0 of the key dimension is the first valid key.
    tree_mask
        (Sq, Sq) or (B | 1, Sq, Sq) bool, for a tree of draft tokens. It applies only to the last Sq
        keys of a sequence. If element [i, j] is True, query i sees key j of these Sq keys. For
        packed queries, Sq is ``max_seqlen_q``. Cannot be combined with ``bias``.
    descale
        As in ``attention``. Scales per block of rows refer to the rows or pages of the cache.

    Notes
    -----
    Other arguments and errors are as in ``attention``. Lengths and pages outside the cache raise
    ``ValueError`` on a CPU, and on a GPU with ``PYFA_CHECK=1``. Without this check, new keys beyond
    the end of the cache are dropped.
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
    """Say which backend runs this call, with which plan, and why the others do not.

    Pass q, k and v by position, and the other arguments of ``attention``, ``attention_varlen`` or
    ``attention_kvcache`` as keywords. ``max_seqlen_k`` selects ``attention_varlen``, even together
    with ``page_table``. Otherwise a ``cache_…`` argument or ``page_table`` selects
    ``attention_kvcache``. ``latent=True`` selects ``attention_latent``; in this case, pass a view
    of k as v. ``explain`` computes nothing and does not modify the KV cache. Tensors may be on the
    ``meta`` device. ``device`` may name a GPU that this machine does not have ("MI300X").

    The result can be printed; its ``as_dict()`` returns plain data. ``explain`` raises the same
    errors as these functions, except ``UnsupportedProblem``.
    """
    build: Callable[..., Request] = requests.dense
    if "max_seqlen_k" in same:
        build = requests.varlen
    elif any(name.startswith("cache_") or name in ("page_table", "latent") for name in same):
        build = requests.kvcache
    # Behind q, k, v and what all share.
    own = dict(list(inspect.signature(build).parameters.items())[4:])
    allowed = (*Shared._fields, *own)
    unknown = {name: value for name, value in same.items() if name not in allowed}
    validate.refuse_unknown("explain", unknown, allowed)
    for name, parameter in own.items():
        if parameter.default is inspect.Parameter.empty and name not in same:
            raise TypeError(f"{name}: expected it with max_seqlen_k, as in attention_varlen")
    if "latent" in same:
        same["latent"] = validate.flag("latent", same["latent"])
    shared = Shared(**{name: same.pop(name) for name in Shared._fields if name in same})
    request = build(q, k, v, shared, **same)
    if request.call.latent:
        validate_cache.one_head(request.call.k)
    return dispatch.explain(
        request.call, *request.who, device=None if device is None else devices.by_name(device)
    )
