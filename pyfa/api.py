"""The public functions: checked arguments in, one ``Call`` out, and the shortest way to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import device as devices
from . import dispatch, ops, validate
from .problem import Call
from .validate import Window

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Backends = str | Sequence[str] | None


class _Request(NamedTuple):
    """A call with who may run it and what needs a gradient."""

    call: Call
    wanted: str
    needs_grad: bool
    bias_grad: bool


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    descale: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """Exact attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    Returns out (B, Sq, H, Dv) in q's dtype; with ``return_lse`` also the log-sum-exp of each row's
    scores, (B, H, Sq), float32, natural logarithm. H must be a multiple of Hk (GQA, MQA); D and Dv
    lie in 1 … 256. Dtypes: float16, bfloat16, float32. Gradients flow to q, k, v, a float ``bias``,
    ``sinks``, and from the LSE.

    score = softcap(scale · q·k) − slope · |i + Sk − Sq − j| + bias, then masks, then softmax.

    Parameters
    ----------
    causal, window
        Aligned to the bottom right: query i sees key j when j ≤ i + Sk − Sq. ``window`` is
        (left, right) in keys, None or −1 for unlimited; with ``causal`` right is at most 0.
    scale
        Any finite number; 1/√D by default.
    softcap
        c in c·tanh(x/c); 0 for none.
    bias
        Broadcasts to (B, H, Sq, Sk). A boolean one hides where it is False.
    alibi_slopes
        (H,) or (B, H). No gradient.
    sinks
        (H,): one more logit for each head, without a value (GPT-OSS).
    dropout_p, seed
        0 ≤ p < 1. The same bits on every backend for an int seed or a one-element int64 tensor on
        the device; None draws one on the device from torch's generator. LSE is before dropout.
    descale, out_dtype
        Scales and output dtype of float8 inputs.
    deterministic
        Bitwise equal gradients from run to run; also by torch's global switch.
    backend
        A name or an ordered list of names; nothing else is tried. Otherwise ``use_backend``,
        ``PYFA_BACKEND``, and then the fastest that can.

    Raises ``ValueError`` or ``TypeError`` naming the argument that is wrong, ``UnsupportedProblem``
    with every backend's reasons when none can run it. A row that sees nothing gives output 0,
    LSE −inf and zero gradients.

    Source: Dao et al. 2022 and Dao 2023 (FlashAttention, FlashAttention-2).
    """
    if unknown:
        validate.refuse_unknown("attention", unknown, attention.__kwdefaults__)
    request = _dense(
        q, k, v, causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed,
        descale, out_dtype, deterministic, return_lse, backend,
    )  # fmt: skip
    return _run(request)


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
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    descale: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """``attention`` on packed sequences: q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv).

    Sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b+1]`` (int32, (B+1,)); ``max_seqlen`` are
    Python ints and must not be exceeded. ``seqused`` (B,) int32 uses only the first rows of a
    sequence: queries beyond give output 0, LSE −inf, gradient 0. With ``page_table``
    (B, pages) int32, k and v are (num_pages, page_size, Hk, D), the lengths come from ``seqused_k``
    or else from the differences of ``cu_seqlens_k``, which may then be None.

    Returns out (total_q, H, Dv), and LSE (H, total_q). ``bias`` is (H | 1, max_seqlen_q,
    max_seqlen_k) with indices inside each sequence; dropout counts inside each sequence too.
    Everything else, and what is raised, as ``attention``. Offsets and lengths that lie outside
    their tensors raise ``ValueError`` on the CPU always, on a GPU under ``PYFA_CHECK=1``.
    """
    if unknown:
        validate.refuse_unknown("attention_varlen", unknown, attention_varlen.__kwdefaults__)
    request = _varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        page_table, causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed,
        descale, out_dtype, deterministic, return_lse, backend,
    )  # fmt: skip
    return _run(request)


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
    page_table: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: torch.Tensor | None = None,
    num_splits: int = 0,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    descale: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """Attention of q (B, Sq, H, D) over a cache, after appending k and v to it in place.

    ``k_cache`` (B_cache, S, Hk, D) and ``v_cache``, or (num_pages, page_size, Hk, D) with
    ``page_table`` (B, pages) int32. ``cache_seqlens``, an int or (B,) int32, is what the cache
    holds before the append (all of it by default); new ``k`` (B, S_new, Hk, D) and ``v`` go right
    behind and are visible to the queries. ``cache_batch_idx`` (B,) int32 names each sequence's row
    in the cache; ``cache_leftpad`` (B,) int32 its first valid key, from which positions count.
    Packed queries are (total_q, H, D) with ``cu_seqlens_q`` and ``max_seqlen_q``.

    ``rotary_cos`` and ``rotary_sin`` (max_position, R) rotate q and the new k by their position in
    the cache, or from ``rotary_seqlens`` (B,) int32 on; without a causal mask or window all queries
    share the first position, as in flash-attention. ``rotary_interleaved`` pairs elements 2i and
    2i+1 (GPT-J), otherwise i and i+R (GPT-NeoX). ``num_splits``: 0 lets the plan choose.

    No dropout and no gradient: ``ValueError`` where an input requires one. The rest as
    ``attention``. Lengths and pages outside the cache raise ``ValueError`` on the CPU always, on a
    GPU under ``PYFA_CHECK=1``, where otherwise new rows beyond the cache's end are dropped.
    """
    if unknown:
        validate.refuse_unknown("attention_kvcache", unknown, attention_kvcache.__kwdefaults__)
    request = _kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, cu_seqlens_q,
        max_seqlen_q, page_table, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
        num_splits, causal, window, scale, softcap, bias, alibi_slopes, sinks, descale, out_dtype,
        return_lse, backend, append=True,
    )  # fmt: skip
    return _run(request)


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: str | None = None, **same: Any
) -> dispatch.Explanation:
    """Who would run this attention, with which plan, and why the others would not.

    Takes the arguments of ``attention``, of ``attention_varlen`` (recognised by ``cu_seqlens_k`` or
    ``max_seqlen_k``) or of ``attention_kvcache`` (by any ``cache_…`` argument), as keywords; the
    tensors may be on the ``meta`` device. ``device`` names a GPU that need not be here ("MI300X").
    Nothing is computed and no cache is written. Printable, and plain data by ``as_dict()``.
    Raises as they do, but never ``UnsupportedProblem``.
    """
    if "cu_seqlens_k" in same or "max_seqlen_k" in same:
        build, function = _varlen, attention_varlen
    elif any(name.startswith("cache_") or name == "page_table" for name in same):
        build, function = _kvcache, attention_kvcache
        same["append"] = False
    else:
        build, function = _dense, attention
    defaults: dict[str, Any] = function.__kwdefaults__
    allowed = build.__code__.co_varnames[3 : build.__code__.co_argcount]
    unknown = {name: value for name, value in same.items() if name not in allowed}
    if unknown:
        validate.refuse_unknown("explain", unknown, allowed)
    arguments = {name: defaults[name] for name in allowed if name in defaults} | same
    request = build(q, k, v, **arguments)
    return dispatch.explain(*request, devices.by_name(device) if device else None)


def _run(request: _Request) -> Result:
    call = request.call
    if request.needs_grad or not _is_plain(call.q):
        out, lse = torch.ops.pyfa.forward(*call, *request[1:])
    else:
        # Inference needs no operator: PyTorch's dispatcher would double the host time.
        out, lse = dispatch.prepare(*request).forward(call)
    return (out, lse) if call.return_lse else out


def _is_plain(q: torch.Tensor) -> bool:
    """Whether nobody watches: no compiler, no tensor subclass, no mode, no functional transform."""
    return (
        not torch.compiler.is_compiling()
        and type(q) is torch.Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    seed: int | torch.Tensor | None,
    descale: object,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    return_lse: bool,
    backend: Backends,
) -> _Request:
    q, k, v = _autocast(q, k, v)
    validate.qkv(q, k, v, (4, 4))
    if k.shape[0] != q.shape[0]:
        validate._wrong("k", f"q's batch size {q.shape[0]}", k)
    return _request(
        Call(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1]),
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, descale,
        out_dtype, deterministic, return_lse, backend,
    )  # fmt: skip


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    seed: int | torch.Tensor | None,
    descale: object,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    return_lse: bool,
    backend: Backends,
) -> _Request:
    q, k, v = _autocast(q, k, v)
    validate.qkv(q, k, v, (3, 3 if page_table is None else 4))
    validate.offsets("cu_seqlens_q", cu_seqlens_q, q)
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        validate.integers("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q)
    for name, lengths in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if lengths is not None:
            validate.integers(name, lengths, (batch,), q)
    if page_table is None:
        if cu_seqlens_k is None:
            validate._wrong("cu_seqlens_k", "offsets (int32) where there is no page_table", None)
    else:
        validate.pages(page_table, batch, k)
        if seqused_k is None:
            if cu_seqlens_k is None:
                validate._wrong("seqused_k", "lengths, or cu_seqlens_k, with page_table", None)
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    call = Call(
        q, k, v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        max_seqlen_q=validate.length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=validate.length("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip
    return _request(
        call, causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, descale,
        out_dtype, deterministic, return_lse, backend,
    )  # fmt: skip


def _kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    page_table: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
    rotary_seqlens: torch.Tensor | None,
    num_splits: int,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    descale: object,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    backend: Backends,
    append: bool,
) -> _Request:
    validate.qkv(q, k_cache, v_cache, (4 if cu_seqlens_q is None else 3, 4))
    validate.no_gradient(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "bias": bias,
         "sinks": sinks},
        "attention_kvcache has none",
    )  # fmt: skip
    if cu_seqlens_q is not None:
        validate.offsets("cu_seqlens_q", cu_seqlens_q, q)
        batch = cu_seqlens_q.shape[0] - 1
        longest_q = validate.length("max_seqlen_q", max_seqlen_q)
    else:
        batch, longest_q = q.shape[:2]
    used = validate.cache(
        q, k_cache, batch, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        num_splits,
    )  # fmt: skip
    longest_k = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if rotary_cos is not None or rotary_sin is not None:
        validate.rotary(q, rotary_cos, rotary_sin, rotary_seqlens, batch, longest_k)
        start = rotary_seqlens if rotary_seqlens is not None else used
        if start is None:
            start = torch.full((batch,), longest_k, dtype=torch.int32, device=q.device)
        moving = causal or window is not None
        positions = _query_positions(q, start, cu_seqlens_q, moving)
        q = torch.ops.pyfa.rotary(q, rotary_cos, rotary_sin, positions, rotary_interleaved)
        if k is not None:
            positions = start[:, None] + torch.arange(k.shape[1], device=k.device)
            k = torch.ops.pyfa.rotary(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    if k is not None:
        assert used is not None and v is not None
        if append:
            validate.check_append(used, k, longest_k)
            torch.ops.pyfa.append_kv(k_cache, v_cache, k, v, used, page_table, cache_batch_idx)
        used = used + k.shape[1]
    call = Call(
        q, k_cache, v_cache,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=used,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        num_splits=num_splits,
    )  # fmt: skip
    return _request(
        call, causal, window, scale, softcap, bias, alibi_slopes, sinks, 0.0, None, descale,
        out_dtype, False, return_lse, backend,
    )  # fmt: skip


def _query_positions(
    q: torch.Tensor, start: torch.Tensor, cu_seqlens_q: torch.Tensor | None, moving: bool
) -> torch.Tensor:
    """The rotary position of each query: (B, Sq), or (total_q,) where q is packed."""
    if cu_seqlens_q is None:
        steps = torch.arange(q.shape[1], device=q.device)
        return start[:, None] + (steps if moving else torch.zeros_like(steps))
    row = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    sequence = sequence.clamp(max=start.shape[0] - 1)
    first = start[sequence].long()
    return first + (row - cu_seqlens_q[sequence] if moving else 0)


def _request(
    call: Call,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    seed: int | torch.Tensor | None,
    descale: object,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    return_lse: bool,
    backend: Backends,
) -> _Request:
    """What all layouts share: masks, score terms, dropout, gradients, choice of backend."""
    q, k, v = call.q, call.k, call.v
    left, right = validate.window(window, causal)
    scale, softcap, dropout_p = validate.scalars(scale, q.shape[-1], softcap, dropout_p)
    validate.output(q, descale, out_dtype)
    heads, batch = q.shape[-2], call.batch
    if bias is not None:
        packed = call.cu_seqlens_q is not None
        sizes = (1 if packed else batch, heads, call.max_seqlen_q, call.max_seqlen_k)
        bias = validate.bias(bias, q, sizes)
    if alibi_slopes is not None:
        validate.no_gradient({"alibi_slopes": alibi_slopes}, "slopes have none")
        alibi_slopes = validate.per_head("alibi_slopes", alibi_slopes, q, batch)
    if sinks is not None:
        sinks = validate.per_head("sinks", sinks, q, None)
    bias_grad = needs_grad = False
    if torch.is_grad_enabled():
        bias_grad = bias is not None and bias.requires_grad
        needs_grad = (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or bias_grad
            or (sinks is not None and sinks.requires_grad)
        )
    call = call._replace(
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=validate.seed(seed, q.device) if dropout_p else None,
        scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        return_lse=return_lse,
    )
    return _Request(call, dispatch.preference(backend), needs_grad, bias_grad)


def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in autocast's dtype where autocast is on for their device."""
    if isinstance(q, torch.Tensor) and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        if q.is_floating_point() and q.itemsize > 1:
            return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v
