"""Ready score functions for ``score_mod``: functions that make one, with FlexAttention's signature.

    score = pyfa.scores.relative(table)
    out = pyfa.attention(q, k, v, score_mod=score)

Each returns a function of (score, b, h, q_idx, kv_idx), which FlexAttention takes as well; score is
scale · q·k. Tensors are on q's device; their values may differ from call to call without a new
kernel. Indices count from the top left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .masks import Mask

__all__ = [
    "alibi", "alibi_slopes", "bias", "chain", "gain", "inside", "masked", "relative", "softcap",
    "t5",
]  # fmt: skip

Score = Callable[[Any, Any, Any, Any, Any], Any]


def chain(*scores: Score) -> Score:
    """One after the other, the first one first."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for each in scores:
            score = each(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def masked(mask: Mask) -> Score:
    """−inf where ``mask`` hides a key. As ``mask_mod`` the mask is faster."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(mask(b, h, q_idx, kv_idx), score, -math.inf)

    return score_mod


def softcap(cap: float) -> Score:
    """cap · tanh(score / cap) (Gemma 2, Grok). ``softcap=`` is the same and faster."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return score_mod


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """ALiBi's slopes (Press 2022), (heads,) float32: 2^(−8 n / heads) for head n from 1, and those
    between where the number of heads is no power of two."""
    whole = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (n + 1) / whole) for n in range(whole)]
    found += [2.0 ** (-4.0 * (2 * n + 1) / whole) for n in range(heads - whole)]
    return torch.tensor(found, device=device)


def alibi(slopes: torch.Tensor) -> Score:
    """− slope · ``|i − j|`` (ALiBi): ``slopes`` is (H,). ``alibi_slopes=`` is faster."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    return score_mod


def relative(table: torch.Tensor) -> Score:
    """A learned bias by distance: ``table`` is (2R+1,) or (H, 2R+1), its middle for distance 0.

    Query i adds ``table[h, i − j + R]`` to the score of key j; beyond R its ends count.
    """
    middle = table.shape[-1] // 2

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (q_idx - kv_idx).clamp(-middle, middle) + middle
        return score + (table[h, place] if table.dim() == 2 else table[place])

    return score_mod


def t5(table: torch.Tensor, bidirectional: bool = True, farthest: int = 128) -> Score:
    """T5's relative position bias: ``table`` is (H, buckets). Half of the buckets are for one
    distance each, the others for ever wider ranges up to ``farthest``."""
    buckets = table.shape[-1] // (2 if bidirectional else 1)
    exact = buckets // 2
    per_octave = (buckets - exact) / math.log(farthest / exact)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        behind = kv_idx - q_idx
        distance = behind.abs() if bidirectional else (-behind).clamp(min=0)
        ratio = distance.clamp(min=1).float() / exact
        wide = (exact + (torch.log(ratio) * per_octave).int()).clamp(max=buckets - 1)
        bucket = torch.where(distance < exact, distance, wide)
        if bidirectional:
            bucket = bucket + torch.where(behind > 0, buckets, 0)
        return score + table[h, bucket]

    return score_mod


def bias(table: torch.Tensor) -> Score:
    """Adds ``table``: (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk). ``bias=`` is faster."""
    rank = table.dim()

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[(b, h, q_idx, kv_idx)[4 - rank :]]

    return score_mod


def gain(table: torch.Tensor) -> Score:
    """Multiplies each head's scores by ``table`` (H,): a temperature, learned or fixed."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * table[h]

    return score_mod


def inside(score: Score, places: torch.Tensor) -> Score:
    """``score`` with indices that count inside documents: ``places`` is (S,) or (B, S), where each
    token stands in its own."""

    def score_mod(x: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_at, kv_at = (places[b, q_idx], places[b, kv_idx]) if places.dim() == 2 else (
            places[q_idx], places[kv_idx]
        )  # fmt: skip
        return score(x, b, h, q_at, kv_at)

    return score_mod
