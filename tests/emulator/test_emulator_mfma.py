"""Every matrix instruction against numpy, with the layouts of AMD's matrix instruction calculator.

The formulas here are written from the calculator's tables per shape, not from the core's code.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from assembly import assemble
from vector_rules import BF8, FP8

from pyfa.emulator import Machine, pack_arguments, tables
from pyfa.emulator.counters import MFMA_CLOCKS

NAMES = sorted(name for name in tables.VOP3P.values() if name.startswith("v_mfma"))


def shape(name: str) -> tuple[int, int, int, str, str]:
    """Rows, inner length, blocks, and the types of A and B."""
    match = re.fullmatch(r"v_mfma_(f32|i32)_(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+?)(?:_(\w+))?", name)
    assert match
    kind = match[5]
    return int(match[2]), int(match[3]), int(match[4] or 1), kind, match[6] or kind


def operand_place(m: int, k: int, blocks: int, row: int, inner: int, block: int) -> tuple[int, int]:
    """(lane, element) that hold A[row][inner]; the same with columns for B."""
    per_lane = k * m * blocks // 64
    if blocks > 1:
        return block * m + row, inner
    return inner // per_lane * m + row, inner % per_lane


def result_place(m: int, row: int, column: int, block: int) -> tuple[int, int]:
    """(register, lane) of D[row][column]."""
    if m == 32:
        return 16 * block + 4 * (row // 8) + row % 4, 32 * (row // 4 % 2) + column
    if m == 16:
        return 4 * block + row % 4, 16 * (row // 4) + column
    return row, 4 * block + column


def values(kind: str, rng: np.random.Generator, size: tuple[int, ...]) -> tuple[Any, Any]:
    """Numbers of an element type, and their codes."""
    if kind == "i8":
        codes = rng.integers(-128, 128, size)
        return codes.astype(np.float64), codes & 255
    if kind in ("fp8", "bf8"):
        codes = rng.integers(0, 256, size)
        codes[codes & 0x60 == 0x60] &= 0x9F  # keep magnitudes near each other
        codes[codes == 128] = 0  # the NaN
        return (FP8 if kind == "fp8" else BF8)[codes], codes
    numbers = rng.standard_normal(size).astype(np.float32)
    if kind == "f16":
        half = numbers.astype(np.float16)
        return half.astype(np.float64), half.view(np.uint16)
    if kind == "bf16":
        codes = numbers.view(np.uint32) >> 16
        return (codes << 16).view(np.float32).astype(np.float64), codes
    return numbers.astype(np.float64), numbers.view(np.uint32)


BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "i8": 8}


def fill(codes: Any, kind: str, m: int, k: int, blocks: int) -> Any:
    """Registers (rows of 64 dwords) that hold ``codes`` (blocks, m, k)."""
    bits = BITS[kind]
    per_lane = k * m * blocks // 64
    rows = np.zeros((max(per_lane * bits // 32, 1), 64), np.uint32)
    for block in range(blocks):
        for row in range(m):
            for inner in range(k):
                lane, element = operand_place(m, k, blocks, row, inner, block)
                at = element * bits
                rows[at // 32, lane] |= np.uint32(int(codes[block, row, inner]) << at % 32)
    return rows


@pytest.mark.parametrize("accumulators", ["v", "a"])
@pytest.mark.parametrize("name", NAMES)
def test_matrix_instruction(name: str, accumulators: str) -> None:
    m, k, blocks, kind_a, kind_b = shape(name)
    rng = np.random.default_rng(abs(hash((m, k, blocks))) % 1000)
    a, codes_a = values(kind_a, rng, (blocks, m, k))
    b, codes_b = values(kind_b, rng, (blocks, m, k))
    integer = "_i32_" in name
    c = rng.integers(-99, 99, (blocks, m, m)) if integer else rng.standard_normal((blocks, m, m))
    registers = m * m * blocks // 64
    rows_a, rows_b = fill(codes_a, kind_a, m, k, blocks), fill(codes_b, kind_b, m, k, blocks)
    rows_c = np.zeros((registers, 64), np.int32 if integer else np.float32)
    for block in range(blocks):
        for row in range(m):
            for column in range(m):
                register, lane = result_place(m, row, column, block)
                rows_c[register, lane] = c[block, row, column]
    inputs = np.concatenate([rows_a, rows_b, rows_c.view(np.uint32)])
    outputs = np.zeros((registers, 64), np.uint32)

    def span(first: int, count: int, letter: str = "v") -> str:
        return f"{letter}[{first}:{first + count - 1}]" if count > 1 else f"{letter}{first}"

    count = len(rows_a)
    body = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "v_lshlrev_b32_e32 v1, 2, v0",
        "s_waitcnt lgkmcnt(0)",
    ]
    targets = [*range(8, 8 + count), *range(16, 16 + count), *range(32, 32 + registers)]
    for number, register in enumerate(targets):
        letter = accumulators if register >= 32 else "v"
        body += [
            f"global_load_dword {letter}{register}, v1, s[4:5]",
            "s_add_u32 s4, s4, 256",
            "s_addc_u32 s5, s5, 0",
        ]
        assert number < len(inputs)
    d = span(32, registers, accumulators)
    body += ["s_waitcnt vmcnt(0)", f"{name} {d}, {span(8, count)}, {span(16, count)}, {d}"]
    for register in range(32, 32 + registers):
        body += [
            f"global_store_dword v1, {accumulators}{register}, s[6:7]",
            "s_add_u32 s6, s6, 256",
            "s_addc_u32 s7, s7, 0",
        ]
    machine = Machine()
    kernel = machine.load(assemble("\n".join(body))).kernel("test")
    pointers = [machine.map_array(inputs, "in"), machine.map_array(outputs, "out")]
    counters = machine.launch(
        kernel, grid=(1,), block=(64,), kernarg=pack_arguments(kernel.kernel, pointers)
    )
    exact = np.einsum("nik,njk->nij", a, b)
    for block in range(blocks):
        for row in range(m):
            for column in range(m):
                register, lane = result_place(m, row, column, block)
                got = outputs.view(rows_c.dtype)[register, lane]
                wanted = exact[block, row, column] + rows_c[register, lane]
                size = np.abs(a[block, row]) @ np.abs(b[block, column]) + abs(
                    rows_c[register, lane]
                )
                assert abs(float(got) - wanted) <= (0 if integer else k * 2**-23 * size)
    assert counters.mfma_clocks == {name: MFMA_CLOCKS[name]}


def test_inner_order_is_the_documented_one() -> None:
    """D = C + A0*B0 + A1*B1 + ... in rising order: 2^25 - 2^25 + 1 + ... keeps the small terms."""
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_mov_b32 v8, 0x4c000000
v_cmp_lt_u32 vcc, 31, v0
v_cndmask_b32 v8, v8, 1.0, vcc
v_mov_b32 v9, 1.0
v_mov_b32 v32, 0xcc000000
"""
    body = body.replace(
        "v_cndmask_b32 v8, v8, 1.0, vcc", "v_mov_b32 v7, 1.0\nv_cndmask_b32 v8, v8, v7, vcc"
    )
    body += "\n".join(f"v_mov_b32 v{n}, v32" for n in range(33, 48))
    body += "\nv_mfma_f32_32x32x2_f32 v[32:47], v8, v9, v[32:47]\ns_waitcnt lgkmcnt(0)\n"
    body += "global_store_dword v1, v32, s[6:7]"
    out = np.zeros(64, np.float32)
    machine = Machine()
    kernel = machine.load(assemble(body)).kernel("test")
    pointer = machine.map_array(out, "out")
    machine.launch(
        kernel, grid=(1,), block=(64,), kernarg=pack_arguments(kernel.kernel, [0, pointer])
    )
    assert (out == 1.0).all()
