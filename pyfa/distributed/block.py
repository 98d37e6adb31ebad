"""One block on this rank: its call, its gradients, and how the outputs of blocks are merged.

Sources: merging by log-sum-exp, Dao et al. 2022 (FlashAttention, section 3.1); over devices, Liu et
al. 2023 (Ring Attention, arXiv:2310.01889).
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import NamedTuple

import torch

from ..backends import BACKENDS
from ..backends.base import Gradients
from ..dispatch import Prepared, prepare
from ..problem import Call
from .pieces import Piece


class Rows(NamedTuple):
    """The tensors that have a row for each query of this rank. They are the inputs of the
    backward."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


class Blocks:
    """The blocks of one problem on this rank.

    A block is the attention of some of this rank's queries to some keys; a ``Piece`` says to which,
    and with which mask. Every block shares ``call``, which has the options and sizes of the whole
    problem. ``call.q`` has only the queries of this rank, (B, S, H, D) or packed, (total, H, D).
    """

    def __init__(self, call: Call, wanted: str, needs_grad: bool, packed: bool) -> None:
        self.call = call
        self.wanted = wanted
        self.needs_grad = needs_grad
        self.packed = packed

    def forward(
        self, piece: Piece, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and LSE of ``piece``'s rows over the piece's keys alone, for all heads."""
        call = self._call(piece, k, v)
        out, lse = self._prepared(call).forward(call)
        return (out[0], lse[0]) if self._is_alone(piece) else (out, lse)

    def backward(self, piece: Piece, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> Gradients:
        """Return dq of ``piece``'s rows and dk, dv of its keys; ``rows`` has the final out and LSE.

        P = exp(score − LSE) and delta = rowsum(dO∘O) − dLSE then belong to the whole row.
        """
        call = self._call(piece, k, v)
        at = slice(*piece.rows)
        out, dout = (self._rows(x, piece) for x in (rows.out, rows.dout))
        lse, dlse = (None if x is None else x[..., at].contiguous() for x in (rows.lse, rows.dlse))
        assert lse is not None
        if self._is_alone(piece):
            lse, dlse = lse[None], None if dlse is None else dlse[None]
        grads = self._prepared(call).backward(call, out, lse, dout, dlse)
        if self._is_alone(piece):
            return Gradients(grads.dq[0], grads.dk[0], grads.dv[0])
        return grads

    def _prepared(self, call: Call) -> Prepared:
        return prepare(call, self.wanted, self.needs_grad, False)

    def _is_alone(self, piece: Piece) -> bool:
        """Return whether it is one sequence of a packed batch."""
        return self.packed and not piece.offsets_q

    def _rows(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        x = x.narrow(-3, piece.rows[0], piece.rows[1] - piece.rows[0])
        return x[None] if self._is_alone(piece) else x

    def _call(self, piece: Piece, k: torch.Tensor, v: torch.Tensor) -> Call:
        call = self.call
        low, high = piece.keys
        keys = [x.narrow(-3, low, high - low) for x in (k, v)]
        batch_start = call.batch_start
        slopes, rows, longest = call.alibi_slopes, piece.rows[1] - piece.rows[0], high - low
        offsets_q = offsets_k = None
        if piece.offsets_q:
            offsets_q, offsets_k = (
                _offsets(each, call.q.device) for each in (piece.offsets_q, piece.offsets_k)
            )
            rows, longest = _longest(piece.offsets_q), _longest(piece.offsets_k)
        elif self.packed:
            keys = [x[None] for x in keys]
            batch_start += piece.sequence
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[piece.sequence][None]
        return call._replace(
            q=self._rows(call.q, piece),
            k=keys[0],
            v=keys[1],
            alibi_slopes=slopes,
            cu_seqlens_q=offsets_q,
            cu_seqlens_k=offsets_k,
            max_seqlen_q=rows,
            max_seqlen_k=longest,
            window_left=piece.left,
            window_right=piece.right,
            q_start=piece.q_start,
            k_start=piece.k_start,
            batch_start=batch_start,
        )


@functools.lru_cache(256)
def _offsets(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _longest(offsets: tuple[int, ...]) -> int:
    return max(b - a for a, b in pairwise(offsets))


class Merged:
    """Merges blocks into ``out`` (…, S, H, Dv) and ``lse`` (…, H, S), which ``finish`` writes.

    With more than one block, out is kept in float32, and the LSE, which is small, in float64: a
    rounding error of the LSE would affect all weights and all gradients of its row.
    """

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._results = out, lse
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, piece: Piece, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a block with the out and LSE of its own keys."""
        if self._out is None and out.shape == self._results[0].shape:
            self._out, self._lse = out, lse
            return
        whole, whole_lse = self._wide()
        part = whole.narrow(-3, piece.rows[0], piece.rows[1] - piece.rows[0])
        part_lse = whole_lse[..., piece.rows[0] : piece.rows[1]]
        merged = torch.logaddexp(part_lse, lse)
        _merge(part, out, _weight(part_lse, merged), _weight(lse, merged))
        part_lse.copy_(merged)

    def finish(self, sinks: torch.Tensor | None) -> None:
        """Write the results. Sinks (H,) are added here, once for each row."""
        if sinks is not None:
            out, lse = self._wide()
            merged = torch.logaddexp(lse, sinks[:, None])
            out.mul_(_by_row(_weight(lse, merged)))
            self._lse = merged
        for result, value in zip(self._results, self._sums(), strict=True):
            result.copy_(value)

    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            # Rows that see nothing.
            out, lse = self._results
            self._out = torch.zeros(out.shape, device=out.device)
            self._lse = torch.full(lse.shape, -torch.inf, dtype=torch.float64, device=lse.device)
        return self._out, self._lse

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._sums()
        self._out, self._lse = out.float(), lse.double()
        return self._out, self._lse


def _weight(lse: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """Return exp(lse − merged), the weight of a partial output; 0 for fully masked rows."""
    seen = torch.where(merged == -torch.inf, 0.0, merged)
    return torch.exp(lse - seen).float()


def _by_row(weight: torch.Tensor) -> torch.Tensor:
    """Return (…, S, H, 1) of (…, H, S)."""
    return weight.transpose(-1, -2)[..., None]


def _merge(
    total: torch.Tensor, part: torch.Tensor, kept: torch.Tensor, added: torch.Tensor
) -> None:
    """Compute total = total · kept + part · added in place; on a GPU in one pass if Triton runs."""
    if total.is_cuda and part.stride(-1) == 1 and BACKENDS["triton"].why_unavailable() is None:
        from ..backends.triton.merge import merge

        dense = total.dim() == 4
        merge(*((x if dense else x[None]) for x in (total, part, kept, added)))
    else:
        total.mul_(_by_row(kept)).addcmul_(part, _by_row(added))
