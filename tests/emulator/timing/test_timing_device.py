"""Rounds of workgroups over dies, what bounds, and the clock."""

from __future__ import annotations

import pytest

from pyfa.emulator.timing import constants, device

DIES, UNITS = 8, 304


def finish(clocks: list[float], resident: int = 1, gap: float = 0.0) -> float:
    return device.finish(clocks, UNITS * resident, DIES, gap)


def test_a_round_holds_as_many_workgroups_as_places() -> None:
    assert finish([100.0] * 304) == 100
    assert finish([100.0] * 305) == 200
    assert finish([100.0] * 305, resident=2) == 100
    assert finish([100.0] * 608, gap=7) == 207
    # Counted in rounds where all are alike, one by one where they are not.
    for count in (1, 7, 304, 305, 700, 912, 913):
        alike, almost = [100.0] * count, [100.0] * (count - 1) + [100.0 - 1e-9]
        assert finish(alike, gap=7) == pytest.approx(finish(almost, gap=7))
    assert finish([]) == 0


def test_dies_take_workgroups_in_turn_and_do_not_help_each_other() -> None:
    """Every eighth is long: they all come to one die, which has 38 places."""
    assert finish([100.0 if n % 8 == 0 else 1.0 for n in range(8 * 76)]) == 200


def test_engines_of_a_die_that_take_workgroups_in_turn() -> None:
    """Every 32nd is long, so that one engine of one die gets all of them. Where all are alike, or
    fit at once, engines change nothing. The slow end has them."""
    clocks = [100.0 if n % 32 == 24 else 1.0 for n in range(32 * 40)]  # the first die's last
    free, strict = (device.finish(clocks, UNITS, DIES, 0.0, engines) for engines in (1, 4))
    assert free == 200  # 40 long ones on the 38 places of a die
    assert strict == pytest.approx(40 * 100 / 9.5)
    low, high = (
        device.time([device.Launch(clocks, 1e3)], end, (1e9, 0.0), {"dispatch": 0.0,
        "launch_seconds": 0.0}).seconds for end in constants.ends()
    )  # fmt: skip
    assert (low, high) == (pytest.approx(strict / 1e9), pytest.approx(free / 1e9))
    for count in (1, 304, 305, 4096):
        few = [100.0] * count
        few[-1] -= 1e-9  # not counted in rounds
        assert device.finish(few, UNITS, DIES, 0.0, 4) == device.finish(few, UNITS, DIES, 0.0)


def test_workgroups_that_take_their_work_help_other_dies() -> None:
    """Every eighth piece is long: dispatched they come to one die, taken to all; and taken, nothing
    is dispatched between them."""
    clocks = [100.0 if n % 8 == 0 else 1.0 for n in range(8 * 76)]
    given, taken = (
        device.time([device.Launch(clocks, 1e3, taken=way)], "low", (1e9, 0.0)).seconds
        for way in (False, True)
    )
    launch, gap = constants.DEVICE["launch_seconds"].low, constants.DEVICE["dispatch"].low
    assert given == pytest.approx(launch + (200 + gap) / 1e9)
    assert taken == pytest.approx(launch + 102 / 1e9)


def test_the_longest_first_leave_a_short_tail() -> None:
    causal = [float(n) for n in range(1, 33) for _ in range(8 * 19)]
    assert finish(causal[::-1]) < finish(causal)
    assert finish(causal[::-1]) >= sum(causal) / UNITS


def test_what_takes_longest_bounds() -> None:
    one = device.Launch([1e6] * 304, matrix=0.75 * 4 * 304 * 1e6)
    found = device.time([one], "low")
    assert found.bound == "compute units"
    assert found.utilization == pytest.approx(0.75)
    assert found.hz == pytest.approx(constants.CLOCK_HZ.low * constants.MACHINES.low)
    launch = constants.DEVICE["launch_seconds"].low
    assert found.seconds == pytest.approx(1e6 / found.hz + launch)
    heavy = device.time([device.Launch(one.clocks, one.matrix, dram_bytes=1e10)], "low")
    assert heavy.bound == "HBM"
    assert heavy.seconds == pytest.approx(1e10 / constants.DEVICE["hbm_bytes"].low + launch)
    assert device.time([device.Launch(one.clocks, one.matrix, l2_bytes=1e12)], "low").bound == "L2"
    assert device.time([one, one], "low").seconds == pytest.approx(2 * found.seconds)


def test_the_last_round_that_is_not_full() -> None:
    full = device.time([device.Launch([1e6] * 304, 1e9)], "low")
    more = device.time([device.Launch([1e6] * 305, 1e9)], "low")
    assert full.last_round == pytest.approx(0, abs=1e-9)
    assert more.last_round == pytest.approx(1 - 305 / 608, abs=0.01)


def test_the_clock_falls_as_the_matrix_units_work_and_has_a_peak() -> None:
    for end in constants.ends():
        busy, less = constants.clock(0.9, end), constants.clock(0.45, end)
        assert busy < less <= 2.1e9
        # All the same more is done: power grows more slowly than work.
        assert 0.9 * busy > 0.45 * less
        assert constants.clock(0.001, end) == constants.clock(0.0, end) == 2.1e9


def test_each_number_has_two_ends_and_a_source() -> None:
    for name, one in {**constants.ISSUE, **constants.DEVICE}.items():
        assert one.source, name
        if one.low != one.high:
            assert one.source.startswith(("assumption", "fitted")) or "white paper" in one.source
