"""The error of the LSE that rotary embedding may cause in 16 and 8 bits, because an element may be
rounded to either of two neighbors.

Rotation in float32 rounds two products and their sum, fused or not: a·c − b·s is off by at most
2⁻²⁴·(|ac| + |bs|) in the products and as much in the sum, e = 2⁻²³·(|ac| + |bs|) in all. The result
is then rounded to the dtype of q or of the cache. Where exact − e and exact + e are rounded to the
same number, every kernel has that number. Elsewhere the exact value is so close to a tie that a
kernel may have either neighbor, and an error of e becomes a whole ulp of q's dtype. With normally
distributed values, this is one element in 4,200 in bfloat16, and one in 650 in float16.

``unsure`` is this ulp for the elements near a tie, and 0 for all others. If u_q and u_k are these
values for q and k, a score is off by at most Σ(u_q·|k| + |q|·u_k + u_q·u_k). ``lse_slack`` is the
change of a row's LSE if each of its scores is too large by this bound. This is the worst case, as
in ``float8.py``. If neither a row nor its keys have an element near a tie, the row has no slack.
"""

from __future__ import annotations

import torch

from .. import reference
from ..problem import Call
from .inputs import mod_slope
from .recompute import with_moved_scores


def lse_slack(call: Call, unsure: Call, lse: torch.Tensor) -> torch.Tensor:
    """Return how far a kernel's LSE may be from each element of ``lse``, the exact LSE of ``call``
    (float64). ``unsure`` has these ulps, in tensors of the shapes of q and k."""

    def of_sequence(b: int) -> torch.Tensor:
        q, k, _ = reference.operands(call, b)
        of_q, of_k, _ = reference.operands(unsure, b)
        of_q, of_k = of_q.nan_to_num(0.0), of_k.nan_to_num(0.0)  # where nothing is stored
        group = q.shape[1] // k.shape[1]
        k, of_k = k.repeat_interleave(group, dim=1), of_k.repeat_interleave(group, dim=1)
        error = torch.einsum("qhd,khd->hqk", of_q, k.abs() + of_k)
        error += torch.einsum("qhd,khd->hqk", q.abs(), of_k)
        score = torch.einsum("qhd,khd->hqk", q, k) * call.scale
        if call.softcap:  # whose slope is at most 1
            score = call.softcap * torch.tanh(score / call.softcap)
        return error * abs(call.scale) * mod_slope(call, b, score).abs()

    moved = with_moved_scores(call, (of_sequence(b) for b in range(call.batch)))
    return reference.attention(moved)[1] - lse
