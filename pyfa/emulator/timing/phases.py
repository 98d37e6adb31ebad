"""Which lanes of an LDS access are served in the same clock, and the clocks that a pattern takes.

The one table of the timing model. 32 banks of 4 bytes; in each phase a bank gives one dword, to
every lane that asks for it. Sources: the page on LDS bank conflicts of AMD's Composable Kernel for
16-byte reads (lanes 0 to 3 with 20 to 23, and so on), HipKittens' phase measurements for writes
and for 8 bytes, which go in a row. Accesses of 12 bytes are taken as those of 16: nobody has
published them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BANKS, LANES = 32, 64


def _rows(together: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(start, start + together)) for start in range(0, LANES, together))


_QUARTERS = ((0, 20), (4, 16), (8, 28), (12, 24))
_WIDE_READ = tuple(
    (*range(half + a, half + a + 4), *range(half + b, half + b + 4))
    for half in (0, 32)
    for a, b in _QUARTERS
)


def groups(size: int, store: bool) -> Sequence[Sequence[int]]:
    """The lanes of each phase of an access of ``size`` bytes a lane."""
    if size <= 4:
        return _rows(32)
    if size == 8:
        return _rows(16)
    return _rows(8) if store else _WIDE_READ


def clocks(lanes: npt.NDArray[np.uint32], size: int, store: bool) -> int:
    """Clocks of one access: the sum over its phases of the dwords that the fullest bank gives.

    ``lanes``: 64 byte addresses, 0xffffffff where a lane is off.
    """
    total = 0
    words = np.arange(max(1, size // 4), dtype=np.uint32)
    for group in groups(size, store):
        at = lanes[list(group)]
        at = at[at != 0xFFFFFFFF]
        if at.size:
            asked = np.unique(at[:, None] // 4 + words[None, :])
            total += int(np.bincount(asked % BANKS).max())
    return total


class Conflicts:
    """``clocks`` with a memory: patterns repeat, moved by whole rows of banks."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, bytes], int] = {}

    def clocks(self, lanes: npt.NDArray[np.uint32], size: int, store: bool) -> int:
        """As ``clocks``."""
        on = lanes != 0xFFFFFFFF
        if not on.any():
            return 0
        base = lanes[on].min() // (4 * BANKS) * (4 * BANKS)
        moved = np.where(on, lanes - base, np.uint32(0xFFFFFFFF)).astype(np.uint32)
        key = (size, store, moved.tobytes())
        if key not in self._known:
            self._known[key] = clocks(moved, size, store)
        return self._known[key]
