"""What tests of memory instructions share: the kernel around them, and what loads should give."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from assembly import assemble

from pyfa.emulator import Machine, pack_arguments

U = np.uint32
LANES = np.arange(64)
BYTES = 4096  # of each array: 64 bytes a lane
LDS = 16384
# s[4:5] in, s[6:7] out, s[8:11] a buffer descriptor of in, s[12:15] of out; v1 = 64 * lane; v[2:3]
# and v[4:5] the lane's flat addresses in in and out.
SETUP = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 6, v0
s_waitcnt lgkmcnt(0)
s_mov_b32 s8, s4
s_and_b32 s9, s5, 0xffff
s_mov_b32 s10, 0x1000
s_mov_b32 s11, 0x27000
s_mov_b32 s12, s6
s_and_b32 s13, s7, 0xffff
s_mov_b32 s14, 0x1000
s_mov_b32 s15, 0x27000
v_mov_b32 v2, s4
v_mov_b32 v3, s5
v_lshl_add_u64 v[2:3], v[2:3], 0, s[4:5]
v_mov_b32 v20, v1
v_mov_b32 v21, 0
v_lshl_add_u64 v[2:3], v[20:21], 0, s[4:5]
v_lshl_add_u64 v[4:5], v[20:21], 0, s[6:7]
s_mov_b32 m0, -1
v_mov_b32 v8, 0x11223344
v_mov_b32 v9, 0x11223344
v_mov_b32 v10, 0x11223344
v_mov_b32 v11, 0x11223344
"""
WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)\n"


RAN: set[str] = set()  # mnemonics that have been run


def launch(body: str, inputs: Any, outputs: Any) -> Any:
    RAN.update(re.findall(r"\b(?:ds|global|flat|buffer|scratch|s_load|s_buffer)_?\w+", body))
    machine = Machine()
    kernel = machine.load(assemble(SETUP + body, lds=LDS, scratch=256)).kernel("test")
    pointers = [machine.map_array(inputs, "in"), machine.map_array(outputs, "out")]
    return machine.launch(
        kernel, grid=(1,), block=(64,), kernarg=pack_arguments(kernel.kernel, pointers)
    )


def data(seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


OLD = 0x11223344
LOADS: dict[str, Callable[[bytes], list[int]]] = {
    "ubyte": lambda b: [b[0]],
    "sbyte": lambda b: [int.from_bytes(b[:1], "little", signed=True)],
    "ushort": lambda b: [int.from_bytes(b[:2], "little")],
    "sshort": lambda b: [int.from_bytes(b[:2], "little", signed=True)],
    **{
        f"dword{'x' + str(n) if n > 1 else ''}": (
            lambda b, n=n: [int.from_bytes(b[4 * k : 4 * k + 4], "little") for k in range(n)]
        )
        for n in (1, 2, 3, 4)
    },
    "ubyte_d16": lambda b: [OLD & 0xFFFF0000 | b[0]],
    "ubyte_d16_hi": lambda b: [OLD & 0xFFFF | b[0] << 16],
    "sbyte_d16": lambda b: [
        OLD & 0xFFFF0000 | int.from_bytes(b[:1], "little", signed=True) & 65535
    ],
    "sbyte_d16_hi": lambda b: [
        OLD & 0xFFFF | (int.from_bytes(b[:1], "little", signed=True) & 65535) << 16
    ],
    "short_d16": lambda b: [OLD & 0xFFFF0000 | int.from_bytes(b[:2], "little")],
    "short_d16_hi": lambda b: [OLD & 0xFFFF | int.from_bytes(b[:2], "little") << 16],
}
STORES = {
    "byte": (1, 0),
    "byte_d16_hi": (1, 2),
    "short": (2, 0),
    "short_d16_hi": (2, 2),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}


def registers(count: int, first: int = 8) -> str:
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"
