"""GeForce and workstation cards of Ampere: 99 KB of shared memory a block."""

from __future__ import annotations

from .sm80 import ONE_OF_128, Backward, Forward, Tiles, sizes
from .sm80 import TILES as OF_SM80

# The tiles of sm_80 if they fit, otherwise the first smaller ones that do not spill. None was
# timed.
_192 = Forward(16, 8, 32, False, 1)
_256 = Forward(16, 4, 32, False, 1)
_GENERAL_96 = Forward(32, 4, 32, False, 2)
_BACKWARD_128, _BACKWARD_192 = Backward(32, 64, 4, 1, 32), Backward(32, 32, 2, 2)
_BACKWARD_256 = Backward(32, 16, 1, 2)

TILES = Tiles(
    forward={
        (64, 64): OF_SM80.forward[64, 64],
        (96, 96): (Forward(32, 4, 64, True, 2), _GENERAL_96, _GENERAL_96),
        (128, 128): (ONE_OF_128, ONE_OF_128, ONE_OF_128),
        (192, 128): (_192, _192, _192),
        (192, 192): (_192, _192, _192),
        (256, 256): (_256, _256, _256),
    },
    forward_paged=OF_SM80.forward_paged,
    small_grid={
        (64, 64): Forward(16, 4, 64, True, 2),
        (128, 128): Forward(16, 4, 64, True, 1),
    },
    decode={
        (64, 64): sizes((1, 1, 8, 2), (2, 1, 8, 2), (4, 1, 8, 2), (4, 2, 8, 4)),
        (96, 96): sizes((1, 1, 6, 2), (2, 1, 6, 2), (4, 1, 6, 2), (4, 2, 4, 5)),
        (128, 128): sizes((1, 1, 4, 2), (2, 1, 4, 2), (4, 1, 4, 2), (2, 4, 8, 5)),
        (192, 128): sizes((1, 1, 4, 2), (2, 1, 4, 2), (2, 2, 4, 4), (2, 4, 4, 8)),
        (192, 192): sizes((1, 1, 3, 2), (2, 1, 3, 2), (2, 2, 4, 3), (2, 4, 4, 6)),
        (256, 256): sizes((1, 1, 2, 2), (2, 1, 2, 2), (2, 2, 4, 2), (2, 4, 4, 5)),
        (576, 512): sizes((1, 2, 2, 2), (1, 4, 4, 2)),
    },
    decode_float8={
        (64, 64): sizes((1, 1, 8, 4), (2, 1, 8, 4), (4, 1, 8, 4), (4, 2, 8, 8)),
        (128, 128): sizes((1, 1, 4, 4), (2, 1, 4, 4), (2, 2, 8, 4), (2, 4, 8, 8)),
        (256, 256): sizes((1, 1, 4, 2), (2, 1, 4, 2), (2, 2, 4, 4), (2, 4, 4, 8)),
    },
    # With 32 lines and without float8, only one team fits, and it spills 16 bytes.
    latent={(576, 512): sizes((1, 1, 2, 2), (1, 2, 4, 2))},
    latent_float8={(576, 512): sizes((1, 1, 2, 4), (1, 2, 4, 4), (1, 4, 4, 8))},
    backward={
        (64, 64): (Backward(64, 128, 4, 1, 64, buffers=1), Backward(64, 64, 4, 1, 32)),
        (96, 96): (Backward(64, 64, 4, 1, 64, 4, buffers=1),
                   Backward(64, 64, 4, 1, 32, 4, buffers=1)),
        (128, 128): (_BACKWARD_128, _BACKWARD_128),
        (192, 128): (_BACKWARD_192, _BACKWARD_192),
        (192, 192): (_BACKWARD_192, _BACKWARD_192),
        (256, 256): (_BACKWARD_256, _BACKWARD_256),
    },
)  # fmt: skip
