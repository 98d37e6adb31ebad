"""B200, compiled for and never run: Hopper's tiles for Ampere's kernels, except where ptxas
spills."""

from __future__ import annotations

from .sm80 import Forward
from .sm90 import TILES as OF_SM90

_128, _256 = OF_SM90.forward[128, 128], OF_SM90.forward[256, 256]

TILES = OF_SM90._replace(
    forward={
        **OF_SM90.forward,
        (128, 128): (Forward(32, 4, 48, False, 2), *_128[1:]),
        (256, 256): (*_256[:2], Forward(16, 8, 32, False, 1)),
    }
)
