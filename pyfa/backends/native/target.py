"""The interface of a vendor to the host driver: its kernels, and the shape of a workgroup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...blocks import Tiles
from ...device import Device
from ...plan import Plan
from ...problem import Call, Problem
from ...shape import Shape
from ...sizes import Extent, Size, shape_of
from ..common import splits
from .tiles import Pair


class Block(NamedTuple):
    """A workgroup of a kernel.

    ``rows``: query rows that it owns, of one head, or in decode of all query heads of a KV head; 0
    if it owns keys. ``keys``: keys per tile, or the keys that it owns. ``per_unit``: how many
    workgroups a CU or SM should hold at once. ``costs``: the cost model for splitting keys within a
    round. ``rounds``: the cost model for splitting over several rounds of equal work tiles, on
    devices with a timing model. ``chunk``: with batch invariance the keys that are computed apart
    and merged in order, 0 without. ``kept``: the floats that a workgroup keeps between its chunks.
    ``per_unit`` to ``kept`` apply to forward only. ``parts``: the cost model for dividing the query
    heads of a group in a backward. ``of_whole``: for a
    workgroup with the rows of all query heads of a KV head, in parts that have a row of every head
    or of none: the rows of such a part. ``by_length``: for a packed batch, only as many workgroups
    are launched as its total of rows or keys can need, and the kernel finds the sequence of each
    workgroup. ``table``: a backward finds that sequence in a table that ``row_sums`` makes.
    """

    threads: int
    rows: int = 0
    keys: int = 0
    per_unit: int = 1
    costs: splits.Costs = splits.FREE
    rounds: splits.Rounds | None = None
    chunk: int = 0
    kept: int = 0
    parts: splits.GroupCosts = splits.GroupCosts()
    of_whole: int = 0
    by_length: bool = False
    table: bool = False

    def lines_of(self, group: int) -> int:
        """Return how many rows of the ``group`` query heads of a KV head a workgroup has."""
        if not self.of_whole:
            return self.rows
        return self.rows // self.of_whole * (self.of_whole // group * group)


def blocks_of_head(call: Call, block: Block) -> Extent:
    """Return the workgroups like ``block`` for one head of all sequences, and one split."""
    if block.rows:
        offsets, side, longest, size = call.cu_seqlens_q, "q", call.max_seqlen_q, block.rows
    else:
        offsets, side, longest, size = call.cu_seqlens_k, "k", call.max_seqlen_k, block.keys
    if offsets is not None and block.by_length and call.batch:
        return shape_of(call, side)[0] // size + call.batch
    return -(-longest // size) * call.batch


class Buffers(NamedTuple):
    """The buffers of a workgroup in LDS or shared memory, for ``pyfa.traffic``.

    ``tile``: rows and keys of a tile, if ``Block`` does not give them. ``whole_tiles``: the
    workgroup reads whole tiles at edges, too. ``ahead``: how many tiles it reads beyond the last.
    """

    role: str
    parts: Mapping[str, int]
    tile: tuple[int, int] | None = None
    whole_tiles: bool = False
    ahead: int = 0


class BackwardGrid(NamedTuple):
    """The properties by which the tiles of a backward are chosen: the shape, rounded as
    ``Problem.bucketed`` rounds it, and the device."""

    shape: Shape
    device: Device


class DecodeTiles(Protocol):
    """A row of decode's tiles, as ``tiles.constants_of`` reads it."""

    @property
    def lines(self) -> int:
        """Return the query rows, of all heads of a group, that a workgroup takes."""

    def shared_bytes(self, pair: Pair, float8: bool, latent: bool) -> int:
        """Return the dynamic shared memory; 0 if only the compiler knows it."""


@dataclass(frozen=True)
class Target:
    """The kernels of hip or cuda. A function that takes a ``backend`` takes a backend's name,
    because the emulator shares hip's kernels.

    ``name``: the vendor's backend, and the folder of its kernels. ``decode``: the decode kernel's
    source; ``float8``: the code of its float8 keys. ``latent``: the source of a kernel for latent
    attention alone, if there is one, with the same grid as decode. ``device_of``: returns the
    device that a problem's plan is made for.

    ``plan_of``: the plan of a kernel that depends on a number format at most, such as "combine".
    ``passes``: every forward and backward kernel of a backend with the tiles of an arch.
    ``notes_of``: what ``explain`` adds to a plan for a pair of head dims. ``backward_notes``: what
    ``explain`` adds for a problem with a backward. ``block_of``: the workgroup of a plan's kernel.
    ``buffers_of``: the buffers of this workgroup; None for a kernel whose cost is small compared
    with the others. ``compiled``: registers per lane and bytes of LDS or shared memory as the
    compiler reports them, which may take seconds.

    ``takes_decode``: whether decode runs a problem, rather than forward. ``latent_plan``: the plan
    of a problem that the kernel ``latent`` runs, else None. ``forward_plan``: the plan of any other
    problem. ``decode_tiles``: the tiles of an arch, for float8 keys or not, by head dims, with few
    lines first. ``latent_tiles``: the same for V as a view of K. ``decode_splits``: the number of
    splits of the keys, by plan, blocks, keys, units and the bytes of a key with its value.
    ``splits_of_lengths``: the number of splits of sequences whose lengths only the device knows, by
    plan, the number for equal lengths, blocks, the most keys, and units. ``backward_plans``:
    row_sums and the two kernels that follow, by backend, arch, head dims, number format, general
    scores, determinism, the digest of the mods, the names of the score terms, and what the tiles
    may follow from (None: nothing).
    ``bias_grad_plan``: the plan of the gradient of a bias, if there is one. ``list_tiles``: the
    tiles of a plan whose kernel visits work tiles by block lists. ``order_of``: the members of
    ``Params`` that give a plan's kernel its order of work tiles, by the other members and the
    number of work tiles.
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
    decode_splits: Callable[[Plan, int, int, int, int], int]
    backward_plans: Callable[
        [str, str, Pair, int, bool, bool, str, frozenset[str], BackwardGrid | None],
        tuple[Plan, Plan, Plan],
    ]
    list_tiles: Callable[[Plan], Tiles]
    bias_grad_plan: Callable[[str, str, Pair, int, str, frozenset[str]], Plan] | None = None
    splits_of_lengths: Callable[[Plan, int, int, int, int], int] = (
        lambda plan, parts, blocks, keys, units: parts
    )
    order_of: Callable[[Plan, Mapping[str, float | Size], Extent], dict[str, int]] = (
        lambda plan, values, blocks: {}
    )
    latent: str = ""
    latent_plan: Callable[[Problem], Plan | None] = lambda problem: None
