"""The effect in float64 of the roundings that no fused kernel can avoid: part (c) of the rule.

A fused forward stores the output in its dtype and the LSE in float32, and sums its dot products in
any order. Backward recomputes P = exp(s' − L), and computes δ = rowsum(dO∘O') from the stored
output. In 16 bits that is the exact output, rounded. In float32 the sum of P·V over the keys has a
larger error than the last rounding, and O' is the output of eager attention. Here these few
quantities are changed by their rounding, and all else stays in float64. The changes are expressed
by the reference's own arguments:

- a score moved by E is a bias of E;
- P of a row scaled by r, as exp(s' − L) is for an L that is not that of s', is dO and dLSE scaled
  by r, because P enters the gradients only as P∘(dO·Vᵀ − δ + dLSE) and as Pᵀ·dO;
- δ moved by ε is a dLSE of −ε.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import reference
from ..problem import Call
from .inputs import Inputs, mod_slope

FLOAT8_BITS = 4  # of a float8 P


def recomputed_out(inputs: Inputs) -> torch.Tensor | None:
    """Return a second reference output in float64, with one error of the kernels put in on purpose.

    For float32 inputs it is computed from perturbed scores, for float8 from a P relative to a base
    that is not the row's maximum. For 16-bit inputs it is None, because an error of 1e-6 in a score
    is negligible compared with the rounding of P and of the output.
    """
    if inputs.spec.q.itemsize == 1:
        return reference.attention(inputs.spec, p_bits=FLOAT8_BITS, lagging=True)[0]
    moved = _moved_call(inputs)
    return None if moved is None else reference.attention(moved)[0]


def recomputed_gradients(
    inputs: Inputs,
    out: torch.Tensor,
    stored: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return the reference's gradients with these roundings. ``out`` and ``lse`` are the
    reference's own; ``stored`` is the output from which backward starts."""
    stored, dout = stored.double(), dout.double()
    epsilon = (dout * (stored - out)).sum(-1)
    # δ meets dP in dP − δ, and the two were not summed in the same order: what the roundings of Dv
    # additions come to (see the LSE in tolerances.py).
    summed = out.shape[-1] ** 0.5 * 2.0**-24 * (dout * stored).abs().sum(-1)
    epsilon = (epsilon + torch.copysign(summed, epsilon)).transpose(-1, -2)
    dlse = -epsilon if dlse is None else dlse - epsilon
    call = _moved_call(inputs)
    if call is None:
        return reference.gradients(inputs.spec, dout, dlse)
    ratio = torch.exp(reference.attention(call)[1] - lse)
    ratio = torch.where(lse == -torch.inf, 1.0, ratio)
    dout = dout * ratio.transpose(-1, -2)[..., None]
    moved = reference.gradients(call, dout, dlse * ratio)
    if inputs.spec.bias is not None and "dbias" in moved:
        moved["dbias"] = moved["dbias"].sum_to_size(inputs.spec.bias.shape)
    return moved


def _moved_call(inputs: Inputs) -> Call | None:
    call = inputs.spec
    if call.q.dtype != torch.float32:
        return None
    errors = (_summed_in_order(call, b, q, k) for b, (q, k, _) in enumerate(inputs.sequences))
    return with_moved_scores(call, errors)


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


def _summed_in_order(call: Call, b: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the error of each score of sequence ``b`` if q·k is summed in order in float32:
    (H, rows, keys), float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    left, right = q.permute(1, 0, 2)[:, :, None], k.permute(1, 0, 2)[:, None]
    total = torch.zeros(q.shape[1], q.shape[0], k.shape[0])
    for d in range(q.shape[2]):
        total += left[..., d] * right[..., d]
    exact = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    error = (total.double() - exact) * call.scale
    if call.softcap:
        # The cap flattens what comes through it.
        capped = torch.tanh(exact * call.scale / call.softcap)
        error *= 1.0 - capped.square()
        return error * mod_slope(call, b, call.softcap * capped)
    return error * mod_slope(call, b, exact * call.scale)
