"""MI300X and its relatives: 64 KB of LDS, 512 registers per lane on each of 4 SIMDs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import Pair

LINES = 16  # of a matrix product of decode


class Forward(NamedTuple):
    """``block_k``: keys per tile. ``waves``: wavefronts of 32 query rows each. ``mma``: rows of a
    matrix product."""

    block_k: int
    waves: int
    mma: int = 32


# Products of 16 lines of a wavefront of the kernel of latent attention for many lines: the output
# takes all 256 accumulation registers, the queries 144 others. With one, LDS is the bound: each
# wavefront reads every key twice for 16 lines.
LATENT_TILES = 2


class Decode(NamedTuple):
    """``tiles``: matrix products of 16 lines, each line a query row of one head. ``stages``: groups
    of keys in flight per wavefront; ``occupancy``: wavefronts per SIMD."""

    tiles: int
    stages: int
    occupancy: int

    @property
    def lines(self) -> int:
        """Return the lines of a workgroup."""
        return LINES * self.tiles

    def shared_bytes(self, pair: Pair, float8: bool, latent: bool) -> int:
        """Return 0: nothing is dynamic, because kernels declare what they use."""
        return 0


class Owner(NamedTuple):
    """A kernel of the two-pass backward.

    ``columns``: the keys or rows that a wavefront owns, in units of 32. ``per_simd``: wavefronts
    per SIMD. ``slots``: 1 if products are computed in slots (``kernels/hip/bwd_slots.h``).
    """

    columns: int
    per_simd: int
    slots: int = 0


class Tiles(NamedTuple):
    """All tables of an arch."""

    forward: Mapping[Pair, Forward]
    forward_dropout: Mapping[Pair, Forward]
    forward_float8: Mapping[Pair, Forward]
    forward_float8_general: Mapping[Pair, Forward]
    forward_float8_paged: Mapping[Pair, Forward]
    paged_pairs: tuple[Pair, ...]
    decode: Mapping[Pair, tuple[Decode, ...]]
    decode_float8: Mapping[Pair, tuple[Decode, ...]]
    latent: Mapping[Pair, tuple[Decode, ...]]
    latent_float8: Mapping[Pair, tuple[Decode, ...]]
    two_passes: Mapping[Pair, tuple[Owner, Owner, Owner, Owner]]
    one_pass: Mapping[Pair, tuple[int, int]]


# LDS holds two tiles of K and two of V: 65,536 B at 128 and 256. At 256 the accumulators alone are
# 128 registers: one wavefront on a SIMD, with twice as many.
FORWARD = {
    (64, 64): Forward(64, 8),
    (96, 96): Forward(64, 8),
    (128, 128): Forward(64, 8),
    (192, 128): Forward(32, 8),
    (192, 192): Forward(32, 8),
    (256, 256): Forward(32, 4),
}
# Of float8, in half the bytes: 65,536 B at 256.
_FLOAT8 = {pair: tiles._replace(block_k=64) for pair, tiles in FORWARD.items()}
# Backward's owners: a column of 32, one or two wavefronts on a SIMD, and the same in slots.
_1, _1_TWICE = Owner(1, 1), Owner(1, 2)
_SLOTS, _SLOTS_TWICE = Owner(1, 1, 1), Owner(1, 2, 1)

TILES = Tiles(
    forward=FORWARD,
    # Where the generator's registers do not fit beside two wavefronts on a SIMD (58 spilled).
    forward_dropout=FORWARD | {(192, 192): Forward(32, 4)},
    forward_float8=_FLOAT8,
    # The registers for one scale per key do not fit with scores of 64 keys at 192 (36 vector
    # registers spilled, or 1 scalar).
    forward_float8_general=_FLOAT8 | {(192, 128): Forward(32, 8), (192, 192): Forward(32, 8)},
    # Nor at 128 beside the offsets of pages (17). At 256, 32 loads with pages are a loop that the
    # compiler does not unroll.
    forward_float8_paged=_FLOAT8 | {(128, 128): Forward(32, 8), (256, 256): Forward(32, 4)},
    paged_pairs=((64, 64), (128, 128), (256, 256)),
    # The stages are what 256 registers hold, or 512 where 256 would leave less than 32 KB on their
    # way to a compute unit's one workgroup: at 5.3 TB/s and a latency of 1 to 2 µs an MI300X has 17
    # to 35 KB on their way to each.
    decode={
        (64, 64): (Decode(1, 4, 2), Decode(2, 4, 2), Decode(4, 4, 1)),
        (96, 96): (Decode(1, 4, 2), Decode(2, 3, 2), Decode(4, 3, 1)),
        (128, 128): (Decode(1, 4, 2), Decode(2, 3, 1), Decode(4, 2, 1)),
        (192, 128): (Decode(1, 2, 2), Decode(2, 3, 1)),
        (192, 192): (Decode(1, 2, 2), Decode(2, 2, 1)),
        (256, 256): (Decode(1, 2, 1), Decode(2, 2, 1)),
        (512, 512): (Decode(1, 1, 1),),
        (576, 512): (Decode(1, 1, 1),),
    },
    # Float8 keys and values take half the bytes and registers: with twice the stages at 64 there
    # are 48 KB and more on their way to each workgroup.
    decode_float8={
        (64, 64): (Decode(1, 8, 2), Decode(2, 8, 2), Decode(4, 8, 1)),
        (96, 96): (Decode(1, 4, 2), Decode(2, 4, 2), Decode(4, 4, 1)),
        (128, 128): (Decode(1, 4, 2), Decode(2, 4, 1), Decode(4, 4, 1)),
        (192, 128): (Decode(1, 4, 2), Decode(2, 4, 1)),
        (192, 192): (Decode(1, 4, 2), Decode(2, 4, 1)),
        (256, 256): (Decode(1, 4, 1), Decode(2, 4, 1)),
    },
    # Of 16 lines the accumulators are 128 registers, the queries 72, a group of keys 72 (36 of
    # float8). A second product of 16 lines spilled 170.
    latent={(576, 512): (Decode(1, 2, 1),)},
    latent_float8={(576, 512): (Decode(1, 4, 1),)},
    # Of plain scores owning keys and rows, then of general ones. Two wavefronts on a SIMD hide each
    # other's vector instructions, where that does not spill. Slots (kernels/hip/bwd_slots.h) keep
    # the matrix unit busy where the vector unit has less to do than it; with score terms it has
    # more, and fragments read ahead spilled. Owning 256 elements of keys and values there are no
    # registers to read ahead: 0.25 to 0.29 of the matrix unit, without slots 0.31 to 0.35.
    two_passes={
        (64, 64): (_SLOTS_TWICE, _SLOTS_TWICE, _1, _1_TWICE),
        (96, 96): (_SLOTS, _SLOTS_TWICE, _1, _1_TWICE),
        (128, 128): (_SLOTS, _SLOTS_TWICE, _1, _1),
        (192, 128): (_SLOTS, _SLOTS, _1, _1),
        (192, 192): (_SLOTS, _SLOTS, _1, _1),
        (256, 256): (_1, _SLOTS, _1, _1),
    },
    # One pass: 16s of keys that a wavefront owns, of plain scores and of general ones. They are in
    # registers with their gradients, and once more for dQ: 168 registers for 16 of a head_dim of
    # 192. As many as leave room for what a step needs. By the timing model one pass takes 0.25 to
    # 0.55 of the clocks of two (docs/kernels/hip_backward.md).
    one_pass={
        (64, 64): (4, 4),
        (96, 96): (4, 3),
        (128, 128): (3, 3),
        (192, 128): (2, 2),
        (192, 192): (2, 2),
    },
)
