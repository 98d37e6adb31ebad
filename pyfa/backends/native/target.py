"""What the host driver asks of a vendor: which kernels there are, and the shape of a workgroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def shared_bytes(self, pair: Pair, float8: bool) -> int:
        """Dynamic shared memory; 0 where the compiler knows."""


class Compiled(NamedTuple):
    """Registers of a lane and bytes of LDS or shared memory, as the compiler reports them."""

    registers: int
    shared_bytes: int


class Target(Protocol):
    """hip's or cuda's kernels."""

    NAME: str
    """The vendor's backend, and the folder of its kernels."""
    DECODE: str
    """The decode kernel's source."""
    FLOAT8: int
    """The code of its float8 keys."""

    def passes(self, backend: str, arch: str) -> list[Plan]:
        """Every forward and backward kernel, with the tiles of ``arch``."""

    def plan_of(self, backend: str, kernel: str, dtype: int | None = None) -> Plan:
        """The plan of a kernel that needs a number format at most, as "combine"."""

    def device_of(self, problem: Problem) -> Device:
        """The device that a plan is made for."""

    def notes_of(self, problem: Problem, pair: Pair) -> list[str]:
        """What ``explain`` adds to a plan compiled for the head dims ``pair``."""

    def block_of(self, plan: Plan) -> Block:
        """A workgroup of ``plan``'s kernel."""

    def buffers_of(self, plan: Plan, problem: Problem) -> Buffers | None:
        """What it keeps near; None of a kernel that is small beside the others."""

    def compiled(self, plan: Plan, problem: Problem) -> Compiled:
        """The compiler's figures, which may take seconds."""

    def forward_plan(self, backend: str, problem: Problem) -> Plan:
        """The kernel of a ``problem`` that is not decode's."""

    def takes_decode(self, problem: Problem) -> bool:
        """Whether decode rather than forward is the plan."""

    def decode_tiles(self, arch: str, float8: bool) -> Mapping[Pair, Sequence[DecodeTiles]]:
        """By head dims, blocks of fewer lines first."""

    def decode_splits(self, blocks: int, keys: int, units: int, key_bytes: int) -> int:
        """Into how many parts ``keys`` of ``key_bytes`` with their values go."""

    def backward_plans(
        self, backend: str, arch: str, dims: Pair, dtype: int, general: bool, deterministic: bool
    ) -> tuple[Plan, Plan, Plan]:
        """row_sums, then the two kernels that follow, for these head dims."""

    def backward_notes(self, problem: Problem) -> list[str]:
        """What ``explain`` adds to the plan of a problem with a backward; nothing without one."""
