"""What the host driver asks of a vendor: which kernels there are, and the shape of a workgroup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...device import Device
from ...plan import Plan
from ...problem import Problem
from ..common import splits
from .tiles import Pair


class Block(NamedTuple):
    """A workgroup of a kernel.

    ``rows``: query rows that it owns, of one head, or in decode of all heads of a group; 0 where
    it owns keys. ``keys``: those of a tile, or those that it owns. ``per_unit``: how many a CU or
    SM is to hold at once, and ``costs`` of splitting its keys, both of forward alone.
    """

    threads: int
    rows: int = 0
    keys: int = 0
    per_unit: int = 1
    costs: splits.Costs = splits.FREE


class Buffers(NamedTuple):
    """What a workgroup keeps in LDS or shared memory, for ``pyfa.traffic``.

    ``tile``: rows and keys of a tile where those of ``Block`` say less. ``whole_tiles``: it reads
    them whole at edges too, and ``ahead`` of them beyond the last.
    """

    role: str
    parts: Mapping[str, int]
    tile: tuple[int, int] | None = None
    whole_tiles: bool = False
    ahead: int = 0


class DecodeTiles(Protocol):
    """A row of decode's tiles, as ``tiles.constants_of`` reads it."""

    @property
    def lines(self) -> int:
        """Query rows of all heads of a group that a workgroup takes."""

    def shared_bytes(self, pair: Pair, float8: bool, latent: bool) -> int:
        """Dynamic shared memory; 0 where the compiler knows."""


@dataclass(frozen=True)
class Target:
    """hip's or cuda's kernels. Where a plan's ``backend`` is asked for, it is a backend's name: the
    emulator has hip's kernels.

    ``name``: the vendor's backend, and the folder of its kernels. ``decode``: the decode kernel's
    source; ``float8``: the code of its float8 keys. ``device_of``: the device that a problem's plan
    is made for.

    ``plan_of``: a backend's plan of a kernel that needs a number format at most, as "combine".
    ``passes``: every forward and backward kernel of a backend with the tiles of an arch.
    ``notes_of``: what ``explain`` adds to a plan compiled for a pair of head dims, and
    ``backward_notes`` to one of a problem with a backward.

    ``block_of``: a workgroup of a plan's kernel. ``buffers_of``: what it keeps near, None of a
    kernel that is small beside the others. ``compiled``: registers of a lane, and bytes of LDS or
    shared memory, as the compiler reports them, which may take seconds.

    ``takes_decode``: whether decode rather than forward is the plan. ``forward_plan``: a backend's
    kernel of another problem. ``decode_tiles``: of an arch, for float8 keys or not, by head dims,
    blocks of fewer lines first; ``latent_tiles``: where V is a view of K. ``decode_splits``: into
    how many parts keys go, by blocks, keys, units and the bytes of a key with its value.
    ``backward_plans``: row_sums and the two kernels that follow, by backend, arch, head dims,
    number format, whether scores are general, whether the result is to be deterministic, and the
    digest of the mods. ``bias_grad_plan``: what makes the gradient of a bias, where there is one.
    """

    name: str
    decode: str
    float8: int
    device_of: Callable[[Problem], Device]
    plan_of: Callable[[str, str, int | None], Plan]
    passes: Callable[[str, str], list[Plan]]
    notes_of: Callable[[Problem, Pair], list[str]]
    backward_notes: Callable[[Problem], list[str]]
    block_of: Callable[[Plan], Block]
    buffers_of: Callable[[Plan, Problem], Buffers | None]
    compiled: Callable[[Plan, Problem], tuple[int, int]]
    takes_decode: Callable[[Problem], bool]
    forward_plan: Callable[[str, Problem], Plan]
    decode_tiles: Callable[[str, bool], Mapping[Pair, Sequence[DecodeTiles]]]
    latent_tiles: Callable[[str, bool], Mapping[Pair, Sequence[DecodeTiles]]]
    decode_splits: Callable[[int, int, int, int], int]
    backward_plans: Callable[[str, str, Pair, int, bool, bool, str], tuple[Plan, Plan, Plan]]
    bias_grad_plan: Callable[[str, str, Pair, int, str], Plan] | None = None
