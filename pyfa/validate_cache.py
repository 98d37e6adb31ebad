"""Checks for arguments that only a KV cache has: pages, rows, appended keys, rotary tables."""

from __future__ import annotations

import torch

from .validate import UNLIMITED, a_tensor, integers, length, wrong


def pages(page_table: torch.Tensor, batch: int, k: torch.Tensor, name: str = "k") -> None:
    """Check ``page_table``: int32 (batch, pages) for k (num_pages, page_size, heads, head_dim).
    ``name``: what error messages call k."""
    a_tensor("page_table", page_table)
    if page_table.dim() != 2:
        wrong("page_table", "2 dimensions (batch, pages)", page_table)
    integers("page_table", page_table, (batch, page_table.shape[1]), k)
    if k.shape[1] == 0:
        wrong(name, "pages of one key or more", k)


def _is_readable(x: torch.Tensor) -> bool:
    """Return whether the CPU can read the values of ``x`` now."""
    return x.is_cpu and not torch.compiler.is_compiling() and type(x) is torch.Tensor


def check_numbers(numbers: torch.Tensor, used: torch.Tensor, num_pages: int) -> None:
    """Raise ``ValueError`` if the CPU can read page numbers and a ``used`` one is outside the
    cache."""
    if _is_readable(numbers):
        outside = numbers[used & ((numbers < 0) | (numbers >= num_pages))]
        if outside.numel():
            wrong("page_table", f"pages from 0 to {num_pages - 1}", int(outside[0]))


def check_index(name: str, index: torch.Tensor, of: torch.Tensor) -> None:
    """Check an int32 ``index`` (batch,) of rows of ``of``, as far as the CPU can read it."""
    a_tensor(name, index)
    integers(name, index, (index.numel(),), of)
    if _is_readable(index) and index.numel():
        least, most = int(index.min()), int(index.max())
        if least < 0 or most >= of.shape[0]:
            wrong(name, f"values from 0 to {of.shape[0] - 1}", least if least < 0 else most)


def check_written(
    page_table: torch.Tensor, start: torch.Tensor, new: int, cache: torch.Tensor
) -> None:
    """Call ``check_numbers`` for the pages to which ``new`` rows of each sequence are written, from
    ``start`` on."""
    if _is_readable(page_table):
        size = cache.shape[1]
        first = torch.arange(page_table.shape[1], device=page_table.device) * size
        start = start[:, None]
        written = (first + size > start) & (first < start + new)
        check_numbers(page_table, written, cache.shape[0])


def where(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: int,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    page_table: torch.Tensor | None,
    names: tuple[str, str] = ("q", "k_cache"),
) -> None:
    """Check the arguments that say where each of ``batch`` sequences is stored in the cache.
    ``names``: what error messages call q and the cache."""
    of_q, name = names
    if page_table is not None:
        pages(page_table, batch, cache, name)
        if cache_batch_idx is not None:
            wrong("cache_batch_idx", "None with page_table, whose rows name the pages", "a tensor")
    elif cache_batch_idx is None and cache.shape[0] != batch:
        or_index = " (or cache_batch_idx)" if name == "k_cache" else ""
        wrong(name, f"{of_q}'s batch size {batch}{or_index}", cache)
    for index_name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            integers(index_name, x, (batch,), q)


def one_head(cache: torch.Tensor) -> None:
    """Check that a latent cache has one head."""
    layout = "(batch, seqlen, 1, head_dim) or (num_pages, page_size, 1, head_dim)"
    if cache.dim() != 4 or cache.shape[2] != 1:
        wrong("cache", f"one head for all queries, {layout}", cache)


def capacity(keys: int) -> None:
    """Raise ``ValueError`` if a sequence of the cache has more ``keys`` than kernels can count."""
    if keys > UNLIMITED:
        wrong("k_cache", f"at most {UNLIMITED} keys of a sequence", keys)


def lengths(
    cache_seqlens: int | torch.Tensor | None, batch: int, q: torch.Tensor
) -> torch.Tensor | None:
    """Return ``cache_seqlens`` as int32 (batch,) on q's device, or None if it was not given."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, torch.Tensor):
        integers("cache_seqlens", cache_seqlens, (batch,), q)
        return cache_seqlens
    each = length("cache_seqlens", cache_seqlens)
    return torch.full((batch,), each, dtype=torch.int32, device=q.device)


def cached(name: str, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Check that ``x`` can be stored in a cache of this dtype without conversion."""
    if x.dtype != dtype or x.device != device:
        wrong(name, f"the cache's dtype {dtype} and device {device}", x)


def writable(name: str, cache: torch.Tensor) -> None:
    """Raise ``ValueError`` if ``cache`` cannot be appended to, before a row is written."""
    compiling = torch.compiler.is_compiling()  # which cannot trace these questions
    if not compiling and cache.is_inference() and not torch.is_inference_mode_enabled():
        wrong(name, "a tensor that can be changed here, not one created in inference_mode", cache)
    if not compiling and cache.is_neg():
        wrong(name, "a tensor without the negative bit", cache)
    if any(size > 1 and not step for size, step in zip(cache.shape, cache.stride(), strict=True)):
        wrong(name, "elements that do not share memory", f"strides {cache.stride()}")


def new_rows(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    used: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: int,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the append: k (batch, new, Hk, D), v (batch, new, Hk, Dv), and their positions. Packed
    with ``cu_seqlens``: k (total_new, Hk, D), v (total_new, Hk, Dv)."""
    if k is None or v is None:
        wrong("k" if k is None else "v", "k and v together: a call appends both", None)
    if used is None:
        wrong("cache_seqlens", "the number of keys before the new ones", None)
    if cu_seqlens is not None:
        integers("cu_seqlens_new", cu_seqlens, (batch + 1,), q)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        a_tensor(name, x)
        heads, dim = cache.shape[2:]
        lead = (batch, x.shape[1]) if cu_seqlens is None and x.dim() > 1 else k.shape[:1]
        if x.shape != (*lead, heads, dim):
            many = f"{batch}, new" if cu_seqlens is None else "total_new"
            hint = "" if cu_seqlens is None else " with cu_seqlens_new"
            wrong(name, f"shape ({many}, {heads}, {dim}){hint}", x)
        cached(name, x, cache.dtype, q.device)
        writable(f"{name}_cache", cache)
    if cu_seqlens is None and v.shape[1] != k.shape[1]:
        wrong("v", f"as many new rows as k, {k.shape[1]}", v)
    return k, v, used


def tree(mask: torch.Tensor, q: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
    """Return ``tree_mask`` as (batch or 1, rows, rows). Raises ``ValueError`` or ``TypeError`` if
    it is not a boolean tensor of such a shape on q's device."""
    a_tensor("tree_mask", mask)
    if mask.dtype != torch.bool:
        wrong("tree_mask", "dtype bool", mask)
    if mask.device != q.device:
        wrong("tree_mask", f"q's device {q.device}", mask)
    if tuple(mask.shape) not in ((rows, rows), (1, rows, rows), (batch, rows, rows)):
        wrong("tree_mask", f"shape ({batch}, {rows}, {rows}) or ({rows}, {rows})", mask)
    mask = mask if mask.dim() == 3 else mask[None]
    return mask if rows < 2 or mask.stride(2) == 1 else mask.contiguous()


def check_room(used: torch.Tensor | None, new: int | torch.Tensor, capacity: int) -> None:
    """Call ``room`` if the CPU can read the lengths."""
    if used is not None and _is_readable(used):
        room(used, new, capacity)


def room(used: torch.Tensor, new: int | torch.Tensor, capacity: int) -> None:
    """Raise ``ValueError`` if lengths are negative or, plus ``new`` keys, exceed the capacity."""
    if not used.numel():
        return
    least, most = int(used.min()), int((used + new).max())
    if least < 0 or most > capacity:
        counts = new.tolist() if isinstance(new, torch.Tensor) else new
        more = f" (with {counts} new keys)" if counts else ""
        wrong("cache_seqlens", f"lengths from 0 to {capacity}{more}", used.tolist())


def rotary(
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    seqlens: torch.Tensor | None,
    batch: int,
    longest_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check cos and sin: (max_position, R), with equal shapes, 2·R ≤ head_dim and a row for each
    position."""
    if cos is None and sin is None:
        wrong("rotary_seqlens", "None without rotary_cos and rotary_sin", "a tensor")
    if cos is None or sin is None:
        wrong("rotary_cos" if cos is None else "rotary_sin", "rotary_cos and rotary_sin", None)
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        a_tensor(name, x)
        if x.dim() != 2 or x.shape != cos.shape or not x.is_floating_point():
            wrong(name, "floating point (max_position, R), the same for cos and sin", x)
        if x.device != q.device:
            wrong(name, f"q's device {q.device}", x)
    if 2 * cos.shape[1] > q.shape[-1]:
        wrong("rotary_cos", f"at most head_dim / 2 = {q.shape[-1] // 2} columns", cos)
    if seqlens is not None:
        integers("rotary_seqlens", seqlens, (batch,), q)
    elif cos.shape[0] < longest_k:
        wrong("rotary_cos", f"a row for each of the cache's {longest_k} positions", cos)
    return cos.resolve_neg(), sin.resolve_neg()  # kernels go by the address


def check_positions(start: torch.Tensor, rows: int | torch.Tensor, cos: torch.Tensor) -> None:
    """Call ``positions`` if the CPU can read ``start``."""
    if _is_readable(start):
        positions(start, rows, cos)


def positions(start: torch.Tensor, rows: int | torch.Tensor, cos: torch.Tensor) -> None:
    """Raise ``ValueError`` if the rotary tables have no row for one of a sequence's ``rows``
    positions from ``start`` on."""
    ends = start.long() + rows
    used = ends > start
    if not used.any():
        return
    least, most = int(start[used].min()), int(ends[used].max()) - 1
    if not 0 <= least <= most < cos.shape[0]:
        expected = f"positions from 0 to {cos.shape[0] - 1}, the rows of rotary_cos"
        wrong("rotary_seqlens", expected, f"{least} to {most}")
