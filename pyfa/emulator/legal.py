"""Finds encodings that have an opcode, but that the ISA of gfx942 forbids, and says why.

This module checks tuples of registers, the one scalar value that a VALU instruction may read,
literals, DPP controls, SDWA selections and op_sel. Fields that an instruction does not use may hold
anything.
"""

from __future__ import annotations

import functools

from pyfa.emulator import tables
from pyfa.emulator.operands import (
    AGPR,
    CONSTANTS,
    LITERAL,
    M0,
    NONE,
    VCC,
    VGPR,
    VOP3P,
    Decoded,
    register_name,
    widths_of,
)  # fmt: skip

_SCALARS = frozenset(range(125)) | {126, 127}
_SOURCES = _SCALARS | frozenset(range(128, 209)) | {
    235, 236, 237, 238, *range(240, 249), 251, 252, 253, 255
}  # fmt: skip
DPP, SDWA = 1, 2
_DPP_CONTROLS = frozenset((
    *range(0x100), *range(0x101, 0x110), *range(0x111, 0x120), *range(0x121, 0x130),  # quad, row
    0x130, 0x134, 0x138, 0x13C, 0x140, 0x141, 0x142, 0x143, *range(0x150, 0x160),
))  # fmt: skip
_NEWBCAST = 0x150  # the one kind of control for 64 bits
# Instructions that read or write halves by op_sel: a bit for each source, then the destination.
_OP_SEL = {
    **dict.fromkeys(
        (name for name in tables.VOP3.values()
         if name.startswith(("v_min3", "v_max3", "v_med3", "v_mad_", "v_fma_"))
         and name.endswith("16")), 0b1111,
    ),
    "v_mad_u32_u16": 0b0011, "v_mad_i32_i16": 0b0011,
    "v_add_i16": 0b1011, "v_sub_i16": 0b1011, "v_pack_b32_f16": 0b0011,
    "v_cvt_pk_fp8_f32": 0b1000, "v_cvt_pk_bf8_f32": 0b1000,
}  # fmt: skip


_VALUES = frozenset((235, 236, 237, 238, 251, 252, 253, LITERAL))  # read as a scalar register is
_READS_VCC = frozenset(("v_div_fmas_f32", "v_div_fmas_f64"))
_NO_DPP = frozenset(
    ("v_fmamk_f32", "v_fmaak_f32", "v_readfirstlane_b32", "v_swap_b32", "v_pk_fmac_f16")
)
_NO_SDWA = _NO_DPP | {"v_fmac_f32", "v_dot2c_f32_f16", "v_dot4c_i32_i8"}
_SCALAR, _VECTOR = (0, VGPR), (VGPR, NONE)
# The operand kinds of instructions that do not allow all.
_KINDS = {
    "v_readfirstlane_b32": (_VECTOR,), "v_readlane_b32": (_VECTOR, _SCALAR),
    "v_writelane_b32": (_SCALAR, _SCALAR), "v_swap_b32": (_VECTOR,),
    "v_accvgpr_mov_b32": ((AGPR, NONE),),
}  # fmt: skip


def why_not(one: Decoded, low: int, high: int) -> str:
    """Return why the ISA has no such instruction, or "" if it has one."""
    fields = one.fields
    to, pair, *read = widths_of(one)
    wrong = (
        _register(fields.get("dst", NONE), to, _SCALARS)
        or _register(fields.get("sdst", NONE), pair, _SCALARS)
        or _register(one.src[0], read[0], _SOURCES)
        or _register(one.src[1], read[1], _SOURCES)
        or _register(one.src[2], read[2], _SOURCES)
    )
    if wrong or one.name[0] != "v":
        return wrong
    return _vector(one, low, high)


@functools.cache
def _register(code: int, dwords: int, scalars: frozenset[int]) -> str:
    """Return why the registers from ``code`` on cannot be an operand; "" if they can."""
    if code == NONE or not dwords:
        return ""
    if code >= VGPR:
        if dwords > 1 and code & 1:
            return f"{register_name(code, dwords)} does not begin at an even register"
        first = code - (AGPR if code >= AGPR else VGPR)
        return f"{register_name(code, dwords)} does not exist" if first + dwords > 256 else ""
    if code not in scalars:
        return f"operand {code} does not exist"
    if code >= CONSTANTS or dwords == 1:
        return ""
    if code & (1 if dwords == 2 else 3):
        return f"{register_name(code, dwords)} does not begin at a multiple of {min(dwords, 4)}"
    # Above 2 dwords: users' end before s102 (flat_scratch and vcc are pairs), traps' before M0.
    if code == M0 or (dwords > 2 and (code < 108 < code + dwords + 6 or code + dwords > M0)):
        return f"{dwords} registers from {register_name(code)} on do not exist"
    return ""


def _vector(one: Decoded, low: int, high: int) -> str:
    name, fields, src = one.name, one.fields, one.src
    if name in _KINDS:
        for code, kinds in zip(src, _KINDS[name], strict=False):
            if not kinds[0] <= code < kinds[1]:
                return f"{name} takes no {register_name(code)} there"
    scalars = {code for code in src if code < CONSTANTS or code in _VALUES}
    if name in _READS_VCC:
        scalars.add(VCC)
    if len(scalars) > 1 and name != "v_writelane_b32":  # its lane is selected by another path
        return (
            f"{' and '.join(register_name(code) for code in sorted(scalars))}: at most one scalar"
        )
    mode = fields.get("mode", 0)
    if mode == DPP:
        return _dpp(one, high)
    if mode == SDWA:
        return _sdwa(one, high)
    if one.size == 8 and low >> 31:
        return _vop3(one, low, high)
    return ""


def _vop3(one: Decoded, low: int, high: int) -> str:
    name, src = one.name, one.src
    if LITERAL in src:
        return "VOP3 has no literals"
    if low >> 23 != VOP3P:
        used = 0 if "sdst" in one.fields and not name.startswith("v_cmp") else low >> 11 & 15
        return f"{name} has no op_sel 0x{used:x}" if used & ~_OP_SEL.get(name, 0) else ""
    if name.startswith("v_mfma"):
        to, whole = one.fields["dst"], widths_of(one)[0]
        apart = src[2] == to or src[2] < VGPR or abs(src[2] - to) >= whole
        return "" if apart or whole <= 4 else "the addend overlaps a part of the destination"
    op_sel, op_sel_hi = low >> 11 & 7, (high >> 27 & 3) | (low >> 14 & 1) << 2
    if name.startswith("v_dot") and (op_sel or op_sel_hi != 7):
        return f"{name} has no op_sel"
    return f"{name} has no op_sel 0x{op_sel:x}" if op_sel & 4 and src[2] == NONE else ""


def _dpp(one: Decoded, extra: int) -> str:
    control = extra >> 8 & 0x1FF
    if one.name in _NO_DPP:
        return f"{one.name} has no DPP form"
    if control not in _DPP_CONTROLS or extra >> 17 & 3:
        return f"DPP control 0x{extra >> 8 & 0x7FF:x} does not exist"
    if control < _NEWBCAST and "64" in one.name:
        return f"DPP control 0x{control:x} is not for 64 bits"
    return ""


def _sdwa(one: Decoded, extra: int) -> str:
    if one.name in _NO_SDWA or "64" in one.name:
        return f"{one.name} has no SDWA form"
    selections = [extra >> 16 & 7]
    if one.src[1] != NONE:
        selections.append(extra >> 24 & 7)
    if "dst" in one.fields:
        selections.append(extra >> 8 & 7)
        if extra >> 11 & 3 == 3:
            return "SDWA dst_unused 3 does not exist"
    return "SDWA selection 7 does not exist" if 7 in selections else ""
