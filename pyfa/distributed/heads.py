"""All-to-all with gradient: from rows on each rank to heads on each rank, and back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .layout import share
from .transfer import Ring


def to_heads(x: torch.Tensor, ring: Ring, total: int) -> torch.Tensor:
    """Exchange (B, own rows, H, D) for (B, all rows, H / ranks, D); dense or, without B, packed.

    ``total`` rows are distributed in order, as by ``share``, and heads evenly.
    """
    found: torch.Tensor = _Exchanged.apply(x, ring, total, True)  # type: ignore[no-untyped-call]
    return found


def to_rows(x: torch.Tensor, ring: Ring, total: int) -> torch.Tensor:
    """Invert ``to_heads``: (B, all rows, heads, D) to (B, own rows, heads · ranks, D)."""
    found: torch.Tensor = _Exchanged.apply(x, ring, total, False)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    """The exchange with its gradient: each direction is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ring: Ring, total: int, heads: bool) -> torch.Tensor:
        ctx.way = ring, total, heads
        return (_to_heads if heads else _to_rows)(x, ring, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ring, total, heads = ctx.way
        return (_to_rows if heads else _to_heads)(grad, ring, total), None, None, None


def _to_heads(x: torch.Tensor, ring: Ring, total: int) -> torch.Tensor:
    split: torch.Tensor = x.unflatten(-2, (ring.size, -1))
    # (ranks, rows[, B], heads, D): what goes to one rank lies together.
    sent = split.movedim((-3, -4), (0, 1)).contiguous()
    rows = [_count(total, ring.size, rank) for rank in range(ring.size)]
    received = sent.new_empty((total, *sent.shape[2:]))
    sizes = [sent[0].numel()] * ring.size
    each = received[:1].numel()
    _all_to_all("heads", ring, received, [each * n for n in rows], sent, sizes)
    return received.movedim(0, -3)


def _to_rows(x: torch.Tensor, ring: Ring, total: int) -> torch.Tensor:
    sent = x.movedim(-3, 0).contiguous()  # (rows[, B], heads, D)
    rows = [_count(total, ring.size, rank) for rank in range(ring.size)]
    received = sent.new_empty((ring.size, rows[ring.rank], *sent.shape[1:]))
    each = sent[:1].numel()
    sizes = [received[0].numel()] * ring.size
    _all_to_all("rows", ring, received, sizes, sent, [each * n for n in rows])
    merged: torch.Tensor = received.movedim((0, 1), (-3, -4)).flatten(-3, -2)
    return merged


def _count(total: int, ranks: int, rank: int) -> int:
    start, stop = share(total, ranks, rank)
    return stop - start


def _all_to_all(
    what: str,
    ring: Ring,
    received: torch.Tensor,
    into: list[int],
    sent: torch.Tensor,
    of: list[int],
) -> None:
    ranks = [ring.known_as(rank) for rank in range(ring.size)]
    with ring.step(f"all-to-all into {what} among ranks {ranks}"):
        dist.all_to_all_single(received.view(-1), sent.view(-1), into, of, group=ring.group)
