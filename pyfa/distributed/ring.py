"""Ring attention: keys and values go around the ranks, and each rank attends to them with its own
queries.

At step i rank r processes the keys of rank r − i. Rank r − i sends them directly while step i − 1
is computed, and only the chunks that rank r's queries see. The backward sends the same keys, and
returns each block's dK and dV to the rank that holds the keys. That rank adds them up in float32 in
the order of the steps, so every run gives the same bits. Large inputs go around in groups of heads,
so that the data in flight and the float32 sums stay small compared with the inputs.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..problem import Call
from .block import Blocks, Merged, Rows
from .layout import Chunk, Layout, Range
from .pieces import Piece, Plan, mask_of, plan
from .transfer import Exchange, Ring

# Queries that go around together have at least so many elements, or all that there are: 32 heads of
# 32,768 rows and 128 elements are 8,192 tiles of 128 rows for the 132 SMs of an H200.
LEAST_ELEMENTS = 1 << 27

Pair = tuple[torch.Tensor, torch.Tensor]


class Job(NamedTuple):
    """A checked problem on a ring. ``call`` holds its numbers, its slopes and its seed."""

    ring: Ring
    queries: Layout
    keys: Layout
    packed: bool
    call: Call
    wanted: str
    needs_grad: bool

    def plan(self, rank: int, source: int) -> Plan:
        """Return the calls of ``rank`` on the keys of ``source``."""
        return plan(self.queries, self.keys, rank, source, mask_of(self.call), self.packed)

    def own_chunks(self) -> tuple[Chunk, ...]:
        return self.keys.chunks(self.ring.rank)

    def blocks(self, q: torch.Tensor, heads: Range) -> Blocks:
        """Return the blocks of the query heads ``heads``; q has only these heads."""
        slopes = self.call.alibi_slopes
        call = self.call._replace(
            q=q,
            alibi_slopes=None if slopes is None else slopes[..., slice(*heads)],
            head_start=self.call.head_start + heads[0],
        )
        return Blocks(call, self.wanted, self.needs_grad, self.packed)


class Part(NamedTuple):
    """Heads that go around together: KV heads, and the query heads that share them."""

    keys: Range
    queries: Range


class RingAttention(torch.autograd.Function):
    """The autograd function: out and LSE of this rank's queries. ``sinks`` (H,) float32, or
    None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        job: Job,
    ) -> Pair:
        parts = _parts(job, q, k)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
        for part, steps in _rounds(job, parts, k, v):
            blocks = job.blocks(_heads(q, part.queries), part.queries)
            merged = Merged(_heads(out, part.queries), _of_lse(lse, part.queries))
            for _, pieces, keys, values in steps:
                for piece in pieces:
                    merged.add(piece, *blocks.forward(piece, keys, values))
            merged.finish(None if sinks is None else sinks[slice(*part.queries)])
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        job: Job = ctx.job
        if dout is None:
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()  # once, and not by the kernels of every block
        rows = Rows(out, lse, dout, dlse if job.call.return_lse else None)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        before: _Home | None = None
        for part, steps in _rounds(job, _parts(job, q, k), k, v):
            heads = part.queries
            blocks = job.blocks(_heads(q, heads), heads)
            some = Rows(
                _heads(out, heads), _of_lse(lse, heads), _heads(dout, heads),
                None if rows.dlse is None else _of_lse(rows.dlse, heads),
            )  # fmt: skip
            total = _zeros(_heads(q, heads))
            home = _Home(job, _heads(dk, part.keys), _heads(dv, part.keys))
            for step, pieces, keys, values in steps:
                home.bring(step, _gradients(blocks, pieces, keys, values, some, total))
                if before is not None:
                    # The transfers of the previous heads had this step to complete.
                    before.finish()
                    before = None
            _heads(dq, heads).copy_(total)
            before = home
        if before is not None:
            before.finish()
        dsinks = _grad_sinks(sinks, rows) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, dsinks, None


def _gradients(
    blocks: Blocks,
    pieces: tuple[Piece, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    dq: torch.Tensor,
) -> Pair | None:
    """Return dk and dv of ``keys`` and ``values``, summed over the blocks ``pieces``, or None if
    there are none. Add the blocks' dq to ``dq``."""
    found: Pair | None = None
    for piece in pieces:
        grads = blocks.backward(piece, keys, values, rows)
        _narrow(dq, piece.rows).add_(grads.dq)
        if len(pieces) == 1 and grads.dk.shape == keys.shape:
            return grads.dk, grads.dv
        if found is None:
            found = _zeros(keys), _zeros(values)
        for total, part in zip(found, grads[1:3], strict=True):
            _narrow(total, piece.keys).add_(part)
    return found


def _parts(job: Job, q: torch.Tensor, k: torch.Tensor) -> list[Part]:
    """Divide the KV heads into as many equal parts as possible, whose queries have at least
    ``LEAST_ELEMENTS`` elements each (or into one part). All ranks return the same parts."""
    heads, heads_k = q.shape[-2], k.shape[-2]
    # Rows per rank on average, because other ranks may have more rows than this one.
    rows = sum(job.queries.lengths) // job.ring.size
    elements = rows * q.shape[:-3].numel() * q.shape[-2:].numel()
    most = max(1, elements // LEAST_ELEMENTS)
    count = max(n for n in range(1, heads_k + 1) if heads_k % n == 0 and n <= most)
    step, group = heads_k // count, heads // heads_k
    return [Part((a, a + step), (a * group, (a + step) * group)) for a in range(0, heads_k, step)]


def _heads(x: torch.Tensor, heads: Range) -> torch.Tensor:
    return x[..., slice(*heads), :]


def _of_lse(lse: torch.Tensor, heads: Range) -> torch.Tensor:
    return lse[..., slice(*heads), :]


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _narrow(x: torch.Tensor, rows: Range) -> torch.Tensor:
    return x.narrow(-3, rows[0], rows[1] - rows[0])


Step = tuple[int, tuple[Piece, ...], torch.Tensor, torch.Tensor]


def _rounds(
    job: Job, parts: list[Part], k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[Part, Iterator[Step]]]:
    """Yield every part with its steps: (step, blocks, keys, values).

    The transfers of the next step, or of the next part, run while a step is computed.
    """
    ring = job.ring
    order = [(part, step) for part in parts for step in range(ring.size)]
    coming: tuple[Exchange, Pair] | None = None

    def steps(at: int) -> Iterator[Step]:
        nonlocal coming
        for step in range(ring.size):
            here, coming = coming, None
            if at + step + 1 < len(order):
                part, following = order[at + step + 1]
                if following:
                    coming = _fetch(job, _heads(k, part.keys), _heads(v, part.keys), following)
            found = job.plan(ring.rank, (ring.rank - step) % ring.size)
            keys, values = (_heads(x, order[at][0].keys) for x in (k, v))
            if here is not None:
                exchange, (keys, values) = here
                exchange.wait()
            elif found.needed:
                keys, values = (_chunks(x, job.own_chunks(), found.needed) for x in (keys, values))
            yield step, found.pieces, keys, values

    for index, part in enumerate(parts):
        yield part, steps(index * ring.size)


def _fetch(job: Job, k: torch.Tensor, v: torch.Tensor, step: int) -> tuple[Exchange, Pair]:
    """Begin the transfers of ``step``: send this rank's keys to the ranks that need them, and
    receive its own."""
    ring = job.ring
    to, source = (ring.rank + step) % ring.size, (ring.rank - step) % ring.size
    asked, needed = job.plan(to, ring.rank).needed, job.plan(ring.rank, source).needed
    sent = [_chunks(x, job.own_chunks(), asked).contiguous() for x in (k, v)] if asked else []
    theirs = job.keys.chunks(source)
    count = sum(theirs[number].rows[1] - theirs[number].rows[0] for number in needed)
    pair = _like(k, count), _like(v, count)
    what = f"step {step} of {ring.size - 1}, keys and values"
    return ring.exchange(what, to, sent, source, pair if needed else ()), pair


def _chunks(x: torch.Tensor, chunks: tuple[Chunk, ...], numbers: tuple[int, ...]) -> torch.Tensor:
    """Return the chunks ``numbers``, concatenated in the order of ``x``."""
    return _narrow(x, (chunks[numbers[0]].rows[0], chunks[numbers[-1]].rows[1]))


def _like(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-3], rows, *x.shape[-2:]))


class _Home:
    """Returns gradients of keys to the rank that holds the keys, while the next ones are computed.

    They are sent in the inputs' dtype, as kernels compute them, added up in float32, and finally
    written to ``dk`` and ``dv``.
    """

    def __init__(self, job: Job, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self._job = job
        self._results = dk, dv
        self._totals = _zeros(dk), _zeros(dv)
        self._under_way: tuple[Exchange, Pair | None, int] | None = None

    def bring(self, step: int, parts: Pair | None) -> None:
        """Send ``parts``: this rank's gradients for the keys it received in ``step``, if any."""
        job, ring = self._job, self._job.ring
        to, source = (ring.rank - step) % ring.size, (ring.rank + step) % ring.size
        if not step:
            if parts is not None:
                self._add(ring.rank, parts)
            return
        self._arrive()
        dk, dv = self._results
        sent = [x.to(dk.dtype).contiguous() for x in parts or ()]
        numbers = job.plan(source, ring.rank).needed
        received: Pair | None = None
        if numbers:
            rows = _chunks(dk, job.own_chunks(), numbers).shape[-3]
            received = _like(dk, rows), _like(dv, rows)
        what = f"step {step} of {ring.size - 1}, gradients of keys and values"
        exchange = ring.exchange(what, to, sent, source, received or ())
        self._under_way = (exchange, received, source)

    def finish(self) -> None:
        """Wait for pending transfers, and round the sums."""
        self._arrive()
        for result, total in zip(self._results, self._totals, strict=True):
            result.copy_(total)

    def _arrive(self) -> None:
        if self._under_way is None:
            return
        exchange, received, source = self._under_way
        self._under_way = None
        exchange.wait()
        if received is not None:
            self._add(source, received)

    def _add(self, maker: int, parts: Pair) -> None:
        """Add the gradients that rank ``maker`` computed for this rank's keys."""
        numbers = self._job.plan(maker, self._job.ring.rank).needed
        for total, part in zip(self._totals, parts, strict=True):
            _chunks(total, self._job.own_chunks(), numbers).add_(part)


def _grad_sinks(sinks: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return −Σ p_sink · delta over this rank's rows; fully masked rows add nothing."""
    delta = (rows.dout.float() * rows.out.float()).sum(-1).transpose(-1, -2)
    if rows.dlse is not None:
        delta = delta - rows.dlse
    share = torch.exp(sinks[:, None] - rows.lse) * delta
    share = torch.where(rows.lse != -torch.inf, share, 0.0)
    return -share.sum(-1).reshape(-1, sinks.shape[0]).sum(0)
