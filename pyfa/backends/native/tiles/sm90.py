"""H100 and H200 (227 KiB of shared memory per block): tiles of Hopper's kernels, and of Ampere's
kernels for the calls that Hopper's do not support."""

from __future__ import annotations

from typing import NamedTuple

from . import Pair
from .sm80 import ONE_OF_128, Backward, Forward, sizes
from .sm80 import TILES as OF_SM80

ROWS = 64  # query rows of a warpgroup of the forward
STAGES = 2  # buffers: in the forward for K and for V, in the backward for Q and for dO
# With batch_invariant, rows with more keys than a chunk are computed in chunks, which are then
# merged. Calls with score terms have no chunks, because they would spill. Chunks are shorter where
# a block has room in shared memory for what it keeps between them (``Own.kept_bytes``).
CHUNK_KEYS = 2048
SHORT_CHUNK_KEYS = 1024
SHARED_BYTES = 227 * 1024  # at most, of a block
TOLD = 2  # how many work tiles the copying warp may be ahead
_GROUP_KEYS = 64  # keys of a warpgroup of the backward
_PANEL_BYTES = 128  # bytes of a row that TMA and the matrix instruction swizzle together


class Own(NamedTuple):
    """``groups`` warpgroups of 64 query rows each, tiles of ``block_k`` keys, ``stages`` of K and
    as many of V. ``halves``: warpgroups that have the same rows, and each a part of V."""

    groups: int
    block_k: int
    stages: int = STAGES
    halves: int = 1

    @property
    def rows(self) -> int:
        """Return the query rows of a block."""
        return self.groups // self.halves * ROWS

    def chunk_tiles(self, pair: Pair) -> int:
        """Return the tiles of a chunk with ``batch_invariant``."""
        short = self.shared_bytes(pair) + self.kept_bytes(pair) <= SHARED_BYTES
        return (SHORT_CHUNK_KEYS if short else CHUNK_KEYS) // self.block_k

    def kept_bytes(self, pair: Pair) -> int:
        """Return the bytes that a block keeps between chunks: its output in float32, and a base and
        a sum of each row."""
        return self.rows * (4 * pair[1] + 8)

    def shared_bytes(self, pair: Pair, bias: bool = False) -> int:
        """Return the bytes of a block: queries, stages (with ``bias``, each stage has a tile of the
        bias), barriers of 8 bytes, and the descriptions of two tiles of work."""
        queries = self.rows * pair[0] * 2
        stages = self.stages * self.block_k * (sum(pair) + bias * self.rows) * 2
        barriers = (2 * self.groups + 4 * self.stages + 2 * TOLD + 1) * 8
        return -(-(queries + stages + barriers) // 16) * 16 + TOLD * 48

    def shared_bytes_of_float8(self, pair: Pair) -> int:
        """Return the bytes of a float8 block, which also has a transposed copy of V and the
        scales."""
        queries = self.groups * ROWS * pair[0]
        stages = self.stages * self.block_k * (pair[0] + 2 * pair[1])
        barriers = (2 * self.groups + 6 * self.stages + 2 * TOLD + 1) * 8
        return -(-(queries + stages + barriers) // 16) * 16 + TOLD * 64

    def shared_bytes_of_latent(self, pair: Pair) -> int:
        """Return the bytes of a block of 64 packed rows whose tiles of keys, one for each
        warpgroup, are also the values: queries, tiles, two floats of each row for each warpgroup,
        barriers."""
        panels = pair[0] // 64
        tiles = (ROWS + self.groups * self.block_k) * pair[0] * 2
        floats = 2 * self.groups * ROWS * 4
        return tiles + floats + self.groups * (panels + self.groups + 2) * 8


# Three tiles each: if every row sees all keys; with a causal mask or a window; with score terms. At
# head_dim 64 and 128, these are the fastest on an H200 of those in
# docs/kernels/cuda_sm90_forward.md. At 256, no others were tried. At 96 and 192, they have the
# sizes of FlashAttention-3's tiles where these do not spill.
_WIDE = Own(2, 32, halves=2)
FORWARD: dict[Pair, tuple[Own, Own, Own]] = {
    (64, 64): (Own(3, 128), Own(3, 128), Own(2, 128)),
    (96, 96): (Own(2, 176), Own(2, 128), Own(2, 128)),
    (128, 128): (Own(2, 128), Own(2, 128), Own(2, 128)),
    (192, 128): (Own(2, 128), Own(2, 128), Own(2, 112)),
    (192, 192): (Own(2, 112), Own(2, 96), Own(2, 80)),
    (256, 256): (Own(2, 80), Own(2, 80), Own(2, 80)),
    (512, 512): (_WIDE,) * 3,
    (576, 512): (_WIDE,) * 3,
}
# At head_dim 64, of a score_mod with a tanh that loads nothing for each score. Such a score_mod may
# have so many operations that its kernels with three warpgroups do not spill.
FORWARD_TANH = Own(3, 96)
MOST_OF_THREE_GROUPS = 24


# Blocks of one warpgroup, of which an SM has two up to head_dim 128. They fit lengths up to 64 or
# around 300 tokens, leave fewer keys of the diagonal masked, and visit fewer masked keys with a
# window.
SMALL: dict[Pair, Own] = {
    (64, 64): Own(1, 64, 4),
    (96, 96): Own(1, 64),
    (128, 128): Own(1, 64),
    (256, 256): Own(1, 64),
}


class Pace(NamedTuple):
    """How fast blocks of ``tiles`` are. A work tile takes ``start`` µs, and ``key`` µs for each key
    of its tiles. ``shared``: how many times as long all work tiles take together if an SM has two
    blocks at a time."""

    tiles: Own
    start: float
    key: float
    shared: float = 1.0


# Tiles of plain or causal calls whose grid is known, including the general tiles (``FORWARD``).
# Fitted to 29 shapes of head_dim 64 and 11 of each other head_dim on an H100, and to 51 shapes of
# head_dim 64, 14 of 96 and 32 of 128 on an H200 (docs/kernels/cuda_sm90_forward.md). Tiles with
# fewer warpgroups leave fewer rows empty and fill a device with small grids. Tiles of 80, 96 and
# 112 keys fit lengths of 50 or 77, 257 and 197 tokens.
FORWARD_OF_GRID: dict[Pair, tuple[Pace, ...]] = {
    (64, 64): (
        Pace(FORWARD[64, 64][0], 2.25, 0.0110),
        Pace(Own(1, 128, 3), 1.6, 0.0060, shared=1.3),
        Pace(Own(3, 96), 2.25, 0.0111),
        Pace(Own(1, 112), 1.55, 0.0071, shared=1.2),
        Pace(Own(1, 80, 3), 1.5, 0.0082, shared=1.15),
        Pace(SMALL[64, 64], 1.4, 0.0068, shared=1.25),
    ),
    (96, 96): (
        Pace(FORWARD[96, 96][0], 2.6, 0.0104),
        Pace(FORWARD[96, 96][1], 3.1, 0.0087),
        Pace(Own(2, 112), 2.7, 0.0099),
        Pace(Own(2, 96), 2.4, 0.0110),
        Pace(Own(1, 128), 2.1, 0.0137),
        Pace(SMALL[96, 96], 1.3, 0.0078, shared=1.8),
    ),
    (128, 128): (
        Pace(FORWARD[128, 128][0], 2.8, 0.0101),
        Pace(Own(1, 128), 1.9, 0.0078, shared=1.1),
        Pace(SMALL[128, 128], 1.6, 0.0095, shared=1.5),
    ),
    (192, 192): (
        Pace(FORWARD[192, 192][0], 3.85, 0.0166),
        Pace(FORWARD[192, 192][1], 3.2, 0.0139),
        Pace(Own(1, 96), 2.6, 0.0113),
    ),
    (256, 256): (
        Pace(FORWARD[256, 256][0], 4.85, 0.0196),
        Pace(Own(2, 48), 4.3, 0.0219),
        Pace(SMALL[256, 256], 3.2, 0.0139),
    ),
}
LAUNCH_US = 2.5
# Calls with a window of at most so many keys have the tiles of ``SMALL``. On an H200, they make
# windows of 64 to 512 keys at head_dim 64 1.33 to 1.10 times as fast as blocks of 128 rows and
# tiles of 128 keys, at head_dim 128 1.10 to 1.05 times, at head_dim 96 windows of 64 to 256 keys
# 1.19 to 1.03 times, and at head_dim 256 windows of 128 keys 1.08 times. Beyond these windows, the
# general tiles are as fast or faster.
FORWARD_OF_WINDOW: dict[Pair, int] = {
    (64, 64): 1280,
    (96, 96): 320,
    (128, 128): 640,
    (256, 256): 288,
}
# So have calls whose lengths are on the device, if no sequence has more rows or keys than the first
# number, or with a causal mask the second one. On an H200, packed sequences of up to 64 tokens are
# 2.6 times as fast with them at head_dim 64, 1.6 to 2.5 times at 96, 1.5 to 2.0 times at 128 and
# 1.15 to 1.26 times at 256. At head_dim 64, sequences of 60 to 128 tokens are 1.2 times as fast,
# causal ones of 64 to 512 tokens 1.2 times, and causal ones of 200 to 1,000 tokens 1.1 times.
FORWARD_OF_LENGTHS: dict[Pair, tuple[int, int]] = {
    (64, 64): (256, 1024),
    (96, 96): (64, 64),
    (128, 128): (64, 64),
    (256, 256): (64, 64),
}
# Tiles of calls whose only score term is a bias. Tiles of the bias have panels of 64 keys.
FORWARD_BIAS: dict[Pair, Own] = {
    pair: Own(3 if pair[0] == 64 else 2, 128 if pair[0] <= 128 else 64)
    for pair in FORWARD
    if pair[0] <= 256
}
# Tiles with batch_invariant, as in ``FORWARD``: calls without a mask use the tiles of calls with
# one. At head_dim 192, the ballots of such a kernel spilled 16 to 32 bytes with 96 and with 128
# keys.
FORWARD_INVARIANT: dict[Pair, tuple[Own, Own, Own]] = {
    pair: (terms,) * 3 if pair[0] == 192 else (masked, masked, terms)
    for pair, (_, masked, terms) in FORWARD.items()
    if masked.halves == 1
}
# Three tiles each: for plain scores; with score terms; with scales per block of rows.
FORWARD_FLOAT8: dict[Pair, tuple[Own, Own, Own]] = {
    (64, 64): (Own(3, 128), Own(2, 128), Own(2, 128)),
    (128, 128): (Own(3, 128), Own(2, 128), Own(2, 128)),
    (256, 256): (Own(2, 128), Own(2, 96), Own(2, 64)),
}
# Latent attention: O of 64 packed rows takes the registers of two warpgroups. P of 64 keys
# overwrites the last panel of these keys in shared memory.
LATENT = Own(2, 64)


class OwnBackward(NamedTuple):
    """``groups`` warpgroups take ``block_q`` rows at a time. Each has 64 keys of its own, or
    (``roles``) both have the same 64 keys and different roles.

    ``overlap`` (with roles): the scores of a tile are computed while the gradient of the previous
    tile is in flight, which is always so without roles. ``float_weights``: dS is computed from P in
    float32. ``one_sender`` (without roles): one thread adds the tiles of dQ to memory for all
    warps. ``blocks``: how many blocks an SM has at a time.
    """

    groups: int
    block_q: int
    overlap: bool = True
    roles: bool = False
    float_weights: bool = False
    one_sender: bool = False
    blocks: int = 1

    @property
    def block_k(self) -> int:
        return _GROUP_KEYS * (1 if self.roles else self.groups)

    def shared_bytes(self, pair: Pair, sinks: bool = False) -> int:
        """Return the shared memory of a block, in bytes: its keys and values; the stages of Q and
        dO, with two floats per row, or three with ``sinks``; two tiles of dS; P if it is passed on,
        otherwise one or two float32 tiles of dQ; and barriers."""
        keys, rows = self.block_k, self.block_q
        states = -(-rows * 4 // 128) * 128
        stage = rows * sum(pair) * 2 + (3 if sinks else 2) * states
        ds = keys // _GROUP_KEYS * rows * _PANEL_BYTES
        if self.roles:
            passed_on = rows * _GROUP_KEYS * (4 if self.float_weights else 2)  # P
        else:
            passed_on = rows * pair[0] * 4 * (2 if self.one_sender else 1)  # dQ
        # Barriers; what is told of two work tiles; 1 / scale.
        told = 256 + 2 * 48 + 16
        return keys * sum(pair) * 2 + STAGES * stage + 2 * ds + passed_on + told


# More rows at a time need more registers than 240 a thread.
BACKWARD: dict[Pair, OwnBackward] = {
    (64, 64): OwnBackward(2, 128),
    (128, 128): OwnBackward(2, 64, one_sender=True),
    (192, 128): OwnBackward(2, 32, one_sender=True),
    (192, 192): OwnBackward(2, 64, roles=True),
    (256, 256): OwnBackward(2, 64, overlap=False, roles=True, float_weights=True),
}


class BackwardPace(NamedTuple):
    """How fast blocks of ``tiles`` are. A block takes ``start`` µs, and ``step`` µs for each tile
    of query rows that it visits."""

    tiles: OwnBackward
    start: float
    step: float


class BackwardTimes(NamedTuple):
    """The time of a backward in microseconds: ``launch``, and ``rows`` for 1,000 rows of a head in
    row_sums and dq_convert. ``sum``: to add up the gradients of several parts of a group. ``tail``:
    of unequal blocks, how much longer they take than the average SM is busy, as a share of the
    longest. ``paces`` of attn_bwd, the general tiles first."""

    launch: float
    rows: float
    sum: float
    tail: float
    paces: tuple[BackwardPace, ...]


# Tiles for sizes that are known. Fitted on an H200 to 55 shapes of head_dim 64, 38 of 128, 19 of
# 192/128 and 18 of 256 (docs/kernels/cuda_sm90_backward.md). Fewer rows at a time leave fewer
# places empty. Of blocks of 64 keys an SM has two up to 128, of which one multiplies while the
# other loads or stores: short sequences and small windows are faster, while twice as much dQ is
# added for a score.
_32_OF_256 = BACKWARD[256, 256]._replace(block_q=32)
BACKWARD_OF_GRID: dict[Pair, BackwardTimes] = {
    (64, 64): BackwardTimes(3.2, 0.21, 6.4, 0.47, (
        BackwardPace(BACKWARD[64, 64], 6.3, 2.25),
        BackwardPace(OwnBackward(2, 112), 5.9, 2.02),
        BackwardPace(OwnBackward(2, 96), 5.0, 1.82),
        BackwardPace(OwnBackward(1, 80, blocks=2), 4.55, 1.77),
        BackwardPace(OwnBackward(1, 64, blocks=2), 3.8, 1.70),
    )),
    (128, 128): BackwardTimes(1.4, 0.51, 7.8, 0.39, (
        BackwardPace(BACKWARD[128, 128], 6.9, 1.92),
        BackwardPace(OwnBackward(2, 48, one_sender=True), 6.2, 1.66),
        BackwardPace(OwnBackward(1, 32, one_sender=True, blocks=2), 6.0, 1.47),
    )),
    (192, 128): BackwardTimes(2.5, 0.68, 7.0, 0.37, (
        BackwardPace(BACKWARD[192, 128], 5.4, 1.65),
        BackwardPace(OwnBackward(2, 64, roles=True), 5.9, 1.71),
    )),
    (256, 256): BackwardTimes(2.7, 0.81, 7.0, 0.35, (
        BackwardPace(BACKWARD[256, 256], 8.0, 2.87),
        BackwardPace(_32_OF_256, 5.9, 1.48),
    )),
}  # fmt: skip

# With a window of less than so many keys, and as many query heads as KV heads. On an H200 windows
# of 64 to 256 keys were 1.24 to 1.05 times as fast at 64, of 384 as fast, 1.03 with 64 keys at 128,
# and 1.04 with 128 keys at 256. Groups of heads took 1.03 of the time at 64. Since blocks are
# persistent, 128 keys at 64 are 0.97 times as fast in a large grid and 1.06 in a small one, and 256
# keys are 0.96.
BACKWARD_OF_WINDOW: dict[Pair, tuple[int, OwnBackward]] = {
    (64, 64): (192, OwnBackward(1, 64, blocks=2)),
    (128, 128): (80, OwnBackward(1, 32, one_sender=True, blocks=2)),
    (256, 256): (320, _32_OF_256),
}
# Of these, windows whose calls keep the general tiles if the grid has at least so many work tiles
# for each SM. At head_dim 64, two tiles of 128 rows see 128 keys up to windows of 129 keys, and
# three tiles of 64 rows see 64 keys from windows of 66 keys on. On an H200, windows of 96 and 128
# keys are 1.00 to 1.04 times as fast with the general tiles if there are 8 work tiles for each SM
# or more, and 0.92 to 0.97 times if there are up to 4. Windows come rounded up: 129 keys as 144.
BACKWARD_OF_LARGE_WINDOWED: dict[Pair, tuple[range, int]] = {(64, 64): (range(66, 145), 7)}

# The same for several score terms at once and for a score_mod, whose registers leave room for fewer
# rows; for sinks where the tiles above leave too little shared memory; and for P passed on in
# float32 where dS is of other weights than dV.
BACKWARD_TERMS: dict[Pair, OwnBackward] = {
    (64, 64): OwnBackward(2, 96),
    (128, 128): OwnBackward(2, 48, one_sender=True),
    (192, 128): OwnBackward(2, 64, roles=True, float_weights=True),
    (192, 192): OwnBackward(2, 64, roles=True, float_weights=True),
    (256, 256): OwnBackward(2, 64, overlap=False, roles=True, float_weights=True),
}

# The same for mods in float16: dS of P in 32 bits, whose registers leave room for fewer rows.
# At 128 no tile has them.
BACKWARD_FLOAT16_MODS = {(64, 64): OwnBackward(2, 64, float_weights=True)}

# Tiles of Ampere's kernels, which run forwards with dropout, pages or a bias, and decode. The plain
# tiles of head_dim 64, 128 and 256, forward and backward, are the fastest on an H200 of those in
# docs/kernels/cuda_sm80_forward.md and docs/kernels/cuda_sm80_backward.md. The others are the first
# ones of the same kind that fit and do not spill.
_256 = Forward(16, 8, 64, False, 1)
_192, _GENERAL_128 = Forward(32, 4, 32, False, 2), OF_SM80.forward[128, 128][1]
_BACKWARD_192 = (Backward(64, 64, 2, 2, lookahead=4), Backward(64, 64, 2, 2))

TILES = OF_SM80._replace(
    forward={
        **OF_SM80.forward,
        (128, 128): (Forward(32, 4, 64, False, 2), _GENERAL_128, ONE_OF_128),
        (192, 128): (_192, _192, OF_SM80.forward[192, 128][2]),
        (256, 256): (_256, _256, _256),
    },
    decode={
        **OF_SM80.decode,
        (576, 512): sizes((1, 1, 3, 2), (1, 2, 6, 2), (1, 4, 8, 3)),
    },
    latent={(576, 512): sizes((1, 1, 4, 3), (1, 2, 6, 3), (1, 4, 8, 6))},
    latent_float8={(576, 512): sizes((1, 1, 4, 6), (1, 2, 8, 5), (1, 4, 8, 10))},
    backward={
        (64, 64): (Backward(64, 128, 2, 1, 32, lookahead=3, blocks_per_sm=2),
                   Backward(64, 128, 4, 1, 32)),
        (96, 96): (Backward(64, 128, 4, 1, 64, 4), Backward(64, 128, 4, 1, 32, 4)),
        (128, 128): (Backward(64, 128, 4, 1, 64, lookahead=3), Backward(64, 128, 4, 1, 32)),
        (192, 128): _BACKWARD_192,
        (192, 192): _BACKWARD_192,
        (256, 256): (Backward(64, 64, 2, 2), Backward(64, 64, 2, 2)),
    },
)  # fmt: skip
