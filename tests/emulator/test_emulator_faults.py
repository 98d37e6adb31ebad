"""Planted faults, each found: in the source, and by patching single instructions of good code."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from assembly import assemble
from test_emulator_kernels import SOURCE, program, run

from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import Checks, EmulatorError, Machine, Program, load, pack_arguments
from pyfa.errors import CodeObjectError

__all__ = ["program"]
S_NOP = 0xBF800000


def caught(
    check: str | tuple[str, ...],
    program: Program,
    name: str,
    *arguments: Any,
    block: int = 256,
    grid: int = 1,
    **machine: Any,
) -> str:
    with pytest.raises(EmulatorError) as error:
        run(program, name, (grid,), (block,), *arguments, **machine)
    assert error.value.check in ((check,) if isinstance(check, str) else check), str(error.value)
    assert f"kernel {name}, pc 0x" in str(error.value)
    return str(error.value)


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_uninitialized_lds(program: Program, seed: int) -> None:
    text = caught("undefined", program, "uninitialized_lds", np.zeros(256, np.float32), seed=seed)
    assert "never written" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_barrier_in_source(program: Program, seed: int) -> None:
    text = caught(
        ("races", "undefined"), program, "dropped_barrier", np.zeros(256, np.float32), seed=seed
    )
    assert "LDS" in text


def test_store_off_by_one(program: Program) -> None:
    text = caught("memory", program, "store_off_by_one", np.zeros(256, np.float32))
    assert "store of 4 bytes" in text
    assert "lane 63" in text
    assert "offset 1024 of 1024" in text


def test_load_before_a_tensor(program: Program) -> None:
    data = np.zeros(512, np.float32)
    text = caught("memory", program, "load_before", data[:256], data[256:].copy())
    assert "lane 0" in text


def test_barrier_that_one_wave_skips(program: Program) -> None:
    caught("barriers", program, "early_exit", np.zeros(256, np.float32))
    run(
        program,
        "early_exit",
        (1,),
        (256,),
        np.zeros(256, np.float32),
        checks=Checks(barriers="off"),
    )


def test_endless_loop(program: Program) -> None:
    caught("limit", program, "endless", np.zeros(1, np.int32), block=64, max_instructions=10000)


def test_trap(program: Program) -> None:
    caught("trap", program, "trapped", np.zeros(64, np.int32), block=64)


def attention_arguments() -> list[Any]:
    length = 40
    q, k, v = np.random.default_rng(0).standard_normal((3, length, 64)).astype(np.float16)
    return [q, k, v, np.zeros((length, 64), np.float32), length, 0.18]


@pytest.fixture(scope="module")
def good() -> bytes:
    return compile_hip(SOURCE.read_text(), arch="gfx942", options=())


def patched(data: bytes, name: str, index: int, word: int = S_NOP) -> Program:
    """The program with instruction ``index`` of the code replaced by another dword."""
    loaded = load(data)
    pc = int(loaded.code.instructions["pc"][index])
    old = loaded.object.image[pc : pc + 4]
    offset = data.index(loaded.object.image[pc : pc + 64])
    assert data[offset : offset + 4] == old
    return load(data[:offset] + struct.pack("<I", word) + data[offset + 4 :])


def sites(data: bytes, kernel: str, mnemonic: str) -> list[int]:
    loaded = load(data)
    facts = loaded.object.kernel(kernel)
    pcs = loaded.code.instructions["pc"]
    return [
        n
        for n, name in enumerate(loaded.code.names)
        if name == mnemonic and facts.entry <= pcs[n] < facts.entry + facts.code_bytes
    ]


@pytest.mark.parametrize("kernel", ["attention", "transpose", "reduce"])
def test_every_dropped_barrier_is_found(good: bytes, kernel: str) -> None:
    arguments = {
        "attention": attention_arguments(),
        "transpose": [np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32), 64, 64],
        "reduce": [np.ones(256, np.float32), np.zeros(1, np.float32), 256],
    }[kernel]
    barriers = sites(good, kernel, "s_barrier")
    assert barriers
    for index in barriers:
        for seed in SEEDS:
            caught(
                ("races", "undefined"), patched(good, kernel, index), kernel, *arguments, seed=seed
            )


@pytest.mark.parametrize("kernel", ["attention", "transpose", "vector_add", "gemm"])
def test_dropped_waits_are_found(good: bytes, kernel: str) -> None:
    """Compilers leave a few waits that another one makes redundant; the rest must be missed."""
    square = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    half = np.ones((64, 64), np.float16)
    arguments = {
        "attention": attention_arguments(),
        "transpose": [square, np.zeros((64, 64), np.float32), 64, 64],
        "vector_add": [square, square.copy(), np.zeros_like(square), 256],
        "gemm": [half, half.copy(), np.zeros((64, 64), np.float32), 64, 64],
    }[kernel]
    block = 64 if kernel == "gemm" else 256
    found, waits = 0, sites(good, kernel, "s_waitcnt")
    for index in waits:
        try:
            run(patched(good, kernel, index), kernel, (1,), (block,), *arguments)
        except EmulatorError as error:
            found += error.check in ("waits", "races")
    assert found >= 0.75 * len(waits), (found, len(waits))


@pytest.mark.parametrize("seed", SEEDS)
def test_dropped_waits_between_write_and_barrier_are_found(good: bytes, seed: int) -> None:
    names = load(good).code.names
    waits = [n for n in sites(good, "reduce", "s_waitcnt") if names[n + 1] == "s_barrier"]
    written = [n for n in waits if "ds_write" in "".join(names[n - 4 : n])]
    assert written
    for index in written:
        arguments = np.ones(256, np.float32), np.zeros(1, np.float32), 256
        text = caught("waits", patched(good, "reduce", index), "reduce", *arguments, seed=seed)
        assert "has not waited" in text


def assembled(
    body: str, *arrays: Any, lds: int = 0, block: int = 64, checks: Checks | None = None
) -> Any:
    machine = Machine(checks=checks)
    kernel = machine.load(assemble(body, lds=lds)).kernel("test")
    pointers = [machine.map_array(a, f"array {n}") for n, a in enumerate(arrays)]
    packed = pack_arguments(kernel.kernel, pointers)
    return machine.launch(kernel, grid=(1,), block=(block,), kernarg=packed)


OUT = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"
FAULTS = {
    "uninitialized VGPR": ("undefined", "global_store_dword v1, v7, s[4:5]"),
    "uninitialized VGPR after arithmetic": (
        "undefined",
        "v_add_f32 v8, v7, v1\nv_mul_f32 v8, 2.0, v8\nglobal_store_dword v1, v8, s[4:5]",
    ),
    "unwritten half of a packed operand": (
        "undefined",
        "v_mov_b32 v8, 1.0\nv_mov_b32 v9, 1.0\nv_mov_b32 v10, 1.0\n"
        "v_pk_add_f32 v[12:13], v[8:9], v[10:11]\nglobal_store_dword v1, v13, s[4:5]",
    ),
    "uninitialized AGPR": ("undefined", "global_store_dword v1, a7, s[4:5]"),
    "uninitialized address": ("undefined", "global_load_dword v8, v9, s[4:5]\ns_waitcnt vmcnt(0)"),
    "uninitialized SGPR": ("undefined", "v_add_u32 v8, s40, v1\nglobal_store_dword v1, v8, s[4:5]"),
    "branch on an undefined SGPR": ("undefined", "s_cmp_eq_u32 s40, 1\ns_cbranch_scc1 0"),
    "branch on undefined lanes": ("undefined", "v_cmp_lt_u32 vcc, v7, v1\ns_cbranch_vccz 0"),
    "EXEC from undefined lanes": (
        "undefined",
        "v_cmp_lt_u32 vcc, v7, v1\ns_and_saveexec_b64 s[20:21], vcc",
    ),
    "matrix operand": (
        "undefined",
        "v_mov_b32 v8, 0\nv_mov_b32 v9, 0\nv_mov_b32 v10, 0\n"
        "v_mfma_f32_32x32x8_f16 v[32:47], v[8:9], v[10:11], 0\nglobal_store_dword v1, v40, s[4:5]",
    ),
    "load used at once": ("waits", "global_load_dword v8, v1, s[4:5]\nv_add_f32 v8, v8, v8"),
    "wait for one of two": (
        "waits",
        "global_load_dword v8, v1, s[4:5]\nglobal_load_dword v9, v1, s[4:5]\n"
        "s_waitcnt vmcnt(1)\nv_mov_b32 v10, v8\nv_mov_b32 v10, v9",
    ),
    "register overwritten under a load": (
        "waits",
        "global_load_dword v8, v1, s[4:5]\nv_mov_b32 v8, 0",
    ),
    "scalar load used at once": ("waits", "s_load_dword s8, s[4:5], 0x0\ns_add_u32 s8, s8, 1"),
    "scalar loads finish in any order": (
        "waits",
        "s_load_dword s8, s[4:5], 0x0\ns_load_dword s9, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\n"
        "s_add_u32 s8, s8, 1",
    ),
    "LDS read used at once": ("waits", "ds_write_b32 v1, v1\nds_read_b32 v8, v1\nv_mov_b32 v9, v8"),
    "permute used at once": ("waits", "ds_bpermute_b32 v8, v1, v1\nv_mov_b32 v9, v8"),
    "returned atomic used at once": (
        "waits",
        "global_atomic_add v8, v1, v1, s[4:5] sc0\nv_mov_b32 v9, v8",
    ),
    "direct-to-LDS read at once": (
        "waits",
        "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\nds_read_b32 v8, v1",
    ),
    "beyond LDS": ("memory", "ds_write_b32 v1, v1 offset:1000"),
    "direct-to-LDS beyond LDS": ("memory", "s_mov_b32 m0, 0x380\nglobal_load_lds_dword v1, s[4:5]"),
    "scalar load beyond": ("memory", "s_load_dwordx4 s[8:11], s[4:5], 0xf8"),
    "write to the code": ("memory", "s_getpc_b64 s[4:5]\nglobal_store_dword v1, v1, s[4:5]"),
    "skewed atomic": ("alignment", "v_mov_b32 v2, 2\nglobal_atomic_add v2, v2, s[4:5]"),
    "skewed LDS": ("alignment", "v_mov_b32 v2, 2\nds_read_b32 v8, v2"),
    "skewed LDS atomic": ("alignment", "v_mov_b32 v2, 4\nds_add_u64 v2, v[0:1]"),
    "unknown opcode": ("unknown instruction", ".long 0x7e00ffff"),
    "matrix modifier": (
        "unsupported",
        "v_mov_b32 v8, 0\nv_mfma_f32_4x4x1_16b_f32 v[32:35], v8, v8, 0 cbsz:1",
    ),
    "jump to nowhere": ("unsupported", "s_setpc_b64 s[4:5]"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_assembled_fault(fault: str) -> None:
    check, body = FAULTS[fault]
    with pytest.raises(EmulatorError) as error:
        assembled(OUT + body, np.zeros(64, np.float32), lds=1024)
    assert error.value.check == check, str(error.value)


def test_only_the_halves_that_op_sel_names_are_read() -> None:
    """Compilers give one register twice, and never write its neighbor."""
    body = (
        OUT + "v_mov_b32 v8, 1.0\nv_mov_b32 v9, 1.0\nv_mov_b32 v10, 2.0\n"
        "v_pk_add_f32 v[12:13], v[8:9], v[10:11] op_sel_hi:[1,0]\n"
        "v_pk_add_f32 v[14:15], v[8:9], v[10:11]\n"
        "v_pk_mov_b32 v[16:17], v[10:11], v[8:9] op_sel:[0,1]\n"
        "v_add_f32 v12, v12, v13\nv_add_f32 v12, v12, v14\nv_add_f32 v12, v12, v16\n"
        "v_add_f32 v12, v12, v17\nglobal_store_dword v1, v12, s[4:5]"
    )
    out = np.zeros(64, np.float32)
    assembled(body, out)
    assert (out == 3 + 3 + 3 + 2 + 1).all()


def test_a_check_can_be_counted_or_off() -> None:
    body = OUT + "global_store_dword v1, v7, s[4:5]"
    counted = assembled(body, np.zeros(64, np.float32), checks=Checks(undefined="count"))
    assert counted.violations["undefined"] == 1
    silent = assembled(body, np.zeros(64, np.float32), checks=Checks(undefined="off"))
    assert silent.violations["undefined"] == 0
    lost = assembled(
        OUT + "global_store_dword v1, v1, s[4:5] offset:8",
        np.zeros(64, np.float32),
        checks=Checks(memory="count"),
    )
    assert lost.violations["memory"] == 2
    dropped = assembled(
        OUT + "v_mov_b32 v2, 7\nds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\n"
        "v_mov_b32 v2, 9\nds_write_b32 v1, v2 offset:252\ns_waitcnt lgkmcnt(0)\n"
        "ds_read_b32 v8, v1\nv_mov_b32 v9, 5\nds_read_b32 v9, v1 offset:252\n"
        "s_waitcnt lgkmcnt(0)\nv_lshl_add_u32 v8, v9, 8, v8\nglobal_store_dword v1, v8, s[4:5]",
        out := np.zeros(64, np.float32),
        lds=256,
        checks=Checks(memory="count"),
    )
    assert dropped.violations["memory"] == 2 * 63
    assert out.view(np.uint32).tolist() == [0x907] + [0x507] * 62 + [0x509]


def test_only_the_bytes_that_are_used_must_be_defined() -> None:
    """Compilers pack halves and add low dwords beside registers they never wrote."""
    store = "\nglobal_store_dword v1, v8, s[4:5]"
    low = "v_mov_b32 v14, v1\n"  # v15, v7 and s40 are never written
    for used, unused in (
        (
            "s_mov_b32 s21, 0x03020100\nv_perm_b32 v8, v7, v1, s21",
            "s_mov_b32 s21, 0x03020104\nv_perm_b32 v8, v7, v1, s21",
        ),
        ("v_lshlrev_b64 v[8:9], 1, v[14:15]", "v_lshrrev_b64 v[8:9], 1, v[14:15]"),
        ("v_lshl_add_u64 v[8:9], v[14:15], 1, v[14:15]", "v_lshl_add_u64 v[8:9], v[14:15], v7, 0"),
        (
            "s_mov_b64 vcc, 0\nv_cndmask_b32 v8, v1, v7, vcc",
            "s_mov_b64 vcc, -1\nv_cndmask_b32 v8, v1, v7, vcc",
        ),
        ("s_and_b32 s20, s40, 0\nv_mov_b32 v8, s20", "s_and_b32 s20, s40, 1\nv_mov_b32 v8, s20"),
        ("s_or_b32 s20, s40, -1\nv_mov_b32 v8, s20", "s_or_b32 s20, s40, 1\nv_mov_b32 v8, s20"),
    ):
        assembled(OUT + low + used + store, np.zeros(64, np.float32))
        with pytest.raises(EmulatorError, match="undefined"):
            assembled(OUT + low + unused + store, np.zeros(64, np.float32))


def test_same_value_by_two_waves_is_no_race_and_another_is() -> None:
    wave = "v_readfirstlane_b32 s20, v0\ns_lshr_b32 s20, s20, 6\nv_mov_b32 v2, 0\n"
    same = OUT + wave + "v_mov_b32 v3, 7\nds_write_b32 v2, v3\ns_barrier"
    assembled(same, np.zeros(64, np.float32), lds=64, block=128)
    other = OUT + wave + "v_mov_b32 v3, s20\nds_write_b32 v2, v3\ns_barrier"
    with pytest.raises(EmulatorError, match="races"):
        assembled(other, np.zeros(64, np.float32), lds=64, block=128)
    neighbors = OUT + wave + ("v_mov_b32 v2, s20\nv_mov_b32 v3, s20\nds_write_b8 v2, v3\ns_barrier")
    assembled(neighbors, np.zeros(64, np.float32), lds=64, block=128)


# Wave 0 writes, wave 1 reads after the barrier.
_ACROSS = (
    OUT + "v_readfirstlane_b32 s20, v0\ns_lshr_b32 s20, s20, 6\nv_and_b32 v2, 63, v0\n"
    "v_lshlrev_b32 v2, 2, v2\nv_mov_b32 v3, 5\ns_cmp_eq_u32 s20, 1\ns_cbranch_scc1 there\n"
)


def across(write: str, wait: str, read: str) -> None:
    body = f"{_ACROSS}{write}\n{wait}\nthere:\ns_barrier\ns_cmp_eq_u32 s20, 0\n"
    body += f"s_cbranch_scc1 over\n{read}\nover:\ns_waitcnt lgkmcnt(0)\ns_barrier"
    assembled(body, np.zeros(64, np.float32), lds=512, block=128)


TWICE = "ds_write_b32 v2, v3\nds_write_b32 v2, v3 offset:256"


@pytest.mark.parametrize(
    ("write", "read"),
    [
        ("ds_write_b32 v2, v3", "ds_read_b32 v4, v2"),
        ("ds_write_b32 v2, v3", "ds_write_b32 v2, v3"),
        ("ds_write_b32 v2, v3", "ds_add_u32 v2, v3"),
        ("ds_write2st64_b32 v2, v3, v3 offset1:1", "ds_read_b32 v4, v2 offset:256"),
        ("ds_write_b32 v2, v3\ns_waitcnt lgkmcnt(0)\nds_add_u32 v2, v3", "ds_read_b32 v4, v2"),
        (TWICE, "ds_read_b32 v4, v2 offset:256"),
    ],
)
def test_a_write_has_to_be_waited_for_before_a_barrier(write: str, read: str) -> None:
    across(write, "s_waitcnt lgkmcnt(0)", read)
    with pytest.raises(EmulatorError, match="has not waited") as error:
        across(write, "s_nop 0", read)
    assert error.value.check == "waits"


def test_a_wait_is_for_the_writes_that_it_counts() -> None:
    across(TWICE, "s_waitcnt lgkmcnt(1)", "ds_read_b32 v4, v2")
    with pytest.raises(EmulatorError, match="has not waited"):
        across(TWICE, "s_waitcnt lgkmcnt(1)", "ds_read_b32 v4, v2 offset:256")
    # Nobody else reads it, or not before the wait: no fault.
    across("ds_write_b32 v2, v3", "s_nop 0", "s_nop 0")
    later = "s_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v4, v2"
    body = f"{_ACROSS}ds_write_b32 v2, v3\nthere:\ns_barrier\n{later}\ns_waitcnt lgkmcnt(0)"
    assembled(body, np.zeros(64, np.float32), lds=512, block=128)


def test_a_load_into_lds_may_follow_another_of_the_same_wave() -> None:
    loads = "s_mov_b32 m0, 0\n" + "global_load_lds_dword v1, s[4:5]\n" * 2
    values = np.arange(64, dtype=np.float32)
    assembled(OUT + loads + "s_waitcnt vmcnt(0)\nds_read_b32 v8, v1", values, lds=256)
    for wait in ("s_nop 0", "s_waitcnt vmcnt(1)"):
        with pytest.raises(EmulatorError, match="under way"):
            assembled(OUT + loads + f"{wait}\nds_read_b32 v8, v1", values, lds=256)
    with pytest.raises(EmulatorError, match="under way"):
        assembled(OUT + loads + "ds_write_b32 v1, v1", values, lds=256)


def test_kernel_arguments_lie_in_whole_lines() -> None:
    """Compilers load 32 bytes of them where 24 are left."""
    values = np.zeros(64, np.float32)
    assembled(OUT + "s_load_dwordx8 s[8:15], s[0:1], 0x20\ns_waitcnt lgkmcnt(0)", values)
    with pytest.raises(EmulatorError, match="kernarg"):
        assembled(OUT + "s_load_dwordx8 s[8:15], s[0:1], 0x40\ns_waitcnt lgkmcnt(0)", values)


def test_an_entry_where_no_instruction_begins_is_named(good: bytes) -> None:
    code = load(good).code
    long = next(n for n, size in enumerate(code.instructions["size"]) if size > 4)
    inside = int(code.instructions["pc"][long]) + 4
    for pc in (inside, code.first_pc - 4, code.first_pc + 4 * len(code.index_of), 1 << 40):
        with pytest.raises(CodeObjectError, match=f"no instruction begins at 0x{pc:x}"):
            code.index_at(pc)
