"""Ready-made scores: functions that return a ``score_mod`` with FlexAttention's signature.

    score = pyfa.scores.relative(table)
    out = pyfa.attention(q, k, v, score_mod=score)

Each returns a function of (score, b, h, q_idx, kv_idx), which FlexAttention accepts as well; score
is softcap(scale · q·k). Indices count from the first query and the first key. Tensor arguments must
be on q's device; a tensor with other values needs no new kernel. A wrong argument raises a
``ValueError`` or ``TypeError`` that names it. In the docstrings, B is the batch size, H is the
number of query heads, and Sq and Sk are the sequence lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import validate
from . import validate_mods as check
from .masks import Mask

__all__ = [
    "alibi", "alibi_slopes", "bias", "chain", "gain", "inside", "masked", "relative", "softcap",
    "t5",
]  # fmt: skip

Score = Callable[[Any, Any, Any, Any, Any], Any]


def chain(*scores: Score) -> Score:
    """Apply ``scores`` one after the other, in the given order."""
    check.functions("scores", *scores)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for each in scores:
            score = each(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def masked(mask: Mask) -> Score:
    """Set the score to −inf where ``mask`` hides the key. Passing the mask as ``mask_mod`` is
    faster."""
    check.functions("mask", mask)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(mask(b, h, q_idx, kv_idx), score, -math.inf)

    return score_mod


def softcap(cap: float) -> Score:
    """Compute cap · tanh(score / cap) (Gemma 2, Grok). The argument ``softcap`` of ``attention`` is
    equivalent and faster."""
    check.real("cap", cap, above=0)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return score_mod


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the slopes of ALiBi (Press 2022), (heads,) float32: 2^(−8 n / heads) for n from
    1 to heads if heads is a power of two. Otherwise they are the slopes of the next smaller power
    of two, followed by intermediate ones."""
    heads = check.whole("heads", heads, 1)
    whole = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (n + 1) / whole) for n in range(whole)]
    found += [2.0 ** (-4.0 * (2 * n + 1) / whole) for n in range(heads - whole)]
    return torch.tensor(found, device=device)


def alibi(slopes: torch.Tensor) -> Score:
    """Subtract ``slope · |i − j|`` (ALiBi). ``slopes`` is (H,).

    The argument ``alibi_slopes`` of ``attention`` is faster, but uses ``|i + Sk − Sq − j|``: the
    two distances differ if there are more or fewer keys than queries.
    """
    check.table("slopes", slopes, check.PER_HEAD)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    return score_mod


def relative(table: torch.Tensor) -> Score:
    """Add a learned bias per distance: ``table`` is (2R+1,) or (H, 2R+1), with distance 0 in the
    middle.

    ``table[h, i − j + R]`` is added to the score of query i and key j. Distances beyond R use the
    first or last entry.
    """
    check.table("table", table, {1: "(2R+1,)", 2: "(H, 2R+1)"})
    if check.is_known(table.shape[-1]) and table.shape[-1] % 2 == 0:
        validate.wrong("table", "an odd number of distances, 2R+1", table)
    middle = table.shape[-1] // 2

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (q_idx - kv_idx).clamp(-middle, middle) + middle
        return score + (table[h, place] if table.dim() == 2 else table[place])

    return score_mod


def t5(table: torch.Tensor, bidirectional: bool = True, farthest: int = 128) -> Score:
    """Add T5's relative position bias: ``table`` is (H, buckets).

    With ``bidirectional``, half of the buckets are for earlier keys and half for later keys.
    Otherwise all buckets are for earlier keys, and later keys use the bucket of distance 0. In each
    direction, the first half of the buckets hold one distance each. The others hold ranges of
    distances that grow logarithmically up to ``farthest``."""
    check.table("table", table, {2: "(H, buckets)"})
    directions = 2 if validate.flag("bidirectional", bidirectional) else 1
    buckets = table.shape[-1] // directions
    exact = buckets // 2
    if exact < 1:
        validate.wrong("table", f"{2 * directions} or more buckets", table)
    check.real("farthest", farthest, above=exact)
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
    """Add ``table``, of shape (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk). The argument ``bias`` of
    ``attention`` is faster."""
    check.table("table", table, {2: "(Sq, Sk)", 3: "(H, Sq, Sk)", 4: "(B, H, Sq, Sk)"})
    rank = table.dim()

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[(b, h, q_idx, kv_idx)[4 - rank :]]

    return score_mod


def gain(table: torch.Tensor) -> Score:
    """Multiply each head's scores by its entry of ``table`` (H,): a fixed or learned
    temperature."""
    check.table("table", table, check.PER_HEAD)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * table[h]

    return score_mod


def inside(score: Score, places: torch.Tensor) -> Score:
    """Apply ``score`` with indices that count from the start of each document. ``places``, (S,) or
    (B, S), is the position of each token in its document."""
    check.functions("score", score)
    check.table("places", places, check.PER_TOKEN, check.INTEGERS)

    def score_mod(x: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_at, kv_at = (places[b, q_idx], places[b, kv_idx]) if places.dim() == 2 else (
            places[q_idx], places[kv_idx]
        )  # fmt: skip
        return score(x, b, h, q_at, kv_at)

    return score_mod
