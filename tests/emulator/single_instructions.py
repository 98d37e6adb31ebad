"""Runs many single instructions in one assembled kernel: operands in, destination out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from assembly import assemble

from pyfa.emulator import Checks, Machine, pack_arguments

ROWS_IN, ROWS_OUT = 8, 4  # rows of 64 dwords per snippet: a, b, c and old d as pairs; d and a mask
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.5,
    np.inf,
    -np.inf,
    np.nan,
    0.1,
    -0.1,
    127.5,
    -126.5,
    150.25,
    -150.0,
    100.25,
    1e3,
    65504.0,
    65519.0,
    65520.0,
    65536.0,
    2.0**31,
    -(2.0**31),
    2.0**32,
    3e9,
    1e-10,
    240.0,
    248.0,
    1e-45,
    1.1754942e-38,
    1.1754944e-38,
    3.4028235e38,
    -3.4028235e38,
    6e-8,
    6.1e-5,
    5.9e-8,
    57344.0,
    0.3333333,
    255.5,
    257.0,
    -0.25,
]
INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0xFFFFFF,
    0x800000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
    0x0C080400,
    0x03070D0A,
    0x7BFF7C00,
    0x00018001,
]


def draw(kind: str, rng: np.random.Generator) -> npt.NDArray[np.uint32]:
    """Two rows of dwords: 64 values of a type, edge values and random ones mixed."""
    edge = rng.random(64) < 0.7
    bits = rng.integers(0, 1 << 32, (2, 64), dtype=np.uint64).astype(np.uint32)
    if kind in "fF":
        for row in bits:
            scaled = (rng.standard_normal(64) * 2.0 ** rng.integers(-20, 20, 64)).astype(np.float32)
            row[:] = np.where(edge, rng.choice(FLOATS, 64).astype(np.float32), scaled).view(
                np.uint32
            )
    elif kind == "d":
        values = np.where(
            edge,
            rng.choice([*FLOATS, 5e-324, 1.7e308, 2.2e-308], 64),
            rng.standard_normal(64) * 2.0 ** rng.integers(-99, 99, 64),
        )
        bits[:] = values.view(np.uint32).reshape(64, 2).T
    elif kind in "hp":
        for row in bits:
            with np.errstate(over="ignore"):
                chosen = rng.choice(FLOATS, (2, 64)).astype(np.float16)
            halves = chosen.view(np.uint16).astype(np.uint32)
            row[:] = np.where(edge, halves[0] | halves[1] << 16, row & 0xBFFFBFFF)
    else:
        edges = rng.choice(np.array(INTEGERS, np.uint32), (2, 64))
        bits = np.where(edge, edges, bits)
    return bits


def view(rows: npt.NDArray[np.uint32], kind: str) -> Any:
    """The values of a type that two rows of dwords hold."""
    low = rows[0].copy()
    pair = np.ascontiguousarray(rows.T).reshape(-1)
    if kind in "ui":
        return low.view({"u": np.uint32, "i": np.int32}[kind])
    if kind == "f":
        return low.view(np.float32)
    if kind in "hst":
        return low.astype(np.uint16).view({"h": np.float16, "s": np.uint16, "t": np.int16}[kind])
    if kind == "F":
        return rows[0].view(np.float32), rows[1].view(np.float32)
    if kind == "p":
        return low
    return pair.view({"d": np.float64, "q": np.uint64, "l": np.int64}[kind])


def run(snippets: list[str], inputs: npt.NDArray[np.uint32], **options: Any) -> Any:
    """Each snippet works on v[2:9] (a, b, c, d as pairs) and may leave a mask in s[20:21].

    ``inputs`` is (snippets, 8, 64); the result (snippets, 4, 64): v8, v9, the mask's two halves.
    """
    body = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "v_lshlrev_b32_e32 v1, 2, v0",
        "s_mov_b64 s[20:21], 0",
        "s_waitcnt lgkmcnt(0)",
    ]
    for snippet in snippets:
        body += [f"global_load_dword v{2 + n}, v1, s[4:5] offset:{256 * n}" for n in range(ROWS_IN)]
        body += [
            "s_waitcnt vmcnt(0)",
            snippet,
            "s_mov_b64 exec, -1",
            "v_mov_b32_e32 v10, s20",
            "v_mov_b32_e32 v11, s21",
            "global_store_dword v1, v8, s[6:7]",
            "global_store_dword v1, v9, s[6:7] offset:256",
            "global_store_dword v1, v10, s[6:7] offset:512",
            "global_store_dword v1, v11, s[6:7] offset:768",
            f"s_add_u32 s4, s4, {256 * ROWS_IN}",
            "s_addc_u32 s5, s5, 0",
            f"s_add_u32 s6, s6, {256 * ROWS_OUT}",
            "s_addc_u32 s7, s7, 0",
        ]
    data = assemble("\n".join(body), **options)
    outputs = np.zeros((len(snippets), ROWS_OUT, 64), np.uint32)
    machine = Machine(checks=Checks())
    kernel = machine.load(data).kernel("test")
    inputs = np.ascontiguousarray(inputs)
    pointers = [machine.map_array(inputs, "in"), machine.map_array(outputs, "out")]
    machine.launch(kernel, grid=(1,), block=(64,), kernarg=pack_arguments(kernel.kernel, pointers))
    return outputs
