"""Latent attention (MLA with absorbed weights): a cache of one head whose first elements are also
the values.

Sources: DeepSeek-AI 2024, "DeepSeek-V2"; sparse attention by ``indices``, DeepSeek-AI 2025,
"DeepSeek-V3.2-Exp".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import request as requests
from . import validate, validate_cache
from .binding import LATENT, Result, again, first
from .request import Backends, Request, Shared

Queries = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_SCALE = (
    "a number: the model's softmax scale before absorption, (qk_nope_head_dim + qk_rope_head_dim) "
    "** -0.5 (times mscale ** 2 with YaRN); for DeepSeek-V3 192 ** -0.5, not 576 ** -0.5"
)


def attention_latent(
    q: Queries,
    cache: torch.Tensor,
    *,
    v_dim: int = 512,
    page_table: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    topk_lengths: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    descale: tuple[torch.Tensor | None, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """Compute attention of q (B, Sq, H, D) over a latent cache, as in multi-head latent attention
    with absorbed weights (DeepSeek-V3).

    The cache has one KV head. The first ``v_dim`` elements of each key are its value. D is up to
    576: in DeepSeek-V3, 512 latent elements and 64 rotary elements. Returns out (B, Sq, H, v_dim);
    with ``return_lse`` it returns (out, lse), lse (B, H, Sq). There is no gradient.

    Parameters
    ----------
    q
        One tensor, or a tuple (nope (B, Sq, H, v_dim), rope (B, Sq, H, D − v_dim)).
    cache, page_table
        The cache (B, Sk, 1, D), or pages (num_pages, page_size, 1, D) with ``page_table`` (B,
        pages) int32. ``append_latent`` appends new tokens.
    cache_seqlens
        An int or (B,) int32: the number of keys of each sequence, including new ones. By default
        all keys of the cache are used.
    scale
        Required, because it cannot be derived from D. It is the model's (qk_nope_head_dim +
        qk_rope_head_dim) ** -0.5 (192 ** -0.5 for DeepSeek-V3), times mscale² if YaRN is used.
    indices, topk_lengths
        ``indices`` (B, Sq, topk) int32 lists the keys that each query token sees (the same keys for
        all its heads), as positions in the token's sequence. Negative entries, and entries beyond
        the sequence's end, list no key. A key listed twice is counted twice, as in FlashMLA.
        ``topk_lengths`` (B,) or (B, Sq) int32 says how many entries of a token's list are read,
        counted from the start of the list. With ``causal``, keys after the token's own position are
        masked, too.
    causal, sinks, num_splits, backend
        As in ``attention_kvcache``.
    descale, out_dtype
        For a float8 cache: a tuple of float32 scales, first those of q (or None), then those of the
        cache. Each has shape (), (1,) or (B, 1), or one scale per block of the cache's rows as in
        ``attention``. Scales per block cannot be combined with ``indices``. With float8 q,
        ``out_dtype`` is bfloat16 (default) or float16.

    Notes
    -----
    Errors are as in ``attention_kvcache``.
    """
    if unknown:
        validate.refuse_unknown("attention_latent", unknown, attention_latent)
    if scale is None:
        raise TypeError(f"scale: expected {_SCALE}; got None")
    if isinstance(q, (tuple, list)):
        q = _joined(q, v_dim)
    _check(cache, v_dim)
    _check_rows("q", q, cache)
    whole = None
    if descale is not None:
        whole = _scales_of(descale)
    if indices is None:
        if topk_lengths is not None:
            validate.wrong("topk_lengths", "None without indices", topk_lengths)
        asked = _Asked(q, cache, page_table, cache_seqlens, causal, whole)
    else:
        asked = _of_lists(q, cache, indices, topk_lengths, page_table, cache_seqlens, causal, whole)
    values = asked.cache[..., :v_dim]
    tensors: tuple[Any, ...] = (asked.q, asked.cache, values)
    given = LATENT
    for place, x in enumerate((sinks, asked.cache_seqlens, asked.page_table)):
        if x is not None:
            tensors += (x,)
            given += 1 << place
    if whole is not None:
        tensors += tuple(x for x in asked.scales if x is not None)
        given += 8 << (whole[0] is not None)
    key = (
        given, asked.causal, scale, out_dtype, num_splits, return_lse, backend, indices is not None
    )  # fmt: skip
    result = again(key, tensors)
    if result is None:
        shared = Shared(
            causal=asked.causal, scale=scale, sinks=sinks, descale=asked.scales,
            out_dtype=out_dtype, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        request = _request(asked, values, shared, num_splits, indices is not None)
        result = first(key, tensors, request)
    return result if indices is None else _by_sequence(result, q.shape[0], q.shape[1], return_lse)


def append_latent(
    cache: torch.Tensor,
    new: Queries,
    cache_seqlens: int | torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    v_dim: int = 512,
) -> None:
    """Append new tokens to a latent cache, in place.

    ``new`` is (B, tokens, 1, D), or a tuple (latent (B, tokens, 1, v_dim), rope (B, tokens, 1, D −
    v_dim)). ``cache`` and ``page_table`` are as in ``attention_latent``. ``cache_seqlens`` is the
    number of keys before the append; pass the number after it to ``attention_latent``. There is no
    gradient: an input that requires one raises ``ValueError``. So do, on a CPU, tokens beyond the
    end of the cache and pages outside of it; on a GPU, tokens beyond the end are dropped.
    """
    _check(cache, v_dim)
    if isinstance(new, (tuple, list)):
        latent, rope = _pair("new", new)
        v_dim = latent.shape[-1]
        _check_rows("new", latent, cache, rope.shape[-1])
    else:
        _check_rows("new", new, cache)
        latent, rope = new[..., :v_dim], new[..., v_dim:]
    if latent.shape[2] != 1:
        validate.wrong("new", "one head, as in the cache", f"{latent.shape[2]} heads")
    for x in (latent, rope):
        validate_cache.cached("new", x, cache.dtype, cache.device)
        validate.no_gradient({"new": x, "cache": cache}, "append_latent has none")
    validate_cache.writable("cache", cache)
    batch = latent.shape[0]
    validate_cache.where(latent, cache, batch, None, None, page_table, ("new", "cache"))
    used = validate_cache.lengths(cache_seqlens, batch, cache)
    capacity = cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    validate_cache.check_room(used, latent.shape[1], capacity)
    if used is None:
        validate.wrong("cache_seqlens", "where to append the new tokens", None)
    if page_table is not None:
        validate_cache.check_written(page_table, used, latent.shape[1], cache)
    if rope.shape[-1] == 0:
        # The operator writes two tensors: the halves of one are as good as a latent and a rope.
        half = v_dim // 2
        latent, rope, v_dim = latent[..., :half], latent[..., half:], half
    parts = cache[..., :v_dim], cache[..., v_dim:]
    torch.ops.pyfa.append_kv(*parts, latent, rope, used, page_table, None)


class _Asked(NamedTuple):
    """The call in the form of ``attention_kvcache``, with ``cache`` as k."""

    q: torch.Tensor
    cache: torch.Tensor
    page_table: torch.Tensor | None
    cache_seqlens: Any
    causal: bool
    scales: Any


def _pair(name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if len(value) != 2:
        validate.wrong(name, "a tensor or a pair of them", f"{len(value)} tensors")
    for part in value:
        _check_layout(name, part)
    first, second = value
    if first.shape[:-1] != second.shape[:-1] or first.dtype != second.dtype:
        expected = f"shape {(*first.shape[:-1], 'rope')} and {first.dtype}"
        validate.wrong(f"{name}[1] (rope)", expected, second)
    return first, second


def _joined(q: Any, v_dim: Any) -> torch.Tensor:
    nope, rope = _pair("q", q)
    if isinstance(v_dim, int) and nope.shape[-1] != v_dim:
        validate.wrong("q[0] (nope)", f"v_dim = {v_dim} elements, absorbed", nope)
    return torch.cat((nope, rope), -1)


def _check_layout(name: str, x: torch.Tensor) -> None:
    validate.a_tensor(name, x)
    if x.dim() != 4:
        validate.wrong(name, "4 dimensions (batch, seqlen, heads, head_dim)", x)


def _check_rows(name: str, x: torch.Tensor, cache: torch.Tensor, of_rope: int = 0) -> None:
    """Check that ``x`` has the cache's layout and, together with a rope of ``of_rope`` elements,
    its head_dim."""
    _check_layout(name, x)
    dim = x.shape[-1] + of_rope
    if dim != cache.shape[-1]:
        validate.wrong(name, f"the cache's head_dim {cache.shape[-1]}", f"{dim} elements")


def _check(cache: torch.Tensor, v_dim: Any) -> None:
    """Check that ``cache`` has one head and that ``v_dim`` does not exceed its elements."""
    validate.a_tensor("cache", cache)
    if type(v_dim) is not int:
        raise TypeError(f"v_dim: expected an int; got {type(v_dim).__name__}")
    validate_cache.one_head(cache)
    if cache.shape[-1] > validate.MAX_HEAD_DIM:
        validate.wrong("cache", f"a head_dim from 1 to {validate.MAX_HEAD_DIM}", cache)
    most = min(cache.shape[-1], validate.MAX_HEAD_DIM_V)
    if not 1 <= v_dim <= most:
        validate.wrong("v_dim", f"1 to {most}, of the cache's {cache.shape[-1]} elements", v_dim)


def _scales_of(descale: Any) -> tuple[Any, Any, Any]:
    """Return the scales (for q, for k, for v); the last two are the cache's."""
    if not isinstance(descale, (tuple, list)) or len(descale) != 2:
        validate.wrong("descale", "two scales (q or None, cache)", descale)
    of_q, of_cache = descale
    return of_q, of_cache, of_cache


def _request(
    asked: _Asked, values: torch.Tensor, shared: Shared, num_splits: int, topk: bool
) -> Request:
    return requests.kvcache(
        asked.q, asked.cache, values, shared, cache_seqlens=asked.cache_seqlens,
        page_table=asked.page_table, num_splits=num_splits, latent=True, topk=topk,
    )  # fmt: skip


def _by_sequence(result: Result, batch: int, rows: int, return_lse: bool) -> Result:
    """Reshape the requested results of rows that were sequences: (B · Sq, 1, H, Dv) and (B · Sq, H,
    1)."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.view(batch, rows, *out.shape[2:])
    if lse is None:
        return out
    return out, lse.view(batch, rows, lse.shape[1]).transpose(1, 2).contiguous()


# ---- lists of keys ------------------------------------------------------------------------------


def _of_lists(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_lengths: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_seqlens: Any,
    causal: Any,
    scales: tuple[Any, Any, Any] | None,
) -> _Asked:
    """Return the arguments of a call in which each query row is a separate sequence. Its pages hold
    one key each, and its row of the page table lists the keys of ``indices`` that the row sees."""
    batch, rows = q.shape[:2]
    validate.a_tensor("indices", indices)
    if indices.dim() != 3:
        validate.wrong("indices", f"shape ({batch}, {rows}, topk)", indices)
    validate.integers("indices", indices, (batch, rows, indices.shape[2]), q)
    if topk_lengths is not None:
        validate.a_tensor("topk_lengths", topk_lengths)
        per_row = topk_lengths.dim() == 2
        validate.integers("topk_lengths", topk_lengths, (batch, rows)[: 1 + per_row], q)
    validate_cache.where(q, cache, batch, None, None, page_table, ("q", "cache"))
    causal = validate.flag("causal", causal)
    used = validate_cache.lengths(cache_seqlens, batch, q)
    capacity = cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    validate_cache.check_room(used, 0, capacity)
    seen = _seen(indices, topk_lengths, used, capacity, causal)
    keys = indices.long().where(seen, 0)
    if page_table is None:
        store = torch.arange(batch, device=q.device)[:, None, None]
    else:
        # For a row without keys the table may hold anything.
        columns = max(page_table.shape[1], 1)
        table = page_table if page_table.shape[1] else page_table.new_zeros(batch, 1)
        pages = (keys // cache.shape[1]).clamp(max=columns - 1)
        store = table.long().gather(1, pages.flatten(1)).view_as(pages)
        validate_cache.check_numbers(store, seen, cache.shape[0])
        keys = keys % cache.shape[1]
    flat, step_store, step_key = _rows_of(cache)
    places = (store * step_store + keys * step_key).int()
    # Entries that are not keys go to the end: compact lists, in their old order.
    topk = indices.shape[2]
    order = seen.cumsum(-1).sub_(1).where(seen, topk)
    lists = places.new_zeros(batch, rows, topk + 1).scatter_(2, order, places)
    return _Asked(
        q.reshape(batch * rows, 1, *q.shape[2:]),
        flat,
        lists.view(batch * rows, topk + 1)[:, :topk],
        seen.sum(-1, dtype=torch.int32).view(batch * rows),
        False,
        None if scales is None else tuple(_for_rows(x, batch, rows) for x in scales),
    )


def _seen(
    indices: torch.Tensor,
    topk_lengths: torch.Tensor | None,
    used: torch.Tensor | None,
    capacity: int,
    causal: bool,
) -> torch.Tensor:
    """Return which entries are keys that their row sees."""
    rows, topk = indices.shape[1:]
    limit: Any = capacity if used is None else used[:, None, None]
    seen: torch.Tensor = (indices >= 0) & (indices < limit)
    if causal:
        row = torch.arange(rows, device=indices.device)[:, None]
        seen &= indices <= row + (limit - rows)
    if topk_lengths is not None:
        ends = topk_lengths[:, None, None] if topk_lengths.dim() == 1 else topk_lengths[..., None]
        seen &= torch.arange(topk, device=indices.device) < ends
    return seen


def _rows_of(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return the cache as pages of one key, and the distances in such pages between its pages and
    between its keys.

    This needs no copy, even if the cache has gaps: a page begins at each multiple of the greatest
    common divisor of both strides.
    """
    store, key, _, element = cache.stride()
    stores, keys, _, dim = cache.shape
    if cache.numel() == 0:
        return cache.new_empty(0, 1, 1, dim), 0, 0
    unit = _gcd(store if stores > 1 else 0, key if keys > 1 else 0) or dim
    steps = (store // unit if stores > 1 else 0), (key // unit if keys > 1 else 0)
    count = (stores - 1) * steps[0] + (keys - 1) * steps[1] + 1
    validate_cache.capacity(count)
    flat = cache.as_strided((count, 1, 1, dim), (unit, unit, unit, element))
    return flat, *steps


def _gcd(a: int, b: int) -> int:
    """Implement ``math.gcd``, which torch.compile cannot trace for symbolic strides."""
    while b:
        a, b = b, a % b
    return a


def _for_rows(scale: Any, batch: int, rows: int) -> object:
    """Repeat a scale per sequence for each of its rows."""
    if not isinstance(scale, torch.Tensor) or scale.dim() < 2 or scale.shape[0] != batch:
        return scale
    if scale.dim() == 3:
        validate.wrong("descale", "scales per sequence with indices, no blocks of rows", scale)
    return torch.repeat_interleave(scale, rows, dim=0)
