"""A100: 163 KB of shared memory per block. This file also defines the records of the tiles of
Ampere's kernels.

These kernels also run on every later arch, with the tiles in that arch's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import GROUP, Pair

STAGES = 2  # of the forward: buffers for a tile of K and one of V
LINES = 8  # in a matrix product of decode; a line is a query row of one head


class Forward(NamedTuple):
    """A warp owns ``rows`` query rows. K and V are loaded in tiles of ``block_k`` keys, two stages
    of each.

    ``q_in_registers``: the queries stay in registers. ``blocks``: how many should fit on an SM.
    """

    rows: int
    warps: int
    block_k: int
    q_in_registers: bool
    blocks: int

    def shared_bytes(self, pair: Pair, paged: bool) -> int:
        """Return the bytes of a block: the stages, the queries if they do not pass through the
        stages, per-warp scratch."""
        stage = self.block_k * sum(pair) * 2
        queries = self.rows * self.warps * pair[0] * 2
        passing = self.q_in_registers and queries <= stage
        notes = self.warps * (80 if paged else 64)
        return STAGES * stage + (0 if passing else queries) + notes


class Decode(NamedTuple):
    """A warp computes ``tiles`` products of 8 lines (grouped rows). A block has ``warps`` warps, in
    teams of ``team``. The warps of a team share keys and differ in lines. Each team has ``stages``
    slots of 16 keys in flight.
    """

    tiles: int
    team: int
    warps: int
    stages: int

    @property
    def lines(self) -> int:
        """Return the lines of a block."""
        return LINES * self.tiles * self.team

    def shared_bytes(self, pair: Pair, float8: bool, latent: bool) -> int:
        """Return the bytes of a block: page offsets, row states, the ring buffers (where the teams'
        sums meet), and float8 scales of rows and of the keys in flight. Latent values are keys."""
        teams, rows = self.warps // self.team, self.lines
        elements = pair[0] if latent else sum(pair)
        ring = teams * self.stages * GROUP * (1 if float8 else 2) * elements
        sums = teams * rows * (pair[1] + 4) * 4
        states = self.warps * 512 + rows * 12 + 2 * teams * rows * 4
        scales = rows * 4 + 8 + self.warps * (self.stages // 2 + 1) * 256 if float8 else 0
        return _in_lines(states) + _in_lines(max(ring, sums)) + scales


def _in_lines(size: int) -> int:
    return -(-size // 128) * 128


class Backward(NamedTuple):
    """A block owns ``block_k`` keys and takes ``block_q`` rows at a time. Its warps have two roles.

    ``warps_k`` × ``warps_q`` warps compute S, P and dV, and as many compute dP, dS and dK,
    ``chunk_q`` rows at once (0: all rows of a warp). For dQ, ``dq_warps_q`` warps divide the rows,
    and the others divide the head. dS goes through ``buffers``. ``lookahead``: fragments read
    before their use. ``blocks_per_sm``: how many should fit on an SM.
    """

    block_q: int
    block_k: int
    warps_k: int
    warps_q: int = 1
    chunk_q: int = 0
    dq_warps_q: int = 2
    buffers: int = 2
    lookahead: int = 2
    blocks_per_sm: int = 1

    def shared_bytes(self, pair: Pair, general: bool) -> int:
        """Return the bytes of a block: its keys and values, two stages of Q and dO with their
        states, P and dS."""
        q, k = self.block_q, self.block_k
        stage = q * sum(pair) * 2 + 2 * q * 4
        scores = k * q * 2
        buffer = scores + (self.warps_k * q * 4 if general else 0)
        kept = scores * (1 + general) + self.buffers * buffer
        return k * sum(pair) * 2 + 2 * stage + kept


class Tiles(NamedTuple):
    """The constants that Ampere's kernels are compiled with for one arch, by head dims.

    ``forward``: for plain scores, general scores, dropout. ``forward_paged``: for general scores
    with pages, if different. ``small_grid``: with half the rows, if the usual tiles leave SMs
    without a block; plain and dense only. ``decode``: for blocks of 8, 16, 32 and 64 lines (grouped
    rows). ``latent``: the same for V as a view of K. ``decode_float8`` and ``latent_float8``: the
    same for float8 caches; used only on archs where one instruction converts two float8 numbers to
    float16 (sm_89 and later). ``backward``: for plain scores, then for general ones, which keep
    more of P for dS.
    """

    forward: Mapping[Pair, tuple[Forward, Forward, Forward]]
    forward_paged: Mapping[Pair, Forward]
    small_grid: Mapping[Pair, Forward]
    decode: Mapping[Pair, tuple[Decode, ...]]
    decode_float8: Mapping[Pair, tuple[Decode, ...]]
    latent: Mapping[Pair, tuple[Decode, ...]]
    latent_float8: Mapping[Pair, tuple[Decode, ...]]
    backward: Mapping[Pair, tuple[Backward, Backward]]


def sizes(*rows: tuple[int, int, int, int]) -> tuple[Decode, ...]:
    """Return decode's tiles for blocks of 8, 16, 32 and, if head dims leave enough registers, 64
    lines (grouped rows)."""
    return tuple(Decode(*row) for row in rows)


# A warp with 32 rows reads K and V from shared memory half as often as two warps with 16 rows each.
# At head_dim 128 this is 1.22 times as fast (docs/kernels/cuda_sm80_forward.md). These tiles are
# the first ones that fit and do not spill; none was timed on an A100.
_64 = Forward(32, 4, 64, True, 2)
_192 = Forward(16, 8, 64, False, 1)
_256 = Forward(16, 8, 32, False, 1)
_GENERAL_96 = Forward(32, 4, 32, False, 2)
_128 = Forward(32, 4, 48, False, 2)
ONE_OF_128 = Forward(16, 8, 64, True, 1)

TILES = Tiles(
    forward={
        (64, 64): (_64, _64, Forward(32, 4, 32, True, 2)),
        (96, 96): (Forward(32, 4, 64, False, 2), _GENERAL_96, _GENERAL_96),
        (128, 128): (_128, _128, ONE_OF_128),
        (192, 128): (_192, _192, _192),
        (192, 192): (_192, _192, _192),
        (256, 256): (_256, _256, _256),
    },
    forward_paged={(64, 64): Forward(32, 4, 64, False, 2)},
    small_grid={
        (64, 64): Forward(16, 4, 64, True, 2),
        (128, 128): Forward(16, 4, 64, True, 2),
    },
    # The row of head_dim 128 was measured (on an H200). The others keep about as many bytes in
    # flight, as far as registers and shared memory allow.
    decode={
        (64, 64): sizes((1, 1, 8, 3), (2, 1, 8, 3), (4, 1, 8, 3), (4, 2, 8, 6)),
        (96, 96): sizes((1, 1, 8, 2), (2, 1, 8, 2), (4, 1, 8, 2), (4, 2, 8, 5)),
        (128, 128): sizes((1, 1, 8, 2), (2, 1, 8, 2), (4, 1, 8, 2), (4, 2, 8, 4)),
        (192, 128): sizes((1, 1, 6, 2), (2, 1, 6, 2), (2, 2, 8, 3), (2, 4, 8, 6)),
        (192, 192): sizes((1, 1, 6, 2), (2, 1, 6, 2), (2, 2, 8, 3), (2, 4, 8, 6)),
        (256, 256): sizes((1, 1, 4, 2), (2, 1, 4, 2), (2, 2, 8, 2), (2, 4, 8, 4)),
        (576, 512): sizes((1, 1, 2, 2), (1, 2, 4, 2), (1, 4, 8, 2)),
    },
    # As many bytes in flight as above, which are twice as many keys. Head dims 96 and 192 use the
    # tiles of the next larger head_dim, whose copies skip missing elements. At 128, 4 products per
    # warp would spill.
    decode_float8={
        (64, 64): sizes((1, 1, 8, 6), (2, 1, 8, 6), (4, 1, 8, 6), (4, 2, 8, 12)),
        (128, 128): sizes((1, 1, 8, 4), (2, 1, 8, 4), (2, 2, 8, 8), (2, 4, 8, 16)),
        (256, 256): sizes((1, 1, 8, 3), (2, 1, 6, 4), (2, 2, 8, 4), (2, 4, 8, 8)),
    },
    # The 8 lines of a warp take 128 registers for sums and 72 for queries. More lines therefore
    # need more warps per team, of which four share the 16 rows of a stage.
    latent={(576, 512): sizes((1, 1, 4, 2), (1, 2, 8, 2), (1, 4, 8, 4))},
    latent_float8={(576, 512): sizes((1, 1, 4, 4), (1, 2, 8, 4), (1, 4, 8, 8))},
    # The first tiles that fit and do not spill. At head_dim 192 and more, two warps have the same
    # keys, each with half of the rows.
    backward={
        (64, 64): (Backward(128, 128, 4, 1, 64, 4, buffers=1), Backward(64, 128, 4, 1, 32)),
        (96, 96): (Backward(64, 128, 4, 1, 64, 4), Backward(64, 128, 4, 1, 32, 4, buffers=1)),
        (128, 128): (Backward(64, 128, 4, 1, 64, buffers=1, lookahead=4),
                     Backward(32, 128, 4, 1, 32, buffers=1)),
        (192, 128): (Backward(64, 64, 2, 2, lookahead=4), Backward(64, 64, 2, 2)),
        (192, 192): (Backward(64, 64, 2, 2, buffers=1, lookahead=4), Backward(32, 64, 2, 2)),
        (256, 256): (Backward(32, 64, 2, 2), Backward(32, 64, 2, 2)),
    },
)  # fmt: skip
