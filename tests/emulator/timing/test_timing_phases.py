"""Which lanes of an LDS access share a clock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pyfa.emulator.timing import phases

LANES = np.arange(64, dtype=np.uint32)


def wide(order: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """16 bytes a lane, in one of the eight places of a row of banks."""
    return (LANES // 8 * 128 + order % 8 * 16).astype(np.uint32)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("store", [False, True])
def test_lanes_in_a_row_take_what_their_bytes_take(size: int, store: bool) -> None:
    assert phases.clocks(LANES * size, size, store) == 64 * size // 128
    assert phases.clocks(np.zeros(64, np.uint32), size, store) == len(phases.groups(size, store))


def test_a_16_byte_read_serves_lanes_0_to_3_with_20_to_23() -> None:
    """Lanes 16 to 31 are turned by half a row: free of conflicts for eight in a row, which writes
    are served by, and two to a bank for reads. A table of eight in a row says 8 for both."""
    turned = np.where(LANES // 16 % 2 == 1, LANES ^ 4, LANES)
    assert phases.clocks(wide(turned), 16, True) == 8
    assert phases.clocks(wide(turned), 16, False) == 16
    assert phases.clocks(wide(LANES), 16, False) == 8


def test_every_lane_is_served_once() -> None:
    for size in (1, 4, 8, 12, 16):
        for store in (False, True):
            served = sorted(lane for group in phases.groups(size, store) for lane in group)
            assert served == list(range(64))


def test_lanes_that_are_off_take_nothing() -> None:
    only = np.full(64, 0xFFFFFFFF, np.uint32)
    assert phases.Conflicts().clocks(only, 16, False) == 0
    only[5] = 64
    assert phases.clocks(only, 16, False) == 1


def test_patterns_are_remembered_by_their_banks() -> None:
    known = phases.Conflicts()
    stride = (LANES * 128).astype(np.uint32)
    assert known.clocks(stride, 4, False) == 64
    assert known.clocks(stride + 4096, 4, False) == 64
    assert known.clocks(stride + 4, 4, False) == 64
    assert known.clocks(LANES * 4, 4, False) == 2
