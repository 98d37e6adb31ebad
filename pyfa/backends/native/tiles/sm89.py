"""Ada: the shared memory of sm_86, and so its tiles."""

from __future__ import annotations

from .sm86 import TILES as TILES
