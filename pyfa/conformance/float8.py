"""The errors that no kernel with float8 queries can avoid: of the LSE, of the scores, and of P.

Hopper's matrix unit multiplies float8 exactly and adds up in fixed point. It takes the largest
exponent e of the 32 products of an instruction and the sum so far, truncates each of them at 2^(e −
13), adds, and keeps 14 bits of the result: DeepSeek-V3 report 2024 (arXiv:2412.19437), §3.5.2;
Zhang et al. 2024 (SageAttention2, arXiv:2411.10958), who find 13 bits behind the sum's first. Let s
be the partial sum of a dot product, with an error of at most Δ. After n more elements of the head
dim, s and Δ become:

    s ← s + Σqk    Δ ← Δ + 2⁻¹³·(n + 1)·max(|s| + Δ, √Σ(qk)²)    then Δ ← Δ + 2⁻¹³·(|s| + Δ)

Truncation changes each of the n products, and the sum, by less than 2^(e − 13). 2^e is at most the
larger of the sum and the largest product, and the largest product is at most the root of the sum of
all squared products. Then truncation changes the new sum by less than 2⁻¹³ of its size. Sums in 32
bits are also within these bounds.

``lse_slack`` is the change of a row's LSE if each of its scores is too large by its bound. This is
the worst case: the slope of a softcap is at most 1, and the LSE is convex, so scores that are too
small change it less.

``recomputed_out`` is the output with two errors of such kernels added on purpose. They come from
the functions ``summed`` and ``stored_p``:

``summed`` gives the scores as the matrix unit sums them. If a score is off by Δ, its P is off by a
factor of exp(Δ). For example, if one product is 640, all products and partial sums of a score are
truncated to multiples of 1/16 (at a head dim of 256, in 8 steps). If two keys share nearly all of a
row's weight, the error of the output is P·(1 − P)·Δ times the difference of their values. This can
exceed the error that P's 4 bits cause.

``stored_p`` gives P with its 4 significant bits and the range of the format: e4m3fn has subnormal
numbers in steps of 2⁻⁹ and ends at 448, e4m3fnuz has steps of 2⁻¹⁰ and ends at 240. The largest P
must not overflow, even if the base lags behind the maximum by a factor of 2. So it lies between
half the format's largest number and that largest number, and the step is 2⁻¹⁶·⁸ to 2⁻¹⁷·⁸ of it
(e4m3fnuz: 2⁻¹⁶·⁹ to 2⁻¹⁷·⁹). A P of less than half a step becomes 0.

"The largest P" is not the largest of the whole row. A kernel that visits tiles of keys from the
last to the first raises the base when a tile has larger scores. It then scales the float32 sums,
which loses nothing. So the P of a key is relative to the largest P among the later keys and those
of its own tile. Tiles have up to 128 keys, as in ``recipe="sink"``. They may begin anywhere, so up
to 127 keys before a key may be in its tile.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from .. import reference
from ..problem import Call
from .recompute import slope_of, with_moved_scores
from .tolerances import FLUSHED

STEP = 32  # elements of the head dim that are added up at once
BITS = 13  # of a sum, behind its first
TILE = 128  # keys that may share a base
_CUT = 2.0**-BITS
_P_BITS = 4  # of a float8 number


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
        return abs(call.scale) * score_slack(*_queries_and_keys(call, b))

    moved = with_moved_scores(call, (of_sequence(b) for b in range(call.batch)))
    return reference.attention(moved)[1] - lse


def recomputed_out(call: Call) -> torch.Tensor:
    """Return the output, computed in float64 except for two steps: the scores are summed as the
    matrix unit sums them, and P is rounded to the format of the queries."""

    def of_sequence(b: int) -> torch.Tensor:
        q, k = _queries_and_keys(call, b)
        exact = torch.einsum("qhd,khd->hqk", q, k)
        error = (summed(q, k) - exact) * call.scale
        return error * slope_of(call, b, exact * call.scale)

    moved = with_moved_scores(call, (of_sequence(b) for b in range(call.batch)))
    # A block's scale of V multiplies P. If its keys dominate many rows, the largest P of all these
    # rows have the same rounding error.
    blocks = call.v_descale is not None and call.v_descale.dim() == 3
    of_p = partial(stored_p, dtype=call.q.dtype, worst=blocks)
    return reference.attention(moved, round_p=of_p)[0]


def summed(q: torch.Tensor, k: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """Return q·k, (H, rows, keys) in float64, as Hopper's matrix unit sums it. The unit keeps the
    first significant bit of a sum and ``bits`` more. q is (rows, H, D), k is (keys, H, D)."""
    q, k = (x.float().permute(2, 1, 0).contiguous() for x in (q, k))  # in which 14 bits are exact
    total = q.new_zeros(q.shape[1], q.shape[2], k.shape[2])
    for begin in range(0, q.shape[0], STEP):
        step = slice(begin, begin + STEP)
        pairs = [*zip(q[step, ..., None], k[step, :, None], strict=True)]
        largest = total.abs()
        for a, b in pairs:
            largest = torch.maximum(largest, (a * b).abs_())
        last = _last_bit(largest, bits + 1)
        units = (total / last).trunc_()
        for a, b in pairs:
            units += (a / last).mul_(b).trunc_()
        total = units * last
        last = _last_bit(total, bits + 1)
        total = (total / last).trunc_() * last
    return total.double()


def round_p(p: torch.Tensor) -> torch.Tensor:
    """Round P to the significant bits of float8, with an unlimited range."""
    mantissa, exponent = torch.frexp(p)
    return torch.ldexp((mantissa * 2**_P_BITS).round(), exponent - _P_BITS)


def stored_p(p: torch.Tensor, dtype: torch.dtype, worst: bool = False) -> torch.Tensor:
    """Round P (H, rows, keys) to ``dtype``, each row relative to its own base, or with ``worst``
    relative to a base for which the rounding error of the largest P is largest."""
    heads, rows, keys = p.shape
    behind = p.flip(-1).cummax(-1).values.flip(-1) if keys else p
    largest = behind[..., (torch.arange(keys) - (TILE - 1)).clamp(min=0)]
    if worst and keys:  # between two numbers of the format
        mantissas = torch.frexp(p.amax(-1, keepdim=True)).mantissa.clamp(min=0.5)
        bases = (1.0 + 2.0**-_P_BITS) / mantissas
    else:
        bases = _bases(heads, rows).to(p.dtype)
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps / (0.5 * info.max)
    last = torch.maximum(_last_bit(p * bases, _P_BITS), subnormal * largest).clamp(min=FLUSHED)
    return (p * bases / last).round() * last / bases


def _queries_and_keys(call: Call, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q (rows, H, D) and k (keys, H, D) of sequence ``b`` in float64, multiplied by their
    scales."""
    q, k, _ = reference.operands(call, b)
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _bases(heads: int, rows: int) -> torch.Tensor:
    """Return a number from 1 to 2 for each row (H, rows, 1), their logarithms evenly spread."""
    golden = 0.5 * (math.sqrt(5.0) - 1.0)
    return torch.exp2((torch.arange(heads * rows) * golden + 0.5).frac()).view(heads, rows, 1)


def _last_bit(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what the last of the first ``bits`` bits of ``x`` stands for."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - bits)
