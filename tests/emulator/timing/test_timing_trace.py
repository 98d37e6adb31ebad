"""What the emulator records, from instructions that a compiler assembled."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pyfa.backends.hip import compiler
from pyfa.emulator import Checks, Counters, Machine
from pyfa.emulator.timing import issue, program, trace

sys.path.insert(0, str(Path(__file__).parent.parent))
from assembly import assemble

pytestmark = pytest.mark.skipif(compiler.zig() is None, reason="assembles with ziglang")

# Each wavefront reads 16 bytes a lane at 128 bytes a lane, loads a dword a lane, and loops twice.
BODY = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_and_b32 v1, 63, v0
  v_lshlrev_b32 v2, 7, v1
  v_lshlrev_b32 v3, 2, v1
  s_mov_b32 s6, 2
  s_waitcnt lgkmcnt(0)
.Lagain:
  ds_read_b128 v[4:7], v2
  global_load_dword v8, v3, s[4:5]
  s_waitcnt vmcnt(0) lgkmcnt(0)
  v_mfma_f32_32x32x8_bf16 v[16:31], v[8:9], v[8:9], v[16:31]
  s_sub_u32 s6, s6, 1
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 .Lagain
  s_barrier
"""


def launch(workgroups: tuple[int, ...]) -> tuple[Counters, issue.Turns | None]:
    machine = Machine(checks=Checks.off())
    kernel = machine.load(assemble(BODY, lds=8192)).kernel("test")
    data = np.zeros(64, np.uint32)
    address = machine.map_array(data, "data")
    counters = machine.launch(
        kernel, grid=(3,), block=(128,), kernarg=address.to_bytes(8, "little"), trace=workgroups
    )
    made = issue.turns_of(kernel.code, counters.traces) if workgroups else None
    return counters, made


def test_every_instruction_of_every_wavefront_in_its_order() -> None:
    counters, made = launch((2, 0))
    assert made is not None
    assert [one.workgroup for one in counters.traces] == [2, 0]
    names = [
        "s_load_dwordx2",
        "v_and_b32",
        "v_lshlrev_b32",
        "v_lshlrev_b32",
        "s_mov_b32",
        "s_waitcnt",
    ]
    loop = "ds_read_b128 global_load_dword s_waitcnt v_mfma s_sub_u32 s_cmp_lg_u32 s_cbranch_scc1"
    for one in counters.traces:
        assert one.waves == 2
        for wave in range(2):
            found = [made.code.names[i] for i in one.events[one.events["wave"] == wave]["index"]]
            short = [name.split("_f32_32x32")[0] for name in found]
            assert short == [*names, *loop.split(), *loop.split(), "s_barrier", "s_endpgm"]
    # Three workgroups ran, two of them were recorded.
    assert sum(len(one.events) for one in counters.traces) * 3 == counters.total * 2
    assert list(made.turns["taken"][:22].nonzero()[0]) == [12]


def test_addresses_and_lines() -> None:
    counters, made = launch((1,))
    assert made is not None
    (one,) = counters.traces
    lds, memory = (one.accesses[one.accesses["kind"] == k] for k in (trace.LDS, trace.MEMORY))
    assert len(lds) == len(memory) == 4
    at = int(lds["first"][0])
    assert one.lanes[at : at + 64].tolist() == [128 * lane for lane in range(64)]
    assert set(memory["bytes"].tolist()) == {256}
    assert set(memory["count"].tolist()) <= {4, 5}  # 64-byte segments, by the array's place
    reads = made.steps["kind"][made.turns["step"]] == program.NUMBER["lds"]
    assert set(made.turns["clocks"][reads].tolist()) == {64}  # every lane in the same four banks
    assert made.lds_conflict_clocks == 4 * (64 - 8)


def test_nothing_is_recorded_unless_asked_for() -> None:
    counters, _ = launch(())
    assert counters.traces == ()


def test_registers_and_waits_of_the_program() -> None:
    _, made = launch((0,))
    assert made is not None
    steps = {name: made.steps[i] for i, name in reversed(list(enumerate(made.code.names)))}
    product = steps["v_mfma_f32_32x32x8_bf16"]
    assert (int(product["write"]), int(product["writes"]), int(product["amount"])) == (16, 16, 8)
    assert list(zip(product["read"].tolist(), product["reads"].tolist(), strict=True))[:3] == [
        (8, 2), (8, 2), (16, 16),
    ]  # fmt: skip
    waits = made.steps[made.steps["kind"] == program.NUMBER["wait"]]
    assert list(zip(waits["vmcnt"].tolist(), waits["lgkmcnt"].tolist(), strict=True)) == [
        (63, 0), (0, 0),
    ]  # fmt: skip


def test_workgroups_on_one_unit_start_on_the_next_simds() -> None:
    counters, _ = launch((0,))
    kernel = Machine().load(assemble(BODY, lds=8192)).kernel("test")
    made = issue.turns_of(kernel.code, counters.traces, copies=2)
    assert made.waves["simd"].tolist() == [0, 1, 2, 3]
    assert made.waves["group"].tolist() == [0, 0, 1, 1]
    alone = issue.simulate(issue.turns_of(kernel.code, counters.traces), "low")
    both = issue.simulate(made, "low")
    assert both.matrix_clocks == 2 * alone.matrix_clocks
    assert both.l1_misses == 2 * alone.l1_misses  # lines of their own
    assert both.clocks < 2 * alone.clocks
