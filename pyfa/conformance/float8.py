"""The error of the LSE that float8 queries may cause: the matrix unit keeps only 14 bits of a
score's sum.

Hopper's matrix unit multiplies float8 exactly and adds up in fixed point. It takes the largest
exponent e of the 32 products of an instruction and the sum so far, truncates each of them at 2^(e −
13), adds, and keeps 14 bits of the result: DeepSeek-V3 report 2024 (arXiv:2412.19437), §3.5.2;
Zhang et al. 2024 (SageAttention2, arXiv:2411.10958), who find 13 bits behind the sum's first. Let s
be the partial sum of a dot product, with an error of at most Δ. After n more elements of the head
dim,

    s ← s + Σqk    Δ ← Δ + 2⁻¹³·(n + 1)·max(|s| + Δ, √Σ(qk)²)    then Δ ← Δ + 2⁻¹³·(|s| + Δ)

Truncation changes n products and the sum by less than 2^(e − 13) each. 2^e is at most the larger of
the sum and the largest product, and the largest product is at most the root of the sum of all
squared products. Then the new sum is truncated by less than 2⁻¹³ of itself. Sums in 32 bits are
also within these bounds.

``lse_slack`` is the change of a row's LSE if each of its scores is too large by its bound. This is
the worst case: the slope of a softcap is at most 1, and the LSE is convex, so errors downwards
change it less.
"""

from __future__ import annotations

import torch

from .. import reference
from ..problem import Call
from .recompute import with_moved_scores

STEP = 32  # elements of the head dim that are added up at once
_CUT = 2.0**-13


def score_slack(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the bound on the error of q·k, (H, rows, keys), for q (rows, H, D) and k (keys, H, D)
    in float64."""
    total = q.new_zeros(q.shape[1], q.shape[0], k.shape[0])
    slack = total.clone()
    for begin in range(0, q.shape[-1], STEP):
        a, b = (x[..., begin : begin + STEP] for x in (q, k))
        largest = torch.einsum("qhd,khd->hqk", a.square(), b.square()).sqrt()
        largest = torch.maximum(largest, total.abs() + slack)
        total = total + torch.einsum("qhd,khd->hqk", a, b)
        slack = slack + _CUT * (a.shape[-1] + 1) * largest
        slack = slack + _CUT * (total.abs() + slack)
    return slack


def lse_slack(call: Call, lse: torch.Tensor) -> torch.Tensor:
    """Return how far a kernel's LSE may be from each element of ``lse``, the exact LSE of ``call``
    (float64)."""

    def of_sequence(b: int) -> torch.Tensor:
        q, k, _ = reference.operands(call, b)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return abs(call.scale) * score_slack(q, k)

    moved = with_moved_scores(call, (of_sequence(b) for b in range(call.batch)))
    return reference.attention(moved)[1] - lse
