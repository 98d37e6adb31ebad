"""GeForce cards of Blackwell, compiled for and never run: sm_86's tiles, except where ptxas
spills."""

from __future__ import annotations

from .sm86 import TILES as OF_SM86

_96 = OF_SM86.forward[96, 96]

TILES = OF_SM86._replace(forward={**OF_SM86.forward, (96, 96): (_96[1], *_96[1:])})
