"""Transfers between ranks through torch.distributed, with errors that name rank and step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankError


class Ring:
    """A process group for one attention call. Without a group, the ring has only this process.

    Ranks are numbered within the group. Error messages give the global ranks of torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self.group = group
        self.name = name
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def known_as(self, rank: int) -> int:
        """Return torch.distributed's number of ``rank``."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Convert errors of torch.distributed inside the block to ``RankError``."""
        try:
            yield
        except RuntimeError as error:
            here = self.known_as(self.rank)
            raise RankError(f"{self.name} on rank {here}: {what}: {error}") from error

    def exchange(
        self,
        what: str,
        to: int,
        sent: Sequence[torch.Tensor],
        source: int,
        received: Sequence[torch.Tensor],
    ) -> Exchange:
        """Send to rank ``to`` and receive from rank ``source``: contiguous tensors, or none."""
        to, source = self.known_as(to), self.known_as(source)
        operations = [dist.P2POp(dist.isend, x, to, self.group) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, source, self.group) for x in received]
        says = f"{what}, to rank {to} and from rank {source}"
        with self.step(says):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Exchange(self, says, works, (*sent, *received))


class Exchange:
    """Transfers in flight. On a GPU they run on the process group's own stream, in parallel with
    the computation."""

    def __init__(
        self, ring: Ring, says: str, works: list[Any], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self._ring, self._says, self._works = ring, says, works
        self._tensors = tensors  # not freed while they are on their way

    def wait(self) -> None:
        """Wait until everything has arrived: on a GPU the current stream waits, and the host does
        not."""
        with self._ring.step(self._says):
            for work in self._works:
                work.wait()
        self._works, self._tensors = [], ()


# Hashes of the arguments that the ranks of a group have agreed on; freed with the group. Their
# number is limited, because every packed batch differs.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
_MOST_AGREED = 1 << 16


def agree(
    rings: Sequence[Ring], arguments: Mapping[str, object], error: Exception | None = None
) -> None:
    """Raise ``ValueError`` on every rank unless all were called with the same ``arguments``.

    ``rings`` are the dimensions of a mesh. Each set of arguments is compared only once, so later
    training steps do not wait. Ranks that pass different sets, each of which they agreed on before,
    are therefore not detected. ``error`` says what is wrong with this rank's own arguments. The
    function raises it on this rank. Until the ranks of the group first agree on a set of arguments,
    the function also sends ``error`` to the other ranks, because they wait for the comparison.
    """
    rings = [ring for ring in rings if ring.size > 1]
    mine = tuple(arguments.items())
    known = _agreed.setdefault(_group(rings[0]), set()) if rings else {hash(mine)}
    if hash(mine) in known or (error is not None and known):
        if error is not None:
            raise error
        return
    verdict = "" if error is None else f"rank {rings[0].known_as(rings[0].rank)}: {error}"
    for ring in rings:
        said: list[Any] = [None] * ring.size
        with ring.step("comparing arguments"):
            dist.all_gather_object(said, (mine, verdict), ring.group)
        verdict = next((other for _, other in said if other), "") or _difference(ring, said)
    if error is not None:
        raise error
    if verdict:
        raise ValueError(verdict)
    if len(known) >= _MOST_AGREED:
        known.clear()  # by all ranks at the same call: they know the same
    known.add(hash(mine))


def _group(ring: Ring) -> dist.ProcessGroup:
    assert ring.group is not None
    return ring.group


def _difference(ring: Ring, said: list[Any]) -> str:
    """Return the first argument that differs between a rank and rank 0 of the group; "" if none
    does."""
    for rank, (theirs, _) in enumerate(said):
        for (name, expected), (_, got) in zip(said[0][0], theirs, strict=True):
            if got != expected:
                return (
                    f"{name}: expected the same on all ranks; got {expected} on rank "
                    f"{ring.known_as(0)} and {got} on rank {ring.known_as(rank)}"
                )
    return ""
