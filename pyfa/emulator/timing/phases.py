"""The clocks of a pattern of LDS addresses.

LDS has 32 banks of 4 bytes. In each phase a bank delivers one dword, to every lane that requests
it. core/phases.h lists the lanes of each phase, with its sources; the emulator's counter of
conflicts uses the same table.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from pyfa.emulator import native

BANKS, LANES = 32, 64


@functools.cache
def groups(size: int, store: bool) -> tuple[tuple[int, ...], ...]:
    """Return the lanes of each phase of an access of ``size`` bytes per lane."""
    order = (ctypes.c_uint8 * LANES)()
    together = native.load().emulator_phases(ctypes.c_uint32(size), int(store), order)
    return tuple(tuple(order[start : start + together]) for start in range(0, LANES, together))


def clocks(lanes: npt.NDArray[np.uint32], size: int, store: bool) -> int:
    """Return the clocks of one access: the sum over its phases of the dwords from the busiest bank.

    ``lanes``: 64 byte addresses, 0xffffffff if a lane is off.
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
    """Computes ``clocks`` with a memo, because patterns repeat, shifted by whole rows of banks."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, bytes], int] = {}

    def clocks(self, lanes: npt.NDArray[np.uint32], size: int, store: bool) -> int:
        """Return what the function ``clocks`` of this module returns, from the memo if known."""
        on = lanes != 0xFFFFFFFF
        if not on.any():
            return 0
        base = lanes[on].min() // (4 * BANKS) * (4 * BANKS)
        moved = np.where(on, lanes - base, np.uint32(0xFFFFFFFF)).astype(np.uint32)
        key = (size, store, moved.tobytes())
        if key not in self._known:
            self._known[key] = clocks(moved, size, store)
        return self._known[key]
