"""From a public function's arguments to a checked ``Call``: one builder per layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import _torch, context, mods, validate, validate_cache, validate_fp8
from .blocks import given
from .dispatch import preference
from .problem import Append, Call, counted
from .validate import Window

Backends = str | Sequence[str] | None
# The scales of q, k and v; that of q is None for 16-bit queries.
Descale = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]

_NO_SCALES = validate_fp8.Scales(None, None, None, None)


class Shared(NamedTuple):
    """The arguments that every layout takes, as the public functions document them."""

    causal: bool = False
    window: Window = None
    scale: float | None = None
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: int | torch.Tensor | None = None
    descale: Descale | None = None
    out_dtype: torch.dtype | None = None
    deterministic: bool = False
    return_lse: bool = False
    backend: Backends = None
    batch_invariant: bool = False
    attention_chunk: int | None = None
    score_mod: mods.Mod | None = None
    mask_mod: mods.Mod | None = None
    block_mask: Any = None


class Request(NamedTuple):
    """A call, its append to a cache, the backends that may run it, and which inputs need a
    gradient."""

    call: Call
    wanted: str
    needs_grad: bool
    bias_grad: bool
    append: Append | None = None

    @property
    def who(self) -> tuple[str, bool, bool]:
        """Return the arguments of ``dispatch.prepare`` after the call."""
        return self.wanted, self.needs_grad, self.bias_grad


def _refuse_tracing() -> None:
    """Raise under torch.jit.trace: it records no loops over tiles, and its sizes are tensors, from
    which no plan can be made."""
    if not torch.compiler.is_compiling() and _torch.is_tracing():
        raise NotImplementedError("attention under torch.jit.trace; torch.compile can be used")


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: Shared, num_splits: int = 0
) -> Request:
    """Build ``attention``'s request."""
    _refuse_tracing()
    q, k, v = _autocast(q, k, v)
    validate.qkv(q, k, v, (4, 4))
    if k.shape[0] != q.shape[0]:
        validate.wrong("k", f"q's batch size {q.shape[0]}", k)
    validate.rows("q", q)
    validate.rows("k", k)
    return _request(q, k, v, shared, q.shape[0], q.shape[1], k.shape[1], num_splits=num_splits)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: Shared,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Request:
    """Build ``attention_varlen``'s request."""
    _refuse_tracing()
    q, k, v = _autocast(q, k, v)
    if page_table is not None:
        validate.a_tensor("page_table", page_table)  # before k, whose dimensions follow from it
    validate.qkv(q, k, v, (3, 3 if page_table is None else 4))
    validate.offsets("cu_seqlens_q", cu_seqlens_q, q)
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        validate.integers("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q)
    for name, lengths in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if lengths is not None:
            validate.integers(name, lengths, (batch,), q)
    if page_table is not None:
        validate_cache.pages(page_table, batch, k)
        if seqused_k is None:
            if cu_seqlens_k is None:
                validate.wrong("seqused_k", "lengths, or cu_seqlens_k, with page_table", None)
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    elif cu_seqlens_k is None:
        validate.wrong("cu_seqlens_k", "offsets (int32) without page_table", None)
    return _request(
        q,
        k,
        v,
        shared,
        batch,
        validate.length("max_seqlen_q", max_seqlen_q),
        validate.length("max_seqlen_k", max_seqlen_k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        num_splits=num_splits,
    )


def kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shared: Shared,
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
    latent: bool = False,
    topk: bool = False,
    cu_seqlens_new: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> Request:
    """Build ``attention_kvcache``'s request; nothing is written yet. ``latent`` and ``topk`` are
    the fields of ``Call``; the caller ensures the conditions that ``Call`` states for them."""
    _refuse_tracing()
    dims = (4 if cu_seqlens_q is None else 3, 4)
    # The values of a latent cache are a view of the keys.
    names = ("cache", "cache") if latent else ("k_cache", "v_cache")
    validate.qkv(q, k_cache, v_cache, dims, names)
    caches = dict(zip(names, (k_cache, v_cache), strict=True))
    needless = {"q": q, **caches, "k": k, "v": v}
    needless |= {"bias": shared.bias, "sinks": shared.sinks}
    needless |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    name = "attention_latent" if latent else "attention_kvcache"
    validate.no_gradient(needless, f"{name} has none")
    if cu_seqlens_q is not None:
        validate.offsets("cu_seqlens_q", cu_seqlens_q, q)
        batch = cu_seqlens_q.shape[0] - 1
        longest_q = validate.length("max_seqlen_q", max_seqlen_q)
    else:
        if max_seqlen_q is not None:
            validate.wrong("max_seqlen_q", "None without cu_seqlens_q", max_seqlen_q)
        validate.rows("q", q)
        batch, longest_q = q.shape[:2]
    validate_cache.where(
        q, k_cache, batch, cache_batch_idx, cache_leftpad, page_table, ("q", names[0])
    )
    used = validate_cache.lengths(cache_seqlens, batch, q)
    interleaved = validate.flag("rotary_interleaved", rotary_interleaved)
    longest_k = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    validate_cache.capacity(longest_k)
    appends = k is not None or v is not None
    if appends:
        k, v, used = validate_cache.new_rows(k, v, used, q, k_cache, v_cache, batch, cu_seqlens_new)
    elif cu_seqlens_new is not None:
        validate.wrong("cu_seqlens_new", "None without k and v", cu_seqlens_new)
    new: int | torch.Tensor = 0
    if k is not None:
        new = k.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff()
    validate_cache.check_room(used, new, longest_k)
    append = None
    if not (rotary_cos is rotary_sin is rotary_seqlens is None):
        cos, sin = validate_cache.rotary(
            q, rotary_cos, rotary_sin, rotary_seqlens, batch, longest_k
        )
        start = rotary_seqlens
        if start is None and used is None:
            start = torch.full((batch,), longest_k, dtype=torch.int32, device=q.device)
        moving = validate.flag("causal", shared.causal)
        chunk = validate.attention_chunk(shared.attention_chunk)
        moving = moving or shared.window is not None or chunk > 0
        append = Append(None, None, cos, sin, start, None, interleaved, moving)
        first = used if start is None else start
        assert first is not None
        rows = q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
        validate_cache.check_positions(first, rows if moving else rows > 0, cos)
        if k is not None:
            validate_cache.check_positions(first, new, cos)
    if appends:
        append = (append or Append())._replace(k=k, v=v, cu_seqlens=cu_seqlens_new)
    request = _request(
        q,
        k_cache,
        v_cache,
        shared,
        batch,
        longest_q,
        longest_k,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=used,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        num_splits=num_splits,
    )
    if request.needs_grad:  # the other inputs were refused above
        raise ValueError(
            "score_mod: expected captured tensors that require no gradient, since "
            "attention_kvcache has none; capture x.detach()"
        )
    if tree_mask is not None:
        if shared.bias is not None:
            validate.wrong(
                "tree_mask", "None with bias, which can mask the new rows too", tree_mask
            )
        mask = validate_cache.tree(tree_mask, q, batch, longest_q)
        request = request._replace(call=request.call._replace(bias=mask, tree=True))
    if latent:
        request = request._replace(call=request.call._replace(latent=True, topk=topk))
    return request._replace(append=append)


def appended(call: Call, append: Append) -> Call:
    """Return ``call`` with rotated queries and an extended cache, by PyTorch operators."""
    if call.batch == 0:  # packed rows, if there are any, belong to no sequence
        return counted(call, append)
    q, k, v = call.q, append.k, append.v
    begin, where = call.seqused_k, (call.page_table, call.cache_batch_idx)
    rows = None
    if append.cu_seqlens is not None and k is not None and v is not None:
        assert begin is not None
        rows = _packed_rows(append.cu_seqlens, k.shape[0], begin, call.max_seqlen_k)
        k, v = (x[rows.number][:, None] for x in (k, v))
        where = _of_each(call, rows.sequence)
    if append.cos is not None and append.sin is not None:
        start = begin if append.start is None else append.start
        assert start is not None
        tables = append.cos, append.sin
        positions = _query_positions(q, start, call.cu_seqlens_q, append.moving)
        q = torch.ops.pyfa.rotary(q, *tables, positions, append.interleaved)
        if k is not None:
            if rows is None:
                positions = start[:, None] + torch.arange(k.shape[1], device=k.device)
            else:
                positions = (start[rows.sequence] + rows.inside)[:, None]
            k = torch.ops.pyfa.rotary(k, *tables, positions, append.interleaved)
    if k is not None:
        at = begin if rows is None else rows.start
        torch.ops.pyfa.append_kv(call.k, call.v, k, v, at, *where)
    return counted(call, append)._replace(q=q)


class _Rows(NamedTuple):
    """Packed new rows: which row is written, its sequence, its index in the sequence, and its
    position in the cache."""

    number: torch.Tensor
    sequence: torch.Tensor
    inside: torch.Tensor
    start: torch.Tensor


def _packed_rows(cu_seqlens: torch.Tensor, total: int, begin: torch.Tensor, capacity: int) -> _Rows:
    """Return each row as a sequence of its own, which all backends can append, without waiting for
    the device.

    A row of no sequence, or beyond the end of the cache, is replaced by a copy of another row,
    which is then written twice with the same values.
    """
    offsets, used = cu_seqlens.long(), cu_seqlens[-1:].long()
    number = torch.arange(total, device=begin.device).minimum((used - 1).clamp(min=0))
    sequence = torch.searchsorted(offsets[1:], number, right=True)
    sequence = sequence.clamp(max=max(begin.shape[0] - 1, 0))
    first = begin.long()[sequence]
    inside = (number - offsets[sequence]).minimum((capacity - 1 - first).clamp(min=0))
    start = torch.where(used > 0, first + inside, capacity)
    return _Rows(offsets[sequence] + inside, sequence, inside, start.int())


def _of_each(call: Call, sequence: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return page table and cache index of each row of ``sequence``."""
    if call.page_table is not None:
        return call.page_table[sequence], None
    index = call.cache_batch_idx
    return None, sequence.int() if index is None else index[sequence]


def _query_positions(
    q: torch.Tensor, start: torch.Tensor, cu_seqlens_q: torch.Tensor | None, moving: bool
) -> torch.Tensor:
    """Return the rotary position of each query: (B, Sq), or (total_q,) if q is packed."""
    if cu_seqlens_q is None:
        steps = torch.arange(q.shape[1], device=q.device)
        return start[:, None] + (steps if moving else torch.zeros_like(steps))
    row = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    sequence = sequence.clamp(max=start.shape[0] - 1)
    first = start[sequence].long()
    return first + (row - cu_seqlens_q[sequence] if moving else 0)


def _request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: Shared,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Request:
    """Build the parts that all layouts share: masks, score terms, dropout, gradients, choice of
    backend."""
    (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, descale,
        out_dtype, deterministic, return_lse, backend, batch_invariant, attention_chunk,
        score_mod, mask_mod, block_mask,
    ) = shared  # fmt: skip
    left, right, shift = validate.window(window, causal)
    num_splits = validate.splits(num_splits)
    deterministic = validate.flag("deterministic", deterministic)
    invariant = validate.flag("batch_invariant", batch_invariant) or context.is_batch_invariant()
    if invariant:
        # Atomics add in any order; keys are never split.
        deterministic, num_splits = True, validate.only_part(num_splits)
    scale, softcap, dropout_p = validate.scalars(scale, q.shape[-1], softcap, dropout_p)
    scales = _NO_SCALES
    if k.dtype.itemsize == 1:
        more = {"bias": bias, "sinks": sinks}
        scales = validate_fp8.scales(descale, out_dtype, q, k, v, batch, more)
    elif descale is not None or out_dtype is not None:
        validate.output(q, descale, out_dtype)
    needs_grad = torch.is_grad_enabled()
    bias_grad = False
    if bias is not None:
        sizes = (1 if cu_seqlens_q is not None else batch, q.shape[-2], max_seqlen_q, max_seqlen_k)
        bias = validate.bias(bias, q, sizes)
        bias_grad = needs_grad and bias.requires_grad
    if alibi_slopes is not None:
        validate.no_gradient({"alibi_slopes": alibi_slopes}, "slopes have none")
        alibi_slopes = validate.per_head("alibi_slopes", alibi_slopes, q, batch)
    if sinks is not None:
        sinks = validate.per_head("sinks", sinks, q, None)
    if not dropout_p:
        validate.unused_seed(seed, q.device)
    digest = ""
    captured: tuple[torch.Tensor | None, ...] = ()
    if block_mask is not None:
        sizes_of_blocks = given.Sizes(batch, q.shape[-2], max_seqlen_q, max_seqlen_k)
        mask_mod = given.as_mask_mod(block_mask, mask_mod, q.device, sizes_of_blocks)
    if score_mod is not None or mask_mod is not None:
        digest, captured = mods.resolve(score_mod, mask_mod, q.device)
    needs_grad = needs_grad and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or bias_grad
        or (sinks is not None and sinks.requires_grad)
        or (bool(digest) and mods.has_wanted(digest))
    )
    slots: list[Any] = [*captured, *(None,) * (mods.MOST_CAPTURED - len(captured))]
    call = Call(
        q,
        k,
        v,
        bias,
        alibi_slopes,
        sinks,
        validate.seed(seed, q.device) if dropout_p else None,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        cache_batch_idx,
        cache_leftpad,
        scales.q,
        scales.k,
        scales.v,
        slots[0],
        slots[1],
        slots[2],
        slots[3],
        slots[4],
        slots[5],
        slots[6],
        slots[7],
        max_seqlen_q,
        max_seqlen_k,
        scale,
        left,
        right,
        softcap,
        dropout_p,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        validate.flag("return_lse", return_lse),
        num_splits,
        invariant,
        scales.out_dtype,
        mods=digest,
        window_shift=shift,
        attention_chunk=validate.attention_chunk(attention_chunk),
    )
    return Request(call, preference(backend), needs_grad, bias_grad)


def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v in autocast's dtype if autocast is on for their device."""
    kind = q.device.type if isinstance(q, torch.Tensor) else "meta"
    # torch knows no autocast for meta tensors, and says so by an error.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if _is_cast(x) else x for x in (q, k, v))
    return q, k, v


def _is_cast(x: Any) -> bool:
    """Return whether autocast casts ``x``: not float64, as in PyTorch, and not float8, which has
    scales. The checks refuse what is no tensor."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize in (2, 4)
