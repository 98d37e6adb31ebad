"""A matrix that shows which probabilities dropout drops. flash-attention calls it S_dmask and
checks it in its tests.

This is plain PyTorch with memory quadratic in the sequence length, for debugging.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..backends.torch import philox

# flash-attention rounds the lengths of S_dmask up to multiples of this.
_ROUNDED = 128


class Packed(NamedTuple):
    """The offsets of sequences in packed tensors."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor | None = None


@torch.no_grad()
def signed_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    packed: Packed | None,
    causal: bool,
    window: tuple[int, int] | None,
    scale: float | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    seed: torch.Tensor,
) -> torch.Tensor:
    """Return exp(score − the row's maximum), with a negative sign where dropout drops the
    probability: (B, H, Sq, Sk), in q's dtype.

    Takes the arguments of ``pyfa.attention``, or of ``attention_varlen`` with ``packed``, and
    checks them in the same way. Lengths are rounded up to multiples of 128. Masked elements, and
    elements beyond a sequence, are 0.
    """
    heads, head_dim = q.shape[-2:]
    if packed is None:
        batch, longest_q, longest_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = packed.cu_seqlens_q.shape[0] - 1
        longest_q, longest_k = packed.max_seqlen_q, packed.max_seqlen_k
    rows, keys = (-(-longest // _ROUNDED) * _ROUNDED for longest in (longest_q, longest_k))
    result = q.new_zeros((batch, heads, rows, keys))
    left, right = window or (-1, -1)
    if causal:
        right = 0
    scale = head_dim**-0.5 if scale is None else scale
    # One sequence at a time: the draws of one take 64 bytes a score.
    for b, (q_b, k_b) in enumerate(_sequences(q, k, packed)):
        rows, keys = q_b.shape[0], k_b.shape[0]
        if not rows or not keys:
            continue
        k_b = k_b.repeat_interleave(heads // k_b.shape[1], dim=1)
        score = torch.einsum("qhd,khd->hqk", q_b.float(), k_b.float()) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        row = torch.arange(rows, device=q.device)[:, None]
        key = torch.arange(keys, device=q.device)
        distance = key - row - (keys - rows)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            score -= slopes.float()[:, None, None] * distance.abs()
        if right >= 0:
            score.masked_fill_(distance > right, -torch.inf)
        if left >= 0:
            score.masked_fill_(distance < -left, -torch.inf)
        top = score.amax(-1, keepdim=True)
        score = (score - top.masked_fill(top == -torch.inf, 0.0)).exp()
        head = torch.arange(heads, device=q.device)[:, None, None]
        kept = philox.keep(seed, dropout_p, key, row, head, torch.full_like(head, b))
        result[b, :, :rows, :keys] = torch.where(kept, score, -score)
    return result


def _sequences(
    q: torch.Tensor, k: torch.Tensor, packed: Packed | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return q (Sq, H, D) and k (Sk, Hk, D) of each sequence."""
    if packed is None:
        yield from zip(q, k, strict=True)
        return
    starts_q, starts_k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        start, stop = starts_k[b : b + 2]
        if packed.block_table is None:
            k_b = k[start:stop]
        else:
            pages = packed.block_table[b, : -(-(stop - start) // k.shape[1])].long()
            k_b = k[pages].flatten(0, 1)[: stop - start]
        yield q[starts_q[b] : starts_q[b + 1]], k_b
