"""Steps on a KV cache before attention: append with bounds, and rotary embedding."""

from __future__ import annotations

import torch

from ..common.calls import as_bits


def append_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
) -> None:
    """Write k and v (B, S, Hk, D) into the caches from ``start`` (B,) of each sequence, in place.

    Rows beyond the end of the cache are dropped.
    """
    batch, rows = k.shape[:2]
    device = k.device
    page_size = k_cache.shape[1]
    capacity = page_size if page_table is None else page_table.shape[1] * page_size
    begin = start.long()[:, None]
    # A row beyond the end is sent to the last place with what belongs there anyhow: the new row
    # that lands on it or, when all lie beyond, what the cache holds. No wait, no race.
    row = torch.arange(rows, device=device)[None, :].minimum((capacity - 1 - begin).clamp(min=0))
    position = (begin + row).clamp(max=capacity - 1)
    sequence = torch.arange(batch, device=device)[:, None]
    if page_table is not None:
        place = page_table[sequence, position // page_size].long()
        position = position % page_size
    else:
        place = sequence if cache_batch_idx is None else cache_batch_idx.long()[:, None]
    fits = (begin < capacity)[..., None, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache, new = as_bits(cache), as_bits(new)
        cache[place, position] = torch.where(fits, new[sequence, row], cache[place, position])


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotate the first 2·R elements of each head of x (…, heads, D) by ``positions`` (…).

    cos and sin are (max_position, R). Computed in float32; float8 is rounded again and clamped to
    its largest number. A position without a row in the tables gives NaN, as in the kernels. It
    raises no error, because unused rows after the last packed sequence may have such positions,
    too. Source: Su et al. 2021, "RoFormer".
    """
    half = cos.shape[-1]
    positions = positions.long()
    unknown = ((positions < 0) | (positions >= cos.shape[0]))[..., None, None]
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table.float()[positions][..., None, :] for table in (cos, sin))
    c = c.masked_fill(unknown, torch.nan)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.copy_(x)
    head, turned = x[..., : 2 * half].float(), out[..., : 2 * half]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        to_first, to_second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
        to_first, to_second = turned[..., :half], turned[..., half:]
    for to, values in (
        (to_first, first * c - second * s),
        (to_second, first * s + second * c),
    ):
        if x.itemsize == 1:
            most = torch.finfo(x.dtype).max
            values.clamp_(-most, most)
        to.copy_(values)
    return out
