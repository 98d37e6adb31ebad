"""The effects of one gfx942 instruction, for checks of machine code: its kind, and what it reads
and writes.

Registers are bits of an integer, numbered as operands are (``decode``): scalar ones below 256 (VCC,
M0 and EXEC among them), VGPRs from 256, AGPRs from 512, and the hardware registers of ``s_setreg``
from 768.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyfa.emulator import tables
from pyfa.emulator.counters import MFMA_CLOCKS
from pyfa.emulator.operands import (
    CONSTANTS,
    EXEC,
    M0,
    NONE,
    VCC,
    VGPR,
    Decoded,
    memory_dwords,
    widths_of,
)

HARDWARE = 768
SCALARS = (1 << VGPR) - 1
VCC_BITS, EXEC_BITS, M0_BIT = 3 << VCC, 3 << EXEC, 1 << M0
VCCZ, EXECZ = 251, 252

_TRANS = frozenset(
    f"v_{name}_{kind}"
    for name in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos", "rcp_iflag")
    for kind in ("f16", "f32", "f64")
)


@dataclass(frozen=True)
class Effects:
    """The effects of one instruction. For a matrix instruction, ``reads`` has the registers of all
    operands, ``a_b`` those of A and B, and ``c`` those of C. ``lane_select`` is the scalar register
    that selects a lane, ``mode`` the hardware register of ``s_setreg`` and ``s_getreg``."""

    name: str
    kind: str  # salu, smem, valu, mfma, lds, vmem, lds_dma, or other
    reads: int = 0
    writes: int = 0
    a_b: int = 0
    c: int = 0
    store_data: int = 0  # of a store of more than 8 bytes that may still be read when it has issued
    lane_select: int = 0
    mode: int = 0
    passes: int = 0
    xdl: bool = False
    trans: bool = False
    dot: bool = False
    dpp: bool = False
    part: bool = False  # writes a part of its destination: SDWA, op_sel
    states: int = 1  # wait states that it stands for


def registers(code: int, dwords: int) -> int:
    """Return the bits of ``dwords`` registers from operand ``code`` on; 0 for a constant."""
    if code == NONE or CONSTANTS <= code < VGPR:
        return 0
    return ((1 << dwords) - 1) << code


def effects_of(one: Decoded) -> Effects:
    """Return the effects of a decoded instruction."""
    name = one.name
    if name.startswith("v_mfma"):
        return _matrix(one)
    if name.startswith("v_"):
        return _vector(one)
    if name.startswith("ds_"):
        return _lds(one)
    if name.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return _memory(one)
    if name.startswith(("s_load", "s_buffer_load", "s_mem")):
        return Effects(name, "smem", writes=registers(one.fields["dst"], widths_of(one)[0]))
    return _scalar(one)


def _matrix(one: Decoded) -> Effects:
    to, _, *widths = widths_of(one)
    a, b, c = map(registers, one.src, widths)
    return Effects(
        one.name,
        "mfma",
        reads=a | b | c,
        writes=registers(one.fields["dst"], to),
        a_b=a | b,
        c=c,
        passes=MFMA_CLOCKS[one.name] // 4,
        # LLVM calls those of float32 and float64 inputs SMFMA and DMFMA; the rest XDL.
        xdl=not one.name.endswith("_f32"),
    )


def _vector(one: Decoded) -> Effects:
    name, fields = one.name, one.fields
    to, pair, *widths = widths_of(one)
    reads = lane_select = 0
    for code, dwords in zip(one.src, widths, strict=True):
        reads |= registers(code, dwords)
        if code in (VCCZ, EXECZ):
            reads |= 1 << code
    writes = registers(fields.get("dst", NONE), to) | registers(fields.get("sdst", NONE), pair)
    if name.startswith("v_cmpx"):
        writes |= EXEC_BITS
    if name.startswith("v_div_fmas"):
        reads |= VCC_BITS
    if name in ("v_readlane_b32", "v_writelane_b32"):
        lane_select = registers(one.src[1], 1)
    mode, extra = fields.get("mode", 0), fields.get("extra", 0)
    part = fields.get("opsel", 0) >> 3 == 1
    if mode == 2 and not name.startswith("v_cmp"):
        part = extra >> 8 & 7 != 6  # dst_sel is not the whole dword
    # An instruction that keeps a part of its destination reads it, and so does DPP in lanes without
    # a source.
    if part or mode == 1 or name == "v_writelane_b32":
        reads |= writes & ~SCALARS
    if name == "v_swap_b32":
        reads, writes = reads | writes, reads | writes
    return Effects(
        name,
        "valu",
        reads=reads,
        writes=writes,
        lane_select=lane_select,
        trans=name in _TRANS,
        dot=name.startswith("v_dot"),
        dpp=mode == 1,
        part=part,
    )


def _lds(one: Decoded) -> Effects:
    to, _, *widths = widths_of(one)
    address, data, second = map(registers, one.src, widths)
    writes = registers(one.fields["dst"], to)
    kept = writes if "_d16" in one.name else 0
    return Effects(one.name, "lds", reads=address | data | second | kept, writes=writes)


def _memory(one: Decoded) -> Effects:
    name, fields = one.name, one.fields
    _, descriptor, *widths = widths_of(one)
    address, data, base = map(registers, one.src, widths)
    # Every lane's address, and the lanes that take part.
    reads = address | registers(fields.get("sdst", NONE), descriptor) | base | EXEC_BITS
    if fields.get("lds", 0) or "load_lds" in name:
        return Effects(name, "lds_dma", reads=reads | M0_BIT)
    dwords = memory_dwords(name)
    if "_load_" in name:
        writes = registers(fields["dst"], dwords)
        return Effects(name, "vmem", reads=reads | (writes if "_d16" in name else 0), writes=writes)
    returned = dwords // 2 if "cmpswap" in name else dwords
    writes = registers(fields["dst"], returned) if fields.get("glc") and "atomic" in name else 0
    # A buffer store whose offset is a register takes one more clock to issue (LLVM:
    # createsVALUHazard).
    held = data if dwords > 2 and not (name.startswith("buffer") and base) else 0
    return Effects(name, "vmem", reads=reads | data, writes=writes, store_data=held)


_READS_ITS_FIELD = ("s_cmpk", "s_setreg")  # the encoding's destination field is a source


def _scalar(one: Decoded) -> Effects:
    name, fields = one.name, one.fields
    if name == "s_nop":
        return Effects(name, "other", states=(fields["imm"] & 15) + 1)
    if name not in _SALU:
        return Effects(name, "other", reads=M0_BIT if name == "s_ttracedata" else 0)
    if name.startswith(("s_setreg", "s_getreg")):
        mode = 1 << (HARDWARE + (fields["imm"] & 63))
        writes = registers(fields["dst"], 1) if name.startswith("s_getreg") else 0
        return Effects(name, "salu", mode=mode, writes=writes)
    if name.startswith(_READS_ITS_FIELD):
        return Effects(name, "salu")
    wide = 2 if re.search(r"_[bui]64$", name) else 1
    writes = registers(fields.get("dst", NONE), wide)
    if "saveexec" in name or "wrexec" in name:
        writes |= EXEC_BITS
    return Effects(name, "salu", writes=writes)


_SALU = frozenset(
    name
    for table in (tables.SOP1, tables.SOP2, tables.SOPC, tables.SOPK)
    for name in table.values()
)
