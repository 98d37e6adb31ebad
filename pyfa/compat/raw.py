"""Backward without a forward, from an output and an LSE that the caller kept, as in ring attention.

flash-attention's private functions separate forward and backward. ``out`` and ``lse`` may come from
attention over more keys than the call has. P = exp(score − LSE) and rowsum(dO∘O) then belong to the
whole row, and the results are this call's contributions to the gradients (Liu et al. 2023, Ring
Attention, arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import validate
from ..dispatch import prepare
from ..request import Request, Shared, dense, varlen

# flash-attention rounds the rows of softmax_d up to multiples of this.
ROUNDED = 128


class Written(NamedTuple):
    """The gradients of q, k and v: for each, the tensor that the caller passed for it, or a new
    tensor if the caller passed None."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@torch.no_grad()
def backward(
    request: Request,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    into: tuple[torch.Tensor | None, ...],
) -> Written:
    """Compute dq, dk and dv.

    For each of the three, ``into`` has a tensor, which is overwritten, or None for a new tensor.

    ``lse`` is (B, H, Sq) or (H, total_q), a natural logarithm, and ±inf for a fully masked row.
    Raises ``ValueError`` if a gradient's shape differs from its tensor's.
    """
    call = request.call
    for name, x in (("dout", dout), ("out", out)):
        _like(name, x, call.out_shape(), call.q)
    validate.a_tensor("softmax_lse", lse)
    if lse.shape != call.lse_shape() or lse.dtype != torch.float32:
        validate.wrong("softmax_lse", f"shape {call.lse_shape()}, float32", lse)
    for name, given, of in zip(("dq", "dk", "dv"), into, (call.q, call.k, call.v), strict=True):
        if given is not None:
            _like(name, given, tuple(of.shape), of)
    prepared = prepare(call, request.wanted, True, False)
    prepared.validate(call)
    # Version 2 marks a fully masked row by +inf.
    lse = lse.masked_fill(lse == torch.inf, -torch.inf).contiguous()
    grads = prepared.backward(call, out, lse, dout)
    made = (grads.dq, grads.dk, grads.dv)
    return Written(*(x if y is None else y.copy_(x) for x, y in zip(made, into, strict=True)))


def copied_into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Return ``result`` if ``out`` is None; otherwise copy ``result`` into ``out`` and return
    ``out``. Raises ``ValueError`` if ``out`` has another shape or dtype."""
    if out is None:
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        validate.wrong("out", f"shape {tuple(result.shape)}, {result.dtype}", out)
    return out.copy_(result)


def rounded(rows: int) -> int:
    """Return ``rows`` rounded up to a multiple of 128."""
    return -(-rows // ROUNDED) * ROUNDED


def row_sums(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return rowsum(dO∘O) of dense tensors (B, S, H, D): (B, H, S rounded up to 128) float32."""
    return _padded(_dots(dout, out))


def packed_row_sums(
    dout: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return rowsum(dO∘O) of packed tensors (total, H, D): (H, columns) float32.

    Sequence b begins at column ``offsets[b]`` + 128·b. ``columns`` is total + 128·B.
    """
    return _spread(_dots(dout, out), offsets, columns)


class Rows:
    """Dense or packed q, k and v, or dense tensors with a used length per sequence.

    Dense tensors with used lengths are treated as a packed batch in which each sequence has space
    for the longest. ``arguments`` are those of a dense call or, with lengths or offsets, of a
    packed call.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        seqused_q: torch.Tensor | None,
        seqused_k: torch.Tensor | None,
    ) -> None:
        if (cu_seqlens_q is None) != (cu_seqlens_k is None):
            raise NotImplementedError(
                "cu_seqlens_q and cu_seqlens_k: pass both; one alone is not implemented"
            )
        dense = cu_seqlens_q is None
        self.has_lengths = not (dense and seqused_q is seqused_k is None)
        self._batch = tuple(q.shape[:2]) if dense and self.has_lengths else None
        self.arguments: tuple[Any, ...] = (q, k, v)
        self._offsets = cu_seqlens_q
        if not self.has_lengths:
            return
        if cu_seqlens_q is None or cu_seqlens_k is None:
            max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
            cu_seqlens_q, cu_seqlens_k = (_even(x) for x in (q, k))
        if max_seqlen_q is None or max_seqlen_k is None:
            validate.wrong("max_seqlen_q", "max_seqlen_q and max_seqlen_k with cu_seqlens", None)
        self._offsets = cu_seqlens_q
        self.arguments = (
            *(self._flat(x) for x in (q, k, v)), cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q),
            int(max_seqlen_k), seqused_q, seqused_k,
        )  # fmt: skip

    def as_given(self, out: torch.Tensor) -> torch.Tensor:
        """Return ``out``, which has a row for each row of q, in the caller's layout."""
        return out if self._batch is None else out.unflatten(0, self._batch)

    def lse_as_given(self, lse: torch.Tensor) -> torch.Tensor:
        """Return ``lse`` in the caller's layout: (B, H, S) for dense tensors, (H, total) for packed
        ones."""
        return lse if self._batch is None else lse.unflatten(1, self._batch).transpose(0, 1)

    def backward(
        self,
        shared: Shared,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        into: tuple[torch.Tensor | None, ...],
    ) -> Written:
        """Call ``backward`` with everything in the caller's layout."""
        q, k, v, *where = self.arguments
        if not self.has_lengths:
            return backward(dense(q, k, v, shared), dout, out, lse, into)
        asked = varlen(q, k, v, shared, *where)
        flat = tuple(None if x is None else self._flat(x) for x in into)
        grads = backward(asked, self._flat(dout), self._flat(out), self._flat_lse(lse), flat)
        if self._batch is None:
            return grads
        return Written(*(x.unflatten(0, (self._batch[0], -1)) for x in grads))

    def sums(self, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return rowsum(dO∘O): (B, H, S rounded up to 128), or (H, columns) with 128
        zeros after each packed sequence."""
        if not self.has_lengths:
            return row_sums(dout, out)
        return self.spread(_dots(self._flat(dout), self._flat(out)))

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert ``rows``, one number per row in the layout of an LSE, to the layout of the result
        of ``sums``."""
        if self._offsets is None:
            return _padded(rows)
        rows = self._flat_lse(rows)
        columns = rounded(rows.shape[1] + ROUNDED * (self._offsets.shape[0] - 1))
        return _spread(rows, self._offsets, columns)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return (total, H, D), a view of ``x``: writes go to ``x``."""
        return x if self._batch is None else x.view(-1, *x.shape[2:])

    def _flat_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse if self._batch is None or lse.dim() == 2 else lse.transpose(0, 1).flatten(1)


def _even(x: torch.Tensor) -> torch.Tensor:
    """Return the offsets of a batch of sequences of one length."""
    batch, rows = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows


def _dots(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return rowsum(dO∘O) in float32, in the layout of an LSE."""
    return (dout.float() * out.float()).sum(-1).mT


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, rounded(rows.shape[-1]) - rows.shape[-1]))


def _spread(rows: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor:
    """Return (H, columns) from rows (H, total): row r of sequence b goes to column r + 128·b. The
    other columns are 0."""
    row = torch.arange(rows.shape[1], device=rows.device)
    sequence = torch.searchsorted(offsets[1:].long(), row, right=True)
    sequence = sequence.clamp(max=max(offsets.shape[0] - 2, 0))
    result = rows.new_zeros((rows.shape[0], columns))
    return result.index_copy_(1, row + ROUNDED * sequence, rows)


def _like(name: str, x: torch.Tensor, shape: tuple[int, ...], of: torch.Tensor) -> None:
    validate.a_tensor(name, x)
    if x.shape != shape or x.dtype != of.dtype or x.device != of.device:
        validate.wrong(name, f"shape {shape}, {of.dtype}, on {of.device}", x)
