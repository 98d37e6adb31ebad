"""Appending to a KV cache where each sequence brings a number of new keys of its own."""

from __future__ import annotations

import torch

from .. import validate, validate_cache


def append_ragged(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
    rotary_interleaved: bool,
) -> torch.Tensor:
    """Writes k (total_new, Hk, D) and v (total_new, Hk, Dv) behind what the caches hold, in place.

    Rows ``cu_seqlens_k_new[b]`` to ``[b+1]`` (int32, (B+1,), the last one total_new) belong to
    sequence b. The caches and the rest are as in ``pyfa.attention_kvcache``; k is rotated by its
    position in the cache, or from ``rotary_seqlens`` on. All must fit: ``ValueError`` where the CPU
    can see that they do not. Never waits for the device. Returns the lengths (B,) int32 after it.
    """
    batch = cache_seqlens.shape[0]
    validate.integers("cu_seqlens_k_new", cu_seqlens_k_new, (batch + 1,), k_cache)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        validate.a_tensor(name, x)
        if x.dim() != 3 or x.shape[0] != k.shape[0] or x.shape[1:] != cache.shape[2:]:
            heads, dim = cache.shape[2:]
            validate.wrong(name, f"shape (total_new, {heads}, {dim})", x)
        validate_cache.cached(name, x, cache.dtype, cache.device)
    new = cu_seqlens_k_new.diff()
    lengths = cache_seqlens + new
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    validate_cache.check_room(lengths, 0, capacity)
    if not k.shape[0]:
        return lengths
    row = torch.arange(k.shape[0], device=k.device)
    sequence = torch.searchsorted(cu_seqlens_k_new[1:].long(), row, right=True).clamp(max=batch - 1)
    inside = row - cu_seqlens_k_new.long()[sequence]
    if rotary_cos is not None:
        start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        validate_cache.check_positions(start, new, rotary_cos)
        positions = start.long()[sequence] + inside
        k = torch.ops.pyfa.rotary(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    # Row by row: a batch of sequences with one new key each, which all backends append.
    table = None if page_table is None else page_table[sequence]
    place = sequence.int() if cache_batch_idx is None else cache_batch_idx[sequence]
    torch.ops.pyfa.append_kv(
        k_cache, v_cache, k[:, None], v[:, None], cache_seqlens[sequence] + inside.int(),
        table, None if page_table is not None else place,
    )  # fmt: skip
    return lengths
