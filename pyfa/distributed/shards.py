"""Splits whole tensors into each rank's rows, and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import validate
from .layout import Layout, positions, share, starts
from .transfer import Ring

Sharding = Literal["zigzag", "contiguous"]
Lengths = Sequence[int] | torch.Tensor


class Place(NamedTuple):
    """The position of this rank: its place on the ring, and its place in its head group. A head
    group is the ranks at one place of the ring; they divide the heads."""

    ring: Ring
    heads: Ring
    zigzag: bool

    def ranks(self) -> int:
        """Return the total number of ranks."""
        return self.ring.size * self.heads.size

    def layout(self, lengths: tuple[int, ...]) -> Layout:
        """Return how the ring holds sequences of ``lengths``."""
        return Layout(lengths, self.ring.size, self.zigzag)

    def own(self, lengths: tuple[int, ...]) -> tuple[int, int]:
        """Return which rows this rank holds, counted in the order of all rows at its place on the
        ring."""
        return share(self.layout(lengths).rows(self.ring.rank), self.heads.size, self.heads.rank)


def place(
    name: str, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, sharding: str
) -> Place:
    """Return the position of this rank. A two-dimensional mesh is (ring, heads), a one-dimensional
    mesh the ring.

    Raises ``TypeError`` or ``ValueError`` naming ``group``, ``mesh`` or ``sharding``.
    """
    if sharding not in ("zigzag", "contiguous"):
        validate.wrong("sharding", "'zigzag' or 'contiguous'", repr(sharding))
    zigzag = sharding == "zigzag"
    if mesh is None:
        return Place(Ring(_group(group), name), Ring(None, name), zigzag)
    if group is not None:
        validate.wrong("mesh", "None with group", mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh; got {type(mesh).__name__}")
    if mesh.ndim > 2:
        validate.wrong("mesh", "one dimension, or two: (ring, heads)", f"{mesh.ndim} dimensions")
    if mesh.get_coordinate() is None:
        validate.wrong("mesh", "one that this process belongs to", mesh)
    ring = Ring(mesh.get_group(0), name)
    return Place(ring, Ring(mesh.get_group(1) if mesh.ndim == 2 else None, name), zigzag)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            validate.wrong("group", "a process group, or an initialized torch.distributed", None)
        group = dist.group.WORLD
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        validate.wrong("group", "one that this process belongs to", "a group without it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup; got {type(group).__name__}")
    return group


def lengths_of(name: str, cu_seqlens: Lengths) -> tuple[int, ...]:
    """Return the lengths between the offsets ``cu_seqlens`` (B + 1,). Waits for the device if they
    are on a GPU."""
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    if not values or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        validate.wrong(name, "offsets (batch + 1,) from 0 up that do not decrease", values)
    return tuple(b - a for a, b in pairwise(values))


def shard(
    x: torch.Tensor,
    *,
    dim: int = 1,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: Sharding = "zigzag",
    cu_seqlens: Lengths | None = None,
) -> torch.Tensor:
    """Return this rank's part of ``x``, whose dimension ``dim`` is the sequence.

    ``x`` is any tensor that is the same on all ranks: tokens (B, S), activations (B, S, …). With
    ``cu_seqlens`` (batch + 1,) ``dim`` is a packed batch, and each of its sequences is split. Other
    arguments are those of ``ring_attention``. The result is contiguous; its gradient flows to
    ``x``.
    """
    where = place("shard", group, mesh, sharding)
    rows = _rows(where, where.ring.rank, where.heads.rank, _lengths(x.shape[dim], cu_seqlens))
    return x.index_select(dim, rows.to(x.device))


def unshard(
    x: torch.Tensor,
    *,
    dim: int = 1,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: Sharding = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Lengths | None = None,
) -> torch.Tensor:
    """Return the whole tensor, on every rank, from the parts that ``shard`` returned.

    ``seqlen`` is the full length. Pass it if ranks hold different numbers of rows; by default, all
    hold as many rows as this rank. With ``cu_seqlens`` it has no effect. There is no gradient:
    raises ``ValueError`` if ``x`` requires one.
    """
    validate.no_gradient({"x": x}, "unshard has none")
    where = place("unshard", group, mesh, sharding)
    lengths = _lengths(x.shape[dim] * where.ranks() if seqlen is None else seqlen, cu_seqlens)
    check_rows("x", x.shape[dim], where, lengths)
    ranks = [(a, b) for a in range(where.ring.size) for b in range(where.heads.size)]
    rows = [_rows(where, a, b, lengths) for a, b in ranks]
    longest = max(len(each) for each in rows)
    mine = x.movedim(dim, 0)
    padded = mine.new_zeros((longest, *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    gathered = padded[None]
    for ring in (where.heads, where.ring):
        if ring.size > 1:
            parts = [torch.empty_like(gathered) for _ in range(ring.size)]
            with ring.step("gathering"):
                dist.all_gather(parts, gathered, ring.group)
            gathered = torch.cat(parts)
    whole = mine.new_empty((sum(lengths), *mine.shape[1:]))
    for part, at in zip(gathered, rows, strict=True):
        whole[at.to(x.device)] = part[: len(at)]
    return whole.movedim(0, dim)


def local_positions(
    seqlen: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: Sharding = "zigzag",
    cu_seqlens: Lengths | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return, for each row of this rank, its position in its sequence: int64, for rotary
    embeddings.

    Pass ``seqlen`` for one sequence, or ``cu_seqlens`` (batch + 1,) for a packed batch.
    """
    if seqlen is None and cu_seqlens is None:
        validate.wrong("seqlen", "the whole length, or cu_seqlens", None)
    where = place("local_positions", group, mesh, sharding)
    lengths = _lengths(seqlen or 0, cu_seqlens)
    rows = _rows(where, where.ring.rank, where.heads.rank, lengths)
    offsets = torch.tensor(starts(lengths))
    sequence = torch.searchsorted(offsets[1:], rows, right=True)
    return (rows - offsets[sequence]).to(device)


def check_rows(name: str, rows: int, where: Place, lengths: tuple[int, ...]) -> None:
    """Raise ``ValueError`` if this rank does not hold as many rows as ``shard`` gives it."""
    start, stop = where.own(lengths)
    if rows != stop - start:
        whole = f"{sum(lengths)} rows" + (f" in {len(lengths)} sequences" if lengths[1:] else "")
        validate.wrong(name, f"{stop - start} rows here, as shard() distributes {whole}", rows)


def _lengths(rows: int, cu_seqlens: Lengths | None) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (rows,)
    return lengths_of("cu_seqlens", cu_seqlens)


def _rows(where: Place, ring_rank: int, heads_rank: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of the whole sequence that a rank holds, in order."""
    layout = where.layout(lengths)
    ranges = [torch.arange(start, stop) for start, stop in positions(layout, ring_rank)]
    start, stop = share(layout.rows(ring_rank), where.heads.size, heads_rank)
    return torch.cat([torch.arange(0), *ranges])[start:stop]
