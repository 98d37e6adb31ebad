"""Mechanisms of the issue model, each on a trace small enough to count by hand.

SIMD s has its turn at clocks s, s + 4, s + 8, … A product of 8 passes keeps its matrix unit 32
clocks.
"""

from __future__ import annotations

import pytest
from timing_traces import I, clocks, exp, lost, mfma, run, turns, valu


def test_one_instruction_a_turn() -> None:
    assert clocks([valu(n) for n in range(4)]) == [[0, 4, 8, 12]]
    assert clocks([valu(0)], [valu(0)], [valu(0)], [valu(0)]) == [[0], [1], [2], [3]]


def test_a_result_of_a_product_comes_after_its_passes() -> None:
    """32 clocks of passes and three wait states; unrelated work does not wait."""
    assert clocks([mfma(0), valu(50), valu(60, 15)]) == [[0, 4, 44]]
    assert clocks([mfma(0), valu(60, 15)], matrix_extra=40) == [[0, 72]]
    assert clocks([mfma(0, passes=4), valu(60, 15)]) == [[0, 28]]


def test_products_follow_each_other_through_their_addend_alone() -> None:
    assert clocks([mfma(0), mfma(0)]) == [[0, 32]]
    assert clocks([mfma(0), mfma(32, a=14)]) == [[0, 44]]  # as an operand
    assert clocks([mfma(0), mfma(32, c=0), mfma(64, c=32)]) == [[0, 32, 76]]  # another accumulator


def test_a_transcendental_holds_the_vector_unit_or_stands_apart() -> None:
    assert clocks([exp(0), valu(1), exp(2)]) == [[0, 16, 20]]
    assert clocks([exp(0), valu(1), exp(2)], transcendental_apart=1) == [[0, 4, 16]]
    assert clocks([exp(0), valu(1, 0)], transcendental_apart=1) == [[0, 20]]


def test_vmcnt_waits_for_the_loads_beyond_it_in_order() -> None:
    """L1 gives 16 clocks of data; a miss comes from L2, 2 clocks a line and 300 of latency."""
    first, second = (I("load", clocks=16, lines=(n,)) for n in (1, 2))
    wait, one_left = I("wait", vmcnt=0), I("wait", vmcnt=1)
    assert clocks([first, wait, valu(0)]) == [[0, 304, 308]]
    assert clocks([first, second, one_left, wait]) == [[0, 4, 304, 308]]
    # The second is in L1 by then: 308 + 16 + 100.
    assert clocks([first, wait, first, wait]) == [[0, 304, 308, 424]]
    assert lost(run(turns([first, wait, mfma(0)])))["memory"] == 300


def test_lgkmcnt_waits_for_lds_which_all_simds_share() -> None:
    read, wait = I("lds", clocks=8), I("wait", lgkmcnt=0)
    assert clocks([read, wait]) == [[0, 108]]
    # The other SIMD's read is served from clock 8 on: 8 + 8 + 100, at its next turn.
    assert clocks([read, wait], [read, wait]) == [[0, 108], [1, 117]]
    assert clocks([read, I("wait", lgkmcnt=1), valu(0)]) == [[0, 4, 8]]
    assert lost(run(turns([read, wait, mfma(0)])))["LDS"] == 104


def test_conflicts_keep_lds_from_others() -> None:
    wait = I("wait", lgkmcnt=0)
    assert clocks([I("lds", clocks=16), wait], [I("lds", clocks=8), wait]) == [[0, 116], [1, 125]]


def test_direct_loads_take_their_share_of_lds() -> None:
    """256 bytes at 64 a clock go into LDS before the read is served: 4 + 8 + 100."""
    direct, read = I("load_to_lds", clocks=4, lines=(1, 2)), I("lds", clocks=8)
    assert clocks([direct], [read, I("wait", lgkmcnt=0)])[1] == [1, 113]


def test_scalar_loads_are_waited_for_by_lgkmcnt() -> None:
    assert clocks([I("scalar_load"), I("wait", lgkmcnt=0)]) == [[0, 200]]
    assert lost(run(turns([I("scalar_load"), I("wait", lgkmcnt=0), mfma(0)])))["memory"] > 0


def test_a_barrier_lets_go_when_the_last_has_come() -> None:
    late = [I("idle", amount=10), I("barrier"), valu(0)]
    early = [I("barrier"), valu(0)]
    # The other one arrives at 1 + 40; both go on after that turn and 16 clocks.
    assert clocks(early, late, barrier=16) == [[0, 64], [1, 41, 61]]
    found = run(turns([*early, mfma(0)], late), barrier=16)
    assert lost(found)["barrier"] > 50
    apart = turns(early, late, groups=(0, 1))  # of another workgroup: nobody to wait for
    assert [int(x) for x in run(apart).issued] == [0, 4, 1, 41, 45]


def test_two_wavefronts_overlap_products_and_vector_work() -> None:
    """Four products take 128 clocks; the other wavefront's 24 instructions fit between them, seven
    beside each product, whose issue takes the eighth turn."""
    products, work = [mfma(16 * n) for n in range(4)], [valu(n) for n in range(24)]
    first, second = clocks(products, work, simds=(0, 0))
    assert first == [0, 32, 64, 96]
    assert second[:8] == [4, 8, 12, 16, 20, 24, 28, 36]
    assert second[-1] == 108
    first, second = clocks(products, work, simds=(0, 0), matrix_apart=1)
    assert (first[-1], second[-1]) == (96, 92)  # a product beside vector work of the same turn
    result = run(turns(products, work, simds=(0, 0)))
    assert result.matrix_clocks == 128
    assert lost(result)["vector unit"] == 0


def test_vector_work_alone_leaves_the_matrix_unit_idle() -> None:
    result = run(turns([*(valu(n) for n in range(8)), mfma(100, a=120)]))
    assert lost(result)["vector unit"] == 32


def test_priority_goes_before_age() -> None:
    work = [valu(n) for n in range(3)]
    assert clocks(work, [valu(0), *work], simds=(0, 0))[0] == [0, 4, 8]
    urgent = [I("priority", amount=3), *work]
    # It raises its priority in the turn in which the older one issues, and is first from then on.
    assert clocks(work, urgent, simds=(0, 0)) == [[0, 16, 20], [0, 4, 8, 12]]


def test_a_taken_branch_refills_the_instruction_buffer() -> None:
    assert clocks([I("jump"), valu(0)], branch=16) == [[0, 4]]
    assert clocks([I("jump", taken=True), valu(0)], branch=16) == [[0, 20]]
    # Its own turn, and the clocks after it.
    assert lost(run(turns([I("jump", taken=True), mfma(0)]), branch=16))["fetch"] == 20


def test_instructions_are_fetched_no_faster_than_the_buffer_fills() -> None:
    """32 bytes are there at the start, and half an instruction comes a turn: the eighth is the last
    that finds itself whole, then one issues every two turns."""
    at = clocks([valu(n) for n in range(12)], fetch_bytes=4)[0]
    assert at[:8] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert at[8:] == [36, 44, 52, 60]
    assert clocks([valu(n) for n in range(12)], fetch_bytes=32)[0][-1] == 44


def test_what_never_comes_is_an_error() -> None:
    held = [I("load", clocks=16, lines=(1,)), I("wait", vmcnt=0)]
    with pytest.raises(RuntimeError, match="stands still"):
        run(turns(held), l2_latency=1e9)


def test_clocks_are_busy_or_lost() -> None:
    """Of every SIMD, from the first clock to the last turn."""
    result = run(turns([mfma(0), valu(60, 3), mfma(32)], [valu(0)] * 30))
    busy = result.matrix_clocks + result.lost.sum()
    assert busy == pytest.approx(4 * result.clocks, abs=4 * 32)


def test_a_product_shares_the_vector_unit_s_issue_or_does_not() -> None:
    assert clocks([exp(0), mfma(16)]) == [[0, 16]]
    assert clocks([exp(0), mfma(16)], matrix_apart=1) == [[0, 4]]


def test_a_barrier_is_of_its_workgroup_alone() -> None:
    """The first workgroup's barrier, met at once, does not let go of the second's early
    wavefront."""
    alone, early = [I("idle", amount=3), I("barrier")], [I("barrier"), valu(0)]
    late = [I("idle", amount=10), I("barrier")]
    at = run(turns(alone, early, late, groups=(0, 1, 1))).issued
    assert [int(x) for x in at[2:4]] == [1, 49]
