"""The effect, in float64, of the roundings that no fused kernel can avoid: part (c) of the rule in
``tolerances.py``.

A fused forward stores the output in the output's dtype and the LSE in float32, and sums dot
products in any order. The backward recomputes P = exp(s' − L), and computes δ = rowsum(dO∘O') from
the stored output O'. In 16 bits, O' is here the output of a P that is rounded to 16 bits, as the
matrix units take it, and is rounded itself (``stored_out``). In float32 the sum of P·V over the
keys has a larger error than the last rounding, so O' is the output of eager attention.
This module changes these few quantities by their rounding errors, and leaves everything else in
float64. The changes are expressed by the reference's own arguments:

- to move a score by E, it adds a bias of E;
- to scale P of a row by r (as in exp(s' − L), where L is not the LSE of s'), it scales dO and dLSE
  by r, because P enters the gradients only as P∘(dO·Vᵀ − δ + dLSE) and as Pᵀ·dO;
- to move δ by ε, it adds −ε to dLSE.

``out_deviation`` and ``gradients_deviation`` are part (h) of the rule: the standard deviation of
each element of a float32 result that comes from independent roundings. The error of a rounding to
nearest is spread evenly over an ulp, so its standard deviation is ulp/√12. Relative to a value with
mantissa m, 1 ≤ m < 2, an ulp is 2⁻²³/m. Where values are spread evenly in their logarithm, the mean
of m⁻² is 3/(8·ln 2): the deviation is √(3/(8·ln 2)/12)·2⁻²³ = 0.425·2⁻²⁴ of the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from .. import reference
from ..problem import Call
from .inputs import Inputs, mod_slope
from .tolerances import DEVIATIONS, FLUSHED

# The standard deviation of a rounding to float32, as a share of the value.
_ROUNDING = math.sqrt(3.0 / (8.0 * math.log(2.0)) / 12.0) * 2.0**-23


class InOrder(NamedTuple):
    """The float32 scores of one sequence, each summed in order: their errors and the standard
    deviation of such errors, (H, rows, keys) in float64. ``scaled`` is that of scaled q·k, before
    the softcap and the score_mod."""

    error: torch.Tensor
    deviation: torch.Tensor
    scaled: torch.Tensor


def in_order(inputs: Inputs) -> list[InOrder] | None:
    """Return the errors of the scores of all sequences, or None if q is not float32."""
    call = inputs.spec
    if call.q.dtype != torch.float32:
        return None
    return [_in_order(call, b, q, k) for b, (q, k, _) in enumerate(inputs.sequences)]


def recomputed_out(inputs: Inputs, scores: list[InOrder] | None) -> torch.Tensor | None:
    """Return a second reference output in float64, to which one error of the kernels is added on
    purpose.

    For float32 inputs, this output is computed from perturbed scores. For 16-bit inputs it is None,
    because an error of 1e-6 in a score is negligible compared with the rounding of P and of the
    output. If scores are so large that their rounding errors move the largest P of a row from 1 to
    a number that 16 bits do not hold, this P has the largest error of its rounding. For float8
    queries see ``float8.py``.
    """
    call = inputs.spec
    if scores is not None:
        return reference.attention(with_moved_scores(call, (x.error for x in scores)))[0]
    half = 0.5 * torch.finfo(call.q.dtype).eps
    return stored_out(call, 1.0 + half).double() if inputs.score_size * 2.0**-24 >= half else None


def recomputed_gradients(
    inputs: Inputs,
    scores: list[InOrder] | None,
    out: torch.Tensor,
    stored: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return the reference's gradients, changed by these roundings. ``out`` and ``lse`` are the
    reference's own results; ``stored`` is the output from which the backward starts."""
    stored, dout = stored.double(), dout.double()
    epsilon = (dout * (stored - out)).sum(-1)
    # δ meets dP in dP − δ, and the two were not summed in the same order: what the roundings of Dv
    # additions come to (see the LSE in tolerances.py).
    summed = out.shape[-1] ** 0.5 * 2.0**-24 * (dout * stored).abs().sum(-1)
    epsilon = (epsilon + torch.copysign(summed, epsilon)).transpose(-1, -2)
    dlse = -epsilon if dlse is None else dlse - epsilon
    if scores is None:
        return reference.gradients(inputs.spec, dout, dlse)
    call = with_moved_scores(inputs.spec, (x.error for x in scores))
    # If both passes sum a score in the same way, the P of keys does not have the error of L, but
    # the P of a sink does.
    of_sinks = reference.gradients(call, dout, dlse)["dsinks"] if call.sinks is not None else None
    ratio = torch.exp(reference.attention(call)[1] - lse)
    ratio = torch.where(lse == -torch.inf, 1.0, ratio)
    dout = dout * ratio.transpose(-1, -2)[..., None]
    moved = reference.gradients(call, dout, dlse * ratio)
    if inputs.spec.bias is not None and "dbias" in moved:
        moved["dbias"] = moved["dbias"].sum_to_size(inputs.spec.bias.shape)
    return moved if of_sinks is None else moved | {"dsinks": of_sinks}


def stored_out(call: Call, base: float = 1.0) -> torch.Tensor:
    """Return the output in q's 16-bit dtype, computed in float64 except for two roundings: P is
    rounded before the product with V, and the output at the end.

    A kernel rounds P relative to the row's maximum, so that a row that sees one key has an exact P.
    ``base`` is a multiple of this maximum.
    """
    dtype = call.q.dtype

    def rounded(p: torch.Tensor) -> torch.Tensor:
        if not p.numel():
            return p
        unit = p.amax(-1, keepdim=True).clamp(min=FLUSHED) / base
        return (p / unit).to(dtype).double() * unit

    return reference.attention(call, round_p=rounded)[0].to(dtype)


class _Sequence(NamedTuple):
    """One float32 sequence in float64: its operands, with keys and values of the query heads.
    ``kept`` is P (H, rows, keys) after dropout, ``p`` before it; ``moved`` is the standard
    deviation of their relative error, which a row shares with its LSE."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor
    p: torch.Tensor
    kept: torch.Tensor
    moved: torch.Tensor


def _sequences(inputs: Inputs, scores: list[InOrder]) -> Iterator[_Sequence]:
    call = inputs.spec
    for b, operands in enumerate(inputs.sequences):
        q, k, v = (x.double() for x in operands)
        lse = reference.one_sequence(call, b, q, k, v)[1]
        kept = _probabilities(call, b, q, k)
        p = _probabilities(call._replace(dropout_p=0.0), b, q, k) if call.dropout_p else kept
        # The error of the terms that are added to q·k, and of the rounding of exp.
        score = torch.where(p > 0.0, p.log() + lse[..., None], 0.0)
        moved = (scores[b].deviation.square() + _ROUNDING**2 * (score.square() + 1.0)).sqrt()
        yield _Sequence(q, _of_queries(k, q), _of_queries(v, q), lse, p, kept, moved)


def out_deviation(inputs: Inputs, scores: list[InOrder]) -> torch.Tensor:
    """Return the standard deviation of each element of a float32 output. It results from the
    roundings of the scores and of the sums over the keys, all summed in order.

    A score moved by e moves the output by P·e·(v − O). The sums of P·V and of P contain the
    rounding errors of their terms and partial sums.
    """
    call, found = inputs.spec, []
    for s in _sequences(inputs, scores):
        p, kept, v = s.p, s.kept, s.v
        out = torch.einsum("hqk,khd->hqd", kept, v)
        a, c = kept * s.moved, p * s.moved
        square = torch.einsum("hqk,khd->hqd", a.square(), v.square())
        square -= 2.0 * out * torch.einsum("hqk,khd->hqd", a * c, v)
        square += out.square() * c.square().sum(-1, keepdim=True)
        # The first term of a sum is not rounded, nor where 0 is added, nor anything of a lone key.
        adds = (p > 0.0) & (p.cumsum(-1) > p)
        several = adds.any(-1, keepdim=True) | bool(call.dropout_p) | (call.sinks is not None)
        squares = _partial_squares(kept, v, adds)
        products = torch.einsum("hqk,khd->hqd", kept.square(), v.square())
        total = (p.cumsum(-1) * adds).square().sum(-1, keepdim=True) + 1.0
        rounded = squares + several * (products + out.square() * total)
        square = square.clamp(min=0.0) + _ROUNDING**2 * rounded
        found.append((square.sqrt().transpose(0, 1), s.lse))
    return reference.gathered(call, found, torch.float64)[0]


def gradients_deviation(
    inputs: Inputs, scores: list[InOrder], dout: torch.Tensor, dlse: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the standard deviation of each element of float32 gradients of q, k, v and, if
    present, of sinks.

    P has the errors of the scores, and so has the slope of a score_mod. dP and δ, of which dS =
    P·(dP − δ + dLSE), are summed over the head dim in order; dQ = dS·K over the keys; dK = dSᵀ·Q
    and dV = Pᵀ·dO over the rows of all heads of a group; and what each row adds to the gradient of
    a sink, exp(sink − L)·(dLSE − δ), over all rows.
    """
    call = inputs.spec
    leaves = {name: getattr(call, name).double().requires_grad_() for name in ("q", "k", "v")}
    placed = call._replace(**leaves)
    # A bias is added to the score, so its gradient is dS.
    score_gradients = reference.gradients(with_moved_scores(call, ()), dout, dlse)["dbias"]
    total, of_sinks = torch.zeros((), dtype=torch.float64), list[_OfSinks]()
    for b, (s, of_s) in enumerate(zip(_sequences(inputs, scores), scores, strict=True)):
        flow = reference.operands(call._replace(q=dout.double()), b)[0]
        scaled = torch.einsum("qhd,khd->hqk", s.q, s.k) * call.scale
        slope = slope_of(call, b, scaled) * call.scale
        of_score = score_gradients[b, :, : s.q.shape[0], : s.k.shape[0]]
        ds = of_score * slope
        terms = (flow * torch.einsum("hqk,khd->qhd", s.kept, s.v)).transpose(0, 1)  # of δ
        delta_squares = terms.square().sum(-1) + terms.cumsum(-1)[..., 1:].square().sum(-1)
        from_delta = s.p.square() * delta_squares[..., None]
        from_dp = s.kept.square() * _dot_squares(flow, s.v)
        moved = (ds * s.moved).square() + (slope * _ROUNDING).square() * (from_dp + from_delta)
        if call.softcap or call.mods:
            change = change_of_slope(call, b, scaled, of_s.scaled)
            moved += (of_score * change * call.scale).square()
        heads_k = call.k.shape[-2]
        moved_k, moved_v = (_by_keys(x, heads_k) for x in (moved, (s.kept * s.moved).square()))
        rows, flows = _by_kv_heads(s.q, heads_k), _by_kv_heads(flow, heads_k)
        squares = (
            _summed(ds, s.k, moved),
            _summed(_by_keys(ds, heads_k), rows, moved_k),
            _summed(_by_keys(s.kept, heads_k), flows, moved_v),
        )
        # What autograd adds up at the places of the operands is their squares.
        for x, square in zip(reference.operands(placed, b), squares, strict=True):
            total = total + (x * square.transpose(0, 1)).sum()
        if call.sinks is not None:
            of_sinks.append(_of_sinks(call, b, s, terms.sum(-1), delta_squares, dlse))
    total = total + sum(x[:0].sum() for x in leaves.values())
    found = torch.autograd.grad(total, list(leaves.values()))
    result = {f"d{name}": x.sqrt() for name, x in zip(leaves, found, strict=True)}
    if of_sinks:
        added, moved_terms = (torch.cat(x, dim=-1) for x in zip(*of_sinks, strict=True))
        partial = _ROUNDING**2 * added.cumsum(-1).square().sum(-1)
        result["dsinks"] = (partial + moved_terms.sum(-1)).sqrt()
    return result


class _OfSinks(NamedTuple):
    """What each row adds to the gradients of the sinks, and the squares of the deviations of this,
    (H, rows)."""

    added: torch.Tensor
    moved: torch.Tensor


def _of_sinks(
    call: Call,
    b: int,
    s: _Sequence,
    delta: torch.Tensor,
    delta_squares: torch.Tensor,
    dlse: torch.Tensor | None,
) -> _OfSinks:
    assert call.sinks is not None
    flow = -delta
    if dlse is not None:
        rows = call._replace(q=dlse.double().transpose(-1, -2)[..., None])
        flow = flow + reference.operands(rows, b)[0][..., 0].T
    exponent = call.sinks.double()[:, None] - s.lse
    weight = torch.exp(exponent).where(s.lse > -torch.inf, 0.0)
    exponent = exponent.where(weight > 0.0, 0.0)
    # L has the errors of the scores, and is rounded, as are the exponent and exp.
    relative = (s.p * s.moved).square().sum(-1)
    lse = s.lse.where(weight > 0.0, 0.0)
    relative += _ROUNDING**2 * (lse.square() + exponent.square() + 1.0)
    moved = weight.square() * (flow.square() * relative + _ROUNDING**2 * delta_squares)
    return _OfSinks(weight * flow, moved)


def sinks_deviation(
    call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Return the standard deviation of each 16-bit gradient of a sink (H,), from rounding what each
    row adds to it, exp(sink − L) · (dLSE − δ), and the stored output in δ, to the dtype of q.
    ``out`` and ``lse`` are the reference's own results."""
    assert call.sinks is not None
    terms = dout.double() * out  # of δ
    delta = terms.sum(-1).transpose(-1, -2)
    squares = terms.square().sum(-1).transpose(-1, -2)
    flow = -delta if dlse is None else dlse - delta
    weight = torch.exp(call.sinks.double()[:, None] - lse)
    # dO of rows that do not exist may be NaN.
    square = (weight.square() * (flow.square() + squares)).where(lse > -torch.inf, 0.0)
    eps = torch.finfo(call.q.dtype).eps / torch.finfo(torch.float32).eps
    of_heads = square.sum(-1).view(-1, call.sinks.shape[0]).sum(0)
    return _ROUNDING * eps * of_heads.sqrt()


def error_in_order(inputs: Inputs) -> float:
    """Return the largest error of a float32 score that is computed as in eager attention: q is
    first multiplied by the scale, and the products are then added in order. For other dtypes,
    return 0.

    If the products are equal, the roundings of their sum are not independent.
    """
    call, largest = inputs.spec, 0.0
    if call.q.dtype == torch.float32:
        for b, (q, k, _) in enumerate(inputs.sequences):
            error = _in_order(call, b, q, k, scaled_first=True).error
            largest = max(largest, float(error.abs().max()) if error.numel() else 0.0)
    return largest


def _of_queries(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return keys or values (keys, Hk, D) of the query heads, (keys, H, D)."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _by_keys(weights: torch.Tensor, heads_k: int) -> torch.Tensor:
    """Return ``weights`` (H, rows, keys) by KV heads: (Hk, keys, rows of all heads of the
    group)."""
    heads, rows, keys = weights.shape
    return weights.reshape(heads_k, heads // heads_k * rows, keys).transpose(1, 2)


def _by_kv_heads(x: torch.Tensor, heads_k: int) -> torch.Tensor:
    """Return ``x`` (rows, H, D) as (rows of all heads of the group, Hk, D)."""
    rows, heads, dim = x.shape
    return x.transpose(0, 1).reshape(heads_k, heads // heads_k * rows, dim).transpose(0, 1)


def _summed(weights: torch.Tensor, values: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return the squares of the deviations of ``weights`` (H, N, M) · ``values`` (M, H, D), summed
    over M in order: (H, N, D). ``moved`` are the squares of the weights' own deviations."""
    some = weights != 0.0
    partial = _partial_squares(weights, values, some & (some.cumsum(-1) > 1))
    terms = moved + _ROUNDING**2 * weights.square()
    return _ROUNDING**2 * partial + torch.einsum("hnm,mhd->hnd", terms, values.square())


def _dot_squares(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of all products and partial sums of ``left`` (rows, H, D) ·
    ``right`` (keys, H, D) over D in order, (H, rows, keys)."""
    left, right = left.permute(1, 0, 2)[:, :, None], right.permute(1, 0, 2)[:, None]
    total = left[..., 0] * right[..., 0]
    squares = total.square()
    for d in range(1, left.shape[-1]):
        product = left[..., d] * right[..., d]
        total = total + product
        squares += total.square() + product.square()
    return squares


def _partial_squares(
    weights: torch.Tensor, values: torch.Tensor, adds: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the squares of all partial sums of ``weights`` (H, N, M) · ``values``
    (M, H, D) over M, (H, N, D), that end with a term in ``adds`` (H, N, M)."""
    shape = (*weights.shape[:2], values.shape[2])
    partial, squares = torch.zeros(shape), torch.zeros(shape)
    weights, values, added = weights.float(), values.float(), adds.float()
    for j in range(values.shape[0]):
        partial.addcmul_(weights[..., j, None], values[j, :, None])
        squares.addcmul_(partial * added[..., j, None], partial)
    return squares


def _probabilities(call: Call, b: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return P (H, rows, keys), which is the output if V is the identity."""
    eye = torch.eye(k.shape[0], dtype=q.dtype)[:, None].expand(-1, k.shape[1], -1)
    return reference.one_sequence(call, b, q, k, eye)[0].transpose(0, 1)


def with_moved_scores(call: Call, errors: Iterable[torch.Tensor]) -> Call:
    """Return ``call`` with each sequence's scores changed by its errors (H, rows, keys), in
    float64."""
    shape = (call.batch, call.q.shape[-2], call.max_seqlen_q, call.max_seqlen_k)
    bias = torch.zeros(shape, dtype=torch.float64)
    if call.bias is not None and call.bias.dtype == torch.bool:
        bias = bias.masked_fill(~call.bias, -torch.inf)
    elif call.bias is not None:
        bias = bias + call.bias
    for b, error in enumerate(errors):
        bias[b, :, : error.shape[1], : error.shape[2]] += error
    return call._replace(bias=bias)


def _in_order(
    call: Call, b: int, q: torch.Tensor, k: torch.Tensor, scaled_first: bool = False
) -> InOrder:
    """Sum q·k of sequence ``b`` in order. ``scaled_first``: q has been multiplied by the scale."""
    k = _of_queries(k, q)
    left = (q * call.scale if scaled_first else q).permute(1, 0, 2)[:, :, None]
    right = k.permute(1, 0, 2)[:, None]
    total = left[..., 0] * right[..., 0]
    squares = torch.zeros_like(total)
    for d in range(1, q.shape[2]):
        total += left[..., d] * right[..., d]
        squares.addcmul_(total, total)
    q, k = q.double(), k.double()
    exact = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    slope = slope_of(call, b, exact)
    error = total.double() * (1.0 if scaled_first else call.scale) - exact
    # The roundings of the partial sums, of the products, and of the multiplication by the scale.
    squares = squares + torch.einsum("qhd,khd->hqk", q.square(), k.square())
    deviation = _ROUNDING * (squares * call.scale**2 + exact.square()).sqrt()
    return InOrder(error * slope, deviation * slope.abs(), deviation)


def slope_of(call: Call, b: int, scaled: torch.Tensor) -> torch.Tensor:
    """Return the slope of the softcap and the score_mod together, at the scaled q·k in
    ``scaled``."""
    if not call.softcap:
        return mod_slope(call, b, scaled)
    # The cap flattens what comes through it.
    capped = torch.tanh(scaled / call.softcap)
    return (1.0 - capped.square()) * mod_slope(call, b, call.softcap * capped)


def change_of_slope(
    call: Call, b: int, scaled: torch.Tensor, deviation: torch.Tensor
) -> torch.Tensor:
    """Return how much an error of ``DEVIATIONS`` deviations in ``scaled`` may change ``slope_of``:
    by more than a rounding beside a kink of a score_mod."""
    slope = slope_of(call, b, scaled)
    moved = (slope_of(call, b, scaled + way * deviation) for way in (DEVIATIONS, -DEVIATIONS))
    return torch.stack([(each - slope).abs() for each in moved]).amax(0)
