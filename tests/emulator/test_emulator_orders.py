"""Float atomics: many orders, one for each seed; what program order keeps; rounding, denormals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from assembly import assemble
from memory_instructions import WAIT, launch
from test_emulator_faults import assembled
from test_emulator_global_races import SOURCE
from test_emulator_kernels import run

from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import Checks, Machine, Program, load, pack_arguments

U = np.uint32
GROUPS, THREADS, COLUMNS = 8, 128, 4


@pytest.fixture(scope="module")
def program() -> Program:
    return load(compile_hip(SOURCE.read_text(), arch="gfx942", options=()))


def sums(program: Program, x: Any, threads: int = THREADS, **machine: Any) -> Any:
    out = np.zeros(COLUMNS, np.float32)
    run(program, "sums", (len(x) // threads,), (threads,), x, out, COLUMNS, **machine)
    return out


def values(rows: int) -> Any:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((rows, COLUMNS)) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(
        np.float32
    )


def test_seeds_are_orders_and_one_seed_is_one(program: Program) -> None:
    x = values(GROUPS * THREADS)
    found = {sums(program, x, seed=seed).tobytes() for seed in range(8)}
    assert len(found) == 8
    assert sums(program, x, seed=3).tobytes() == sums(program, x, seed=3).tobytes()
    for bits in found:
        error = np.frombuffer(bits, np.float32) - x.sum(0, np.float64)
        assert (abs(error) <= len(x) * 2.0**-24 * abs(x).sum(0)).all()


@pytest.mark.parametrize(("threads", "groups"), [(1, 12), (12, 1)])
def test_workgroups_and_lanes_come_in_any_order(
    program: Program, threads: int, groups: int
) -> None:
    """One adds 2^24 in each column, all others 1: which the sum keeps if they came before."""
    x = np.ones((threads * groups, COLUMNS), np.float32)
    x[[1, 4, 7, 10], range(COLUMNS)] = 2.0**24
    before = [
        12 - (sums(program, x, threads, seed=seed) - 2.0**24).astype(int) for seed in range(24)
    ]
    for column in np.array(before).T:
        assert len(set(column.tolist())) > 3, before


def test_in_order_is_one_order(program: Program) -> None:
    x = values(GROUPS * THREADS)
    want = np.zeros(COLUMNS, np.float32)
    for row in x:
        want += row
    got = [sums(program, x, in_order=True, seed=seed) for seed in range(2)]
    assert (got[0] == got[1]).all()
    ones = values(64)
    want = np.zeros(COLUMNS, np.float32)
    for row in ones:
        want += row
    assert (sums(program, ones, 64, in_order=True) == want).all()


ADD = "global_atomic_add_f32 v1, v2, s[4:5]\n"
START = (
    "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32 v1, 2, v0\nv_mov_b32 v2, 1.0\n"
    "v_mov_b32 v4, 2.0\nv_mov_b32 v5, 0x4b800000\ns_waitcnt lgkmcnt(0)\n"
)


@pytest.mark.parametrize(
    "then",
    [
        "global_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)\n",
        "global_atomic_add_f32 v3, v1, v2, s[4:5] sc0\ns_waitcnt vmcnt(0)\n",
        "s_waitcnt vmcnt(0)\nglobal_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)\n",
    ],
    ids=["load", "returning atomic", "wait"],
)
def test_a_wave_sees_its_own_atomics(then: str) -> None:
    """2^24 + 1 + 1 is 2^24 where 1 + 1 + 2^24 is more: program order, for each of 70 in flight."""
    wide = "global_atomic_add_f32 v1, v5, s[4:5] offset:512\n" + 2 * (ADD[:-1] + " offset:512\n")
    body = START + ADD * 70 + wide + then + "global_store_dword v1, v3, s[4:5] offset:256"
    data = np.zeros(192, np.float32)
    assembled(body, data)
    assert (data[64:128] == 70).all()
    assert (data[128:] == 2.0**24).all()


def test_a_store_after_an_atomic_stays() -> None:
    data = np.zeros(64, np.float32)
    assembled(START + ADD * 3 + "global_store_dword v1, v4, s[4:5]", data)
    assert (data == 2).all()


SIGNAL = (
    START + "v_readfirstlane_b32 s20, v0\nv_and_b32 v1, 0xff, v1\nv_mov_b32 v6, 0\n"
    "s_cmp_lt_u32 s20, 64\ns_cbranch_scc0 reader\n" + ADD + "{wave0}\ns_endpgm\n"
    "reader:\n{wave1}\nglobal_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
    "global_store_dword v1, v3, s[4:5] offset:256"
)
FLAG = (
    "v_mov_b32 v7, 1\nds_write_b32 v6, v7",
    "again:\nds_read_b32 v7, v6\ns_waitcnt lgkmcnt(0)\nv_readfirstlane_b32 s21, v7\n"
    "s_cmp_eq_u32 s21, 1\ns_cbranch_scc0 again",
)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(("s_barrier", "s_barrier"), {1.0}), (FLAG, {0.0, 1.0})],
    ids=["barrier", "flag"],
)
def test_a_barrier_orders_atomics_within_a_workgroup(
    steps: tuple[str, str], expected: set[float]
) -> None:
    """Wave 0 adds and signals, wave 1 reads: by a flag in LDS alone, it may be too early."""
    code = assemble(SIGNAL.format(wave0=steps[0], wave1=steps[1]), lds=4)
    found = set()
    for seed in range(24):
        data = np.zeros(128, np.float32)
        machine = Machine(seed=seed, checks=Checks.off())
        kernel = machine.load(code).kernel("test")
        packed = pack_arguments(kernel.kernel, [machine.map_array(data, "data")])
        machine.launch(kernel, grid=(1,), block=(128,), kernarg=packed)
        assert (data[:64] == 1).all()  # it has arrived when the launch is over
        found.add(float(data[64]))
    assert found == expected


def test_a_wait_orders_atomics_between_workgroups() -> None:
    """Each adds, waits and counts itself: the second one sees both sums."""
    body = (
        START + "v_mov_b32 v7, 1\nv_mov_b32 v6, 0\n" + ADD + "s_waitcnt vmcnt(0)\n"
        "s_mov_b64 exec, 1\nglobal_atomic_add v6, v6, v7, s[4:5] offset:256 sc0\n"
        "s_waitcnt vmcnt(0)\nv_readfirstlane_b32 s20, v6\ns_cmp_eq_u32 s20, 1\n"
        "s_cbranch_scc0 first\nglobal_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
        "global_store_dword v1, v3, s[4:5] offset:260\nfirst:\n"
    )
    code = assemble(body)
    for seed in range(12):
        data = np.zeros(128, np.float32)
        machine = Machine(seed=seed, checks=Checks.off())
        kernel = machine.load(code).kernel("test")
        packed = pack_arguments(kernel.kernel, [machine.map_array(data, "data")])
        machine.launch(kernel, grid=(2,), block=(64,), kernarg=packed)
        assert data[65] == 2
        assert (data[:64] == 2).all()


def test_a_waves_own_atomics_stay_in_order() -> None:
    """2^24, then 1 twice, that it swallows; nothing waits for any of them."""
    for seed in range(5):
        data = np.zeros(64, np.float32)
        machine = Machine(seed=seed)
        body = START + "global_atomic_add_f32 v1, v5, s[4:5]\n" + 2 * ADD
        kernel = machine.load(assemble(body)).kernel("test")
        packed = pack_arguments(kernel.kernel, [machine.map_array(data, "data")])
        machine.launch(kernel, grid=(1,), block=(64,), kernarg=packed)
        assert (data == 2.0**24).all()


TINY = 0x00000007  # a denormal of f32
CASES: dict[str, tuple[str, int, int, int, int]] = {
    # name: instruction, memory, operand, what is left with MODE keeping f32 denormals, and flushing
    "f32 denormals": ("add_f32", TINY, 0x00000011, 0x00000018, 0x00000018),
    "f32 to a denormal": ("add_f32", 0x00800003, 0x80800001, 0x00000002, 0x00000002),
    "f32 ties to even": ("add_f32", 0x4B800000, 0x3F800000, 0x4B800000, 0x4B800000),
    "f32 up to even": ("add_f32", 0x4B800001, 0x3F800000, 0x4B800002, 0x4B800002),
    "f32 quiets a NaN": ("add_f32", 0x7F800001, 0x3F800000, 0x7FC00001, 0x7FC00001),
    "f16 denormals": ("pk_add_f16", 0x00070001, 0x00110002, 0x00180003, 0x00180003),
    "f16 each rounded": ("pk_add_f16", 0x68006801, 0x3C003C00, 0x68006802, 0x68006802),
    "bf16 denormals": ("pk_add_bf16", 0x00070001, 0x00110002, 0x00180003, 0x00180003),
    "bf16 ties to even": ("pk_add_bf16", 0x43804381, 0x3F803F80, 0x43804382, 0x43804382),
}
LDS_CASES: dict[str, tuple[str, int, int, int, int]] = {
    "f32 denormals": ("add_f32", TINY, 0x00000011, 0x00000018, 0),
    "f32 to a denormal": ("add_f32", 0x00800003, 0x80800001, 0x00000002, 0),
    "f32 sign of zero": ("add_f32", 0x80000007, 0x80000001, 0x80000008, 0x80000000),
    "f32 plus a denormal": ("add_f32", 0x00800000, 0x00000001, 0x00800001, 0x00800000),
    "f32 normal": ("add_f32", 0x3F800000, 0x3F800000, 0x40000000, 0x40000000),
}


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("place", ["global", "buffer", "ds"])
def test_rounding_and_denormals(place: str, flush: bool) -> None:
    """As core/atomics.c cites them; MODE matters in LDS only."""
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n" if flush else ""
    cases = LDS_CASES if place == "ds" else CASES
    for name, (kind, memory, operand, kept, flushed) in cases.items():
        if place == "buffer" and kind == "pk_add_bf16":
            continue  # gfx942 has none
        inputs, outputs = np.zeros((64, 16), U), np.zeros((64, 16), U)
        outputs[:, 0] = memory
        act = {
            "global": f"global_atomic_{kind} v[4:5], v24, off\n",
            "buffer": f"buffer_atomic_{kind} v24, v1, s[12:15], 0 offen\n",
            "ds": f"v_mov_b32 v25, 0x{memory:x}\nds_write_b32 v1, v25\n{WAIT}ds_{kind} v1, v24\n"
            f"{WAIT}ds_read_b32 v26, v1\n{WAIT}global_store_dword v[4:5], v26, off\n",
        }[place]
        launch(f"{mode}v_mov_b32 v24, 0x{operand:x}\n{act}{WAIT}", inputs, outputs)
        want = flushed if flush else kept
        assert (outputs[:, 0] == want).all(), (name, hex(int(outputs[0, 0])), hex(want))
