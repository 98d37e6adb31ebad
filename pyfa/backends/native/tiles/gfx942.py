"""MI300X and its relatives: 64 KB of LDS, 512 registers per lane on each of 4 SIMDs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import Pair

LINES = 16  # query rows (of all heads of a group) in a matrix product of decode


class Forward(NamedTuple):
    """``block_k``: keys per tile. ``waves``: wavefronts of 32 query rows each. ``mma``: rows of a
    matrix product."""

    block_k: int
    waves: int
    mma: int = 32


class Small(NamedTuple):
    """``tiles`` of workgroups of 4 wavefronts, and the most keys of calls that use them.
    ``on_unit``: how many workgroups share a CU.

    ``window``: of a window. ``causal``: of a causal call with as many rows as keys. ``packed``: of
    such a batch on a large grid, if query heads share their keys in L2. ``uneven``: of sequences
    whose lengths are on the device, without a mask.
    """

    tiles: Forward
    window: int
    causal: int = 0
    packed: int = 0
    uneven: int = 0
    on_unit: int = 2


# How many products of 16 lines a wavefront of the latent kernel for many lines computes. The output
# takes all 256 accumulation registers, and the queries take 144 others. With one product, LDS would
# be the bottleneck: each wavefront would read every key twice for 16 lines.
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
    forward_small: Mapping[Pair, Small]
    forward_dropout: Mapping[Pair, Forward]
    forward_mask: Mapping[Pair, Forward]
    forward_float8: Mapping[Pair, Forward]
    forward_float8_general: Mapping[Pair, Forward]
    forward_float8_paged: Mapping[Pair, Forward]
    paged_pairs: tuple[Pair, ...]
    added_pairs: tuple[Pair, ...]
    softcap_pairs: tuple[Pair, ...]
    decode: Mapping[Pair, tuple[Decode, ...]]
    decode_float8: Mapping[Pair, tuple[Decode, ...]]
    latent: Mapping[Pair, tuple[Decode, ...]]
    latent_float8: Mapping[Pair, tuple[Decode, ...]]
    two_passes: Mapping[Pair, tuple[Owner, Owner, Owner, Owner]]
    one_pass: Mapping[Pair, tuple[int, int]]
    one_pass_terms: Mapping[str, tuple[Pair, ...]]
    two_pass_terms: Mapping[str, tuple[Pair, ...]]


# LDS holds two tiles of K and two of V: 65,536 B at head_dim 128 and 256. At 256 the accumulators
# alone take 128 registers, so a SIMD runs one wavefront, which can have twice as many registers.
FORWARD = {
    (64, 64): Forward(64, 8),
    (96, 96): Forward(64, 8),
    (128, 128): Forward(64, 8),
    (192, 128): Forward(32, 8),
    (192, 192): Forward(32, 8),
    (256, 256): Forward(32, 4),
}
# With these tiles, a workgroup takes at most half of the LDS and of the registers. At head_dim 192,
# LDS has no room for two workgroups even with 32 keys per tile: there a workgroup of 4 wavefronts
# has the CU for itself, one wavefront per SIMD. The limits are those up to which, by the timing
# model, calls that fill the device gain about 8 % or more, packed batches in most cases
# (benchmarks/mi300x_waves.py). They are compared with rounded numbers: a window of 1,024, 512, 768
# or 128 keys and the row's own is within the limit.
FORWARD_SMALL = {
    (64, 64): Small(Forward(64, 4), window=1152, causal=1024, packed=2048, uneven=512),
    (96, 96): Small(Forward(32, 4), window=576, causal=512, packed=1024, uneven=256),
    (128, 128): Small(Forward(32, 4), window=832, causal=1024, packed=2048, uneven=512),
    (192, 128): Small(Forward(32, 4), window=144, on_unit=1),
    (192, 192): Small(Forward(32, 4), window=144, on_unit=1),
}
# Dense calls with at most so many keys also use these tiles if fewer rows are then left empty, or
# if each workgroup has a CU of its own. With more keys, it might matter that K and V are read once
# for 128 rows instead of 256, of which the timing model only counts the bytes.
SMALL_KEYS = 1024
_ONE_OF_SIMD = FORWARD | {(192, 192): FORWARD_SMALL[192, 192].tiles}
# Float8 elements take half the bytes: 65,536 B of LDS at head_dim 256.
_FLOAT8 = {pair: tiles._replace(block_k=64) for pair, tiles in FORWARD.items()}
# The two-pass backward: a wavefront owns 32 keys or rows, and a SIMD runs one wavefront or two
# (``_TWICE``), without and with slots.
_1, _1_TWICE = Owner(1, 1), Owner(1, 2)
_SLOTS, _SLOTS_TWICE = Owner(1, 1, 1), Owner(1, 2, 1)

TILES = Tiles(
    forward=FORWARD,
    forward_small=FORWARD_SMALL,
    # At head_dim 192, the registers of the random number generator do not fit if two wavefronts
    # share a SIMD (58 registers spilled), nor do those of a mask_mod with block lists (1 spilled).
    forward_dropout=_ONE_OF_SIMD,
    forward_mask=_ONE_OF_SIMD,
    forward_float8=_FLOAT8,
    # At head_dim 192, the registers for one scale per key do not fit together with the scores of 64
    # keys (36 vector registers or 1 scalar register spilled).
    forward_float8_general=_FLOAT8 | {(192, 128): Forward(32, 8), (192, 192): Forward(32, 8)},
    # With pages they do not fit at 128 either, because page offsets need registers, too (17
    # spilled). At 256, the compiler does not unroll the loop of the 32 loads with pages.
    forward_float8_paged=_FLOAT8 | {(128, 128): Forward(32, 8), (256, 256): Forward(32, 4)},
    paged_pairs=((64, 64), (128, 128), (256, 256)),
    # With plans of a bias, a boolean bias or ALiBi alone.
    added_pairs=((64, 64), (96, 96), (128, 128)),
    # With plans of a softcap alone: those of models that have one (Gemma 2: 256, Grok: 128), and
    # the common ones.
    softcap_pairs=((64, 64), (96, 96), (128, 128), (256, 256)),
    # As many stages as fit in 256 registers per lane. If less than 32 KB would then be in flight to
    # the one workgroup of a compute unit, as many as fit in 512 registers. At 5.3 TB/s and a
    # latency of 1 to 2 µs, an MI300X has 17 to 35 KB in flight to each compute unit.
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
    # Float8 keys and values take half the bytes and registers. With twice the stages at head_dim
    # 64, 48 KB and more are in flight to each workgroup.
    decode_float8={
        (64, 64): (Decode(1, 8, 2), Decode(2, 8, 2), Decode(4, 8, 1)),
        (96, 96): (Decode(1, 4, 2), Decode(2, 4, 2), Decode(4, 4, 1)),
        (128, 128): (Decode(1, 4, 2), Decode(2, 4, 1), Decode(4, 4, 1)),
        (192, 128): (Decode(1, 4, 2), Decode(2, 4, 1)),
        (192, 192): (Decode(1, 4, 2), Decode(2, 4, 1)),
        (256, 256): (Decode(1, 4, 1), Decode(2, 4, 1)),
    },
    # For 16 lines, the accumulators take 128 registers, the queries 72, and a group of keys 72 (36
    # in float8). With a second product of 16 lines, 170 registers spilled.
    latent={(576, 512): (Decode(1, 2, 1),)},
    latent_float8={(576, 512): (Decode(1, 4, 1),)},
    # The pass that owns keys and the pass that owns rows: for plain scores, then for general
    # scores. Two wavefronts on a SIMD hide each other's vector instructions; there is only one
    # where two would spill. With score terms and at head_dim 128, the pass that owns rows takes at
    # most 256 registers anyway, except with some mods, which would spill. Slots
    # (kernels/hip/bwd_slots.h) keep the matrix unit busy if the vector unit has less to do than the
    # matrix unit. With score terms it has more to do, and the fragments of slots spilled. At
    # head_dim 256, the pass that owns keys has no registers for slots: the matrix unit is busy for
    # 0.25 to 0.29 of the time with them, and for 0.56 to 0.58 without, with reads from LDS three
    # ahead (``kAhead``).
    two_passes={
        (64, 64): (_SLOTS_TWICE, _SLOTS_TWICE, _1, _1_TWICE),
        (96, 96): (_SLOTS, _SLOTS_TWICE, _1, _1_TWICE),
        (128, 128): (_SLOTS, _SLOTS_TWICE, _1, _1),
        (192, 128): (_SLOTS, _SLOTS, _1, _1),
        (192, 192): (_SLOTS, _SLOTS, _1, _1),
        (256, 256): (_1, _SLOTS, _1, _1),
    },
    # The one-pass backward: how many times 16 keys a wavefront owns, for plain and for general
    # scores. The keys are in registers with their gradients, and once more for dQ: 16 keys of
    # head_dim 192 take 168 registers. A wavefront owns as many keys as leave enough registers for a
    # step. In the timing model, one pass takes 0.25 to 0.55 of the clocks of two passes
    # (docs/kernels/hip_backward.md).
    one_pass={
        (64, 64): (4, 4),
        (96, 96): (4, 3),
        (128, 128): (3, 3),
        (192, 128): (2, 2),
        (192, 192): (2, 2),
    },
    # Pairs with plans for one score term alone (kernels/hip/bwd_terms.h).
    one_pass_terms={
        "sinks": ((64, 64), (128, 128), (192, 128)),
        "alibi": ((64, 64), (96, 96), (128, 128), (192, 192)),
        "softcap": ((64, 64), (96, 96), (128, 128), (192, 192)),
        "dropout": ((64, 64), (128, 128)),
        "bias": ((64, 64), (96, 96), (128, 128)),
        "float32_bias": ((64, 64), (128, 128)),
        "bool_bias": ((64, 64), (128, 128)),
    },
    # The same of the two-pass backward: where it is the only one.
    two_pass_terms={"softcap": ((256, 256),)},
)
