"""The specification: every feature in its plainest form, one sequence at a time, with O(N²) memory.

In float64 it is the reference for all backends. In the problem's own dtype the same code is the
"naive" attention, whose rounding error is the yardstick of the conformance rule. Gradients come
from autograd on these lines. Sources: Vaswani et al. 2017 (attention), Press et al. 2022 (ALiBi),
Gemma 2 report 2024 (softcap), Su et al. 2021 (rotary), Salmon et al. 2011 (Philox).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import mods
from .mods.evaluate import evaluate
from .problem import Call, scales_of

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: int, rounds: int = 7) -> np.ndarray:
    """Compute Philox4x32 (Salmon et al. 2011) on counters (..., 4); return (..., 4), uint32 in
    uint64."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(rounds):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def keep_mask(
    seed: int,
    p: float,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    first: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:
    """Return which probabilities survive dropout: bool (heads, rows, keys) of sequence ``batch``.

    ``first`` holds the indices of the first head, row and key; that of the key is a multiple of 4.
    """
    groups = (keys + 3) // 4
    counter = np.zeros((heads, rows, groups, 4), np.uint64)
    counter[..., 0] = first[2] // 4 + np.arange(groups)
    counter[..., 1] = first[1] + np.arange(rows)[:, None]
    counter[..., 2] = first[0] + np.arange(heads)[:, None, None]
    counter[..., 3] = batch
    draws = philox4x32(counter, seed).reshape(heads, rows, groups * 4)[..., :keys]
    return torch.from_numpy(draws < np.uint64(int((1.0 - p) * 2**32)))


def attention(
    call: Call,
    dtype: torch.dtype = torch.float64,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of ``call`` in ``dtype``; return out and LSE in ``dtype``, with autograd.

    Shapes as ``Call.out_shape`` and ``Call.lse_shape``. Rows of a packed q that no sequence covers,
    and rows beyond ``seqused_q``, give output 0 and LSE −inf. Float8 inputs are multiplied by their
    scales. ``round_p`` is a function that is applied to the probabilities (H, rows, keys) of a
    sequence before the product with V, to measure the error of a P that is rounded to few bits.
    """
    return gathered(
        call,
        [one_sequence(call, b, *operands(call, b, dtype), round_p) for b in range(call.batch)],
        dtype,
    )


def gathered(
    call: Call, sequences: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and LSE of a call, assembled from the out and LSE of each sequence."""
    outs, lses = [], []
    starts_q = call.cu_seqlens_q.tolist() if call.cu_seqlens_q is not None else None
    for b, (out, lse) in enumerate(sequences):
        room = starts_q[b + 1] - starts_q[b] if starts_q else call.q.shape[1]
        outs.append(_pad_rows(out, room, 0.0))
        lses.append(_pad_rows(lse.T, room, -torch.inf).T)
    if starts_q is None:
        empty = call.q.new_zeros(call.out_shape(), dtype=dtype)
        return (
            torch.stack(outs) if outs else empty,
            torch.stack(lses) if lses else empty.new_zeros(call.lse_shape()),
        )
    total = call.q.shape[0]
    none = call.q.new_zeros((0, *call.out_shape()[1:]), dtype=dtype)
    return (
        _pad_rows(torch.cat([none, *outs]), total, 0.0),
        _pad_rows(torch.cat([none[..., 0], *(x.T for x in lses)]), total, -torch.inf).T,
    )


def gradients(
    call: Call,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Return out, LSE and the gradients of q, k, v and, if present, of a float bias, of sinks, and
    of those tensors captured by a score_mod that have a gradient.

    ``dout`` is shaped like out; ``dlse`` is shaped like the LSE, or None. Everything is computed
    and returned in ``dtype``.
    """
    leaves = {"q": call.q, "k": call.k, "v": call.v}
    if call.bias is not None and call.bias.is_floating_point():
        leaves["bias"] = call.bias
    if call.sinks is not None:
        leaves["sinks"] = call.sinks
    for slot in sorted(mods.of(call.mods).wanted) if call.mods else ():
        leaves[f"captured{slot}"] = call.captured[slot]
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    replaced: dict[str, Any] = dict(leaves)
    with torch.enable_grad():
        out, lse = attention(call._replace(**replaced), dtype)
        # An empty row's LSE is −inf whatever the inputs are, so a gradient through it is 0.
        total = (out * dout.to(dtype)).sum()
        if dlse is not None:
            total = total + (lse * dlse.to(dtype)).masked_fill(lse == -torch.inf, 0.0).sum()
        # Without any sequence nothing depends on the leaves; a sum over none of them does.
        total = total + sum(x[:0].sum() for x in leaves.values())
        grads = torch.autograd.grad(total, list(leaves.values()))
    results = {"out": out.detach(), "lse": lse.detach()}
    results.update({f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})
    return results


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotate the first 2·R elements of each head of x (B, S, H, D) by ``positions`` (B, S).

    cos and sin are (max_position, R). If interleaved, elements 2i and 2i+1 are paired (GPT-J),
    otherwise i and i+R (GPT-NeoX). The result is computed and returned in float64.
    """
    half = cos.shape[-1]
    c, s = (table.double()[positions][:, :, None, :] for table in (cos, sin))
    x = x.double()
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    turned = (first * c - second * s, first * s + second * c)
    if interleaved:
        mixed = torch.stack(turned, dim=-1).flatten(-2)
    else:
        mixed = torch.cat(turned, dim=-1)
    return torch.cat([mixed, tail], dim=-1)


def _pad_rows(x: torch.Tensor, rows: int, value: float) -> torch.Tensor:
    filler = x.new_full((rows - x.shape[0], *x.shape[1:]), value)
    return torch.cat([x, filler])


def operands(
    call: Call, b: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the operands of sequence ``b``: its rows of q (rows, H, D), its valid keys (length,
    Hk, D) and values (length, Hk, Dv), in ``dtype`` and multiplied by their scales."""
    if call.cu_seqlens_q is None:
        rows = call.q[b]
    else:
        start, stop = call.cu_seqlens_q[b : b + 2].tolist()
        rows = call.q[start:stop]
    used = rows.shape[0] if call.seqused_q is None else int(call.seqused_q[b])
    return _queries(call, b, rows, dtype)[:used], *_keys_and_values(call, b, dtype)


def _queries(call: Call, b: int, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of q of sequence ``b`` in ``dtype``, (rows, H, D), multiplied by their
    scales."""
    if call.q_descale is None:
        return q.to(dtype)
    if call.q_descale.dim() == 2:
        scale = call.q_descale[b][None, :, None]
    else:
        scale = _scale_of_rows(call.q_descale, call.q)
        start = 0 if call.cu_seqlens_q is None else int(call.cu_seqlens_q[b])
        scale = scale[b] if call.cu_seqlens_q is None else scale[start : start + q.shape[0]]
    group = q.shape[1] // scale.shape[1]
    return q.to(dtype) * scale.to(dtype).repeat_interleave(group, dim=1)


def _scale_of_rows(descale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Expand the scales per block, (B, Hk, blocks), to the rows of x: (B, rows, Hk, 1), or
    packed."""
    each = descale.repeat_interleave(scales_of(descale, x), dim=2)[..., : x.shape[-3]]
    each = each.transpose(1, 2)[..., None]
    return each if x.dim() == 4 else each[0]


def _keys_and_values(call: Call, b: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the valid keys (length, Hk, D) and values (length, Hk, Dv) of sequence ``b`` in
    ``dtype``."""
    k, v = _stored(call, b, call.k).to(dtype), _stored(call, b, call.v).to(dtype)
    if call.k_descale is None or call.v_descale is None:
        return k, v
    scales = []
    for descale, x in ((call.k_descale, call.k), (call.v_descale, call.v)):
        if descale.dim() == 2:
            scales.append(descale[b][None, :, None].to(dtype))
        else:
            scales.append(_stored(call, b, _scale_of_rows(descale, x)).to(dtype))
    return k * scales[0], v * scales[1]


def _stored(call: Call, b: int, x: torch.Tensor) -> torch.Tensor:
    """Return the valid rows of sequence ``b`` of ``x`` as (length, heads, dim). ``x`` is stored
    like k: dense, packed or in pages."""
    if call.cu_seqlens_k is not None:
        start, stop = call.cu_seqlens_k[b : b + 2].tolist()
        rows = x[start:stop]
    elif call.page_table is not None:
        page_size = x.shape[1]
        needed = -(-int(call.seqused_k[b]) // page_size) if call.seqused_k is not None else None
        rows = x[call.page_table[b, :needed].long()].flatten(0, 1)
    else:
        rows = x[b if call.cache_batch_idx is None else int(call.cache_batch_idx[b])]
    stop = rows.shape[0] if call.seqused_k is None else int(call.seqused_k[b])
    start = 0 if call.cache_leftpad is None else int(call.cache_leftpad[b])
    return rows[start:stop]


def places_of(call: Call, b: int, rows: int, keys: int, heads: int) -> dict[str, torch.Tensor]:
    """Return the indices that mods receive: sequence, head, row and key, relative to the whole
    problem."""

    def count(start: int, number: int) -> torch.Tensor:
        return torch.arange(start, start + number, dtype=torch.int32)

    return {
        "b": torch.tensor(b + call.batch_start, dtype=torch.int32),
        "h": count(call.head_start, heads)[:, None, None],
        "q": count(call.q_start, rows)[:, None],
        "kv": count(call.k_start, keys),
    }


def one_sequence(
    call: Call,
    b: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out (rows, H, Dv) and LSE (H, rows) of sequence ``b``, in q's dtype."""
    rows, heads, _ = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    score = torch.einsum("qhd,khd->hqk", q * call.scale, k)
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    places = places_of(call, b, rows, keys, heads)
    modified = mods.of(call.mods) if call.mods else None
    if modified is not None and modified.score is not None:
        (score,) = evaluate(modified.score, {"score": score, **places}, call.captured)
        score = score.expand(heads, rows, keys)
    # Aligned to the bottom right: query i sits at key i + keys − rows, but for a block's place.
    shift = keys - rows + call.q_start - call.k_start
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - shift
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[b]
        score = score - slopes.to(score.dtype)[:, None, None] * distance.abs()
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if call.window_right >= 0:
        visible &= distance - call.window_shift <= call.window_right
    if call.window_left >= 0:
        visible &= call.window_shift - distance <= call.window_left
    if call.attention_chunk:
        # The keys of the query's chunk, by their places in the larger problem.
        key = torch.arange(keys) + call.k_start
        own = key - distance
        visible &= key // call.attention_chunk == own // call.attention_chunk
    if modified is not None and modified.mask is not None:
        (seen,) = evaluate(modified.mask, {"score": score, **places}, call.captured)
        visible = visible & seen
    if call.tree and call.bias is not None:
        # For new rows against new rows; all rows see the keys before.
        column = torch.arange(keys) - shift
        mask = call.bias.expand(call.batch, -1, -1)[b, :rows, column.clamp(min=0)]
        visible &= mask | (column < 0)
    elif call.bias is not None:
        shape = (call.batch, heads, call.max_seqlen_q, call.max_seqlen_k)
        bias = call.bias.expand(shape)[b, :, :rows, :keys]
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            score = score + bias.to(score.dtype)
    score = score.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        column = call.sinks.to(score.dtype)[:, None, None].expand(heads, rows, 1)
        score = torch.cat([score, column], dim=-1)
    empty = (score == -torch.inf).all(-1, keepdim=True)
    score = score.masked_fill(empty, 0.0)
    lse = torch.logsumexp(score, dim=-1) if score.shape[-1] else score.new_zeros(heads, rows)
    probability = torch.softmax(score, dim=-1).masked_fill(empty, 0.0)[..., :keys]
    if round_p is not None:
        probability = round_p(probability)
    if call.dropout_p and call.seed is not None:
        first, batch = (call.head_start, call.q_start, call.k_start), b + call.batch_start
        kept = keep_mask(int(call.seed), call.dropout_p, batch, heads, rows, keys, first)
        probability = torch.where(kept, probability / (1.0 - call.dropout_p), 0.0)
    out = torch.einsum("hqk,khd->qhd", probability, v)
    return out, lse.masked_fill(empty[..., 0], -torch.inf)
