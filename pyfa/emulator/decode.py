"""Decodes gfx942 machine code to the arrays of instructions that the C core runs.

The bytes of the code object are the only source: formats and fields are those of AMD's "Instinct
MI300 Instruction Set Architecture", opcodes are in ``tables``. An unknown encoding becomes an
instruction that fails when it is executed, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfa.emulator import legal, tables
from pyfa.emulator.operands import AGPR, LITERAL, MASK_IN, NONE, VCC, VGPR, VOP3P, Decoded
from pyfa.errors import CodeObjectError

NOWHERE = 0xFFFFFFFF

# The layout of `Inst` in core/core.h.
INSTRUCTION = np.dtype(
    [
        ("run", "u8"), ("lanes", "u8"), ("pc", "u4"), ("literal", "u4"), ("imm", "i4"),
        ("extra", "u4"), ("op", "u2"), ("dst", "u2"), ("sdst", "u2"), ("src", "u2", (3,)),
        ("size", "u1"), ("neg", "u1"), ("abs", "u1"), ("neg_hi", "u1"), ("opsel", "u1"),
        ("opsel_hi", "u1"), ("omod", "u1"), ("clamp", "u1"), ("mode", "u1"), ("glc", "u1"),
        ("lds", "u1"), ("idxen", "u1"), ("offen", "u1"), ("simple", "u1"), ("to_exec", "u1"),
        ("sc1", "u1"),
    ],
    align=True,
)  # fmt: skip
FIELDS = {name: index for index, name in enumerate(INSTRUCTION.names or ())}

UNKNOWN_OP = 0xFFFF
NO_SADDR = 0x7F
ACCUMULATING = frozenset(
    ("v_fmac_f32", "v_fmac_f64", "v_pk_fmac_f16", "v_dot2c_f32_f16", "v_dot4c_i32_i8")
)
_CARRY_OUT = frozenset(
    ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32",
     "v_subbrev_co_u32", "v_div_scale_f32", "v_div_scale_f64", "v_mad_u64_u32", "v_mad_i64_i32")
)  # fmt: skip
_BRANCHES = frozenset(name for name in tables.SOPP.values() if "branch" in name)
_SCALAR_DEST_VALU = frozenset(("v_readfirstlane_b32", "v_readlane_b32"))


@dataclass(frozen=True)
class Code:
    """Decoded functions: their ``instructions``, sorted by address, and the names of the
    functions."""

    instructions: npt.NDArray[Any]  # of INSTRUCTION
    names: tuple[str, ...]
    first_pc: int
    index_of: npt.NDArray[np.uint32]  # (pc - first_pc) / 4 to index; NOWHERE between

    def index_at(self, pc: int) -> int:
        """Return the index of the instruction at address ``pc``."""
        place = (pc - self.first_pc) // 4
        found = int(self.index_of[place]) if 0 <= place < len(self.index_of) else NOWHERE
        if found == NOWHERE:
            raise CodeObjectError(f"no instruction begins at 0x{pc:x}")
        return found


def decode_functions(
    image: bytes, functions: Iterable[tuple[int, int]], op_of: Mapping[str, int]
) -> Code:
    """Decode ``(address, bytes)`` ranges of ``image``. ``op_of`` maps names of instructions to the
    numbers of the core's operations."""
    rows: list[tuple[Any, ...]] = []
    names: list[str] = []
    ranges = sorted(set(functions))
    first = ranges[0][0]
    last = max(address + size for address, size in ranges)
    for address, size in ranges:
        pc, end = address, address + size
        while pc < end:
            low = int.from_bytes(image[pc : pc + 4], "little")
            high = int.from_bytes(image[pc + 4 : pc + 8], "little")
            one = decode(low, high)
            names.append(one.name if one.known else f"(unknown 0x{low:08x})")
            rows.append(_row(one, pc, low, op_of))
            pc += one.size
    array = np.array(rows, INSTRUCTION)
    index_of = np.full((last - first) // 4, NOWHERE, np.uint32)
    index_of[(array["pc"] - first) // 4] = np.arange(len(array), dtype=np.uint32)
    for index, name in enumerate(names):
        if name in _BRANCHES or name == "s_call_b64":
            row = array[index]
            target = (int(row["pc"]) + 4 + 4 * int(row["imm"]) - first) // 4
            inside = 0 <= target < len(index_of)
            array["imm"][index] = int(index_of[target].astype(np.int32)) if inside else -1
    return Code(array, tuple(names), first, index_of)


def _row(one: Decoded, pc: int, low: int, op_of: Mapping[str, int]) -> tuple[Any, ...]:
    values: list[Any] = [0] * len(FIELDS)
    values[FIELDS["dst"]] = values[FIELDS["sdst"]] = NONE
    for name, value in one.fields.items():
        values[FIELDS[name]] = value
    values[FIELDS["src"]] = tuple(one.src)
    values[FIELDS["pc"]], values[FIELDS["size"]] = pc, one.size
    if one.known and one.name in op_of:
        values[FIELDS["op"]] = op_of[one.name]
    else:
        one.known = False
        values[FIELDS["op"]], values[FIELDS["literal"]] = UNKNOWN_OP, low
    return tuple(values)


def decode(low: int, high: int) -> Decoded:
    """Decode one instruction from its first two dwords."""
    one = _decode(low, high)
    if one.known:
        one.illegal = legal.why_not(one, low, high)
        one.known = not one.illegal
    return one


def _decode(low: int, high: int) -> Decoded:
    if low >> 31 == 0:
        return _vector_short(low, high)
    top = low >> 26
    if low >> 30 == 2:
        return _scalar(low, high)
    if top == 0b110100:
        return _vop3p(low, high) if low >> 23 == VOP3P else _vop3(low, high)
    if top == 0b110000:
        return _smem(low, high)
    if top == 0b110110:
        return _ds(low, high)
    if top == 0b110111:
        return _flat(low, high)
    if top == 0b111000:
        return _mubuf(low, high)
    return Decoded(known=False)


def _named(table: Mapping[int, str], opcode: int, size: int) -> Decoded:
    name = table.get(opcode, "")
    return Decoded(name=name, size=size, known=bool(name))


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _scalar(low: int, high: int) -> Decoded:
    if low >> 23 == 0b101111111:  # SOPP
        one = _named(tables.SOPP, low >> 16 & 0x7F, 4)
        immediate = low & 0xFFFF
        one.fields["imm"] = _signed(immediate, 16) if one.name in _BRANCHES else immediate
        return one
    if low >> 23 == 0b101111101:  # SOP1
        one = _named(tables.SOP1, low >> 8 & 0xFF, 4)
        one.src[0] = low & 0xFF
        if one.name not in ("s_setpc_b64",):
            one.fields["dst"] = low >> 16 & 0x7F
        if one.name == "s_getpc_b64":
            one.src[0] = NONE
    elif low >> 23 == 0b101111110:  # SOPC
        one = _named(tables.SOPC, low >> 16 & 0x7F, 4)
        one.src[0], one.src[1] = low & 0xFF, low >> 8 & 0xFF
    elif low >> 28 == 0b1011:  # SOPK
        one = _named(tables.SOPK, low >> 23 & 0x1F, 4)
        one.fields["dst"] = low >> 16 & 0x7F
        immediate = low & 0xFFFF
        unsigned = one.name.endswith("_u32") or one.name.startswith(("s_getreg", "s_setreg"))
        one.fields["imm"] = immediate if unsigned else _signed(immediate, 16)
        if one.name == "s_setreg_imm32_b32":
            one.fields["literal"], one.size = high, 8
            one.fields["dst"] = NONE
        return one
    else:  # SOP2
        one = _named(tables.SOP2, low >> 23 & 0x7F, 4)
        one.src[0], one.src[1] = low & 0xFF, low >> 8 & 0xFF
        one.fields["dst"] = low >> 16 & 0x7F
    _literal(one, high)
    return one


def _literal(one: Decoded, high: int) -> None:
    if LITERAL in one.src:
        one.fields["literal"], one.size = high, 8


def _vector_short(low: int, high: int) -> Decoded:
    """Decode VOP1, VOP2 and VOPC, with SDWA, DPP or a literal in the second dword."""
    src0 = low & 0x1FF
    vgpr0, vgpr1, dst = VGPR, (low >> 9 & 0xFF) + VGPR, (low >> 17 & 0xFF) + VGPR
    compare = low >> 25 == 0b0111110
    if compare:
        one = _named(tables.VOPC, low >> 17 & 0xFF, 4)
        one.fields["sdst"] = VCC
        one.src[:2] = [src0, vgpr1]
    elif low >> 25 == 0b0111111:
        one = _named(tables.VOP1, low >> 9 & 0xFF, 4)
        one.src[0] = src0
        _vop1_destination(one, low >> 17 & 0xFF)
    else:
        one = _named(tables.VOP2, low >> 25, 4)
        one.src[:2] = [src0, vgpr1]
        one.fields["dst"] = dst
        _vop2_implied(one, dst)
    one.fields["opsel_hi"] = 7
    if src0 == 249:
        one.size, one.fields["extra"], one.fields["mode"] = 8, high, 2
        one.src[0] = (high & 0xFF) + (0 if high >> 23 & 1 else vgpr0)
        if one.src[1] != NONE and one.name not in _VOP1_NAMES:
            one.src[1] = (low >> 9 & 0xFF) + (0 if high >> 31 & 1 else vgpr0)
        one.fields["neg"] = (high >> 20 & 1) | (high >> 28 & 1) << 1
        one.fields["abs"] = (high >> 21 & 1) | (high >> 29 & 1) << 1
        if compare:
            one.fields["sdst"] = high >> 8 & 0x7F if high >> 15 & 1 else VCC
        else:
            one.fields["clamp"], one.fields["omod"] = high >> 13 & 1, high >> 14 & 3
    elif src0 == 250:
        one.size, one.fields["extra"], one.fields["mode"] = 8, high, 1
        one.src[0] = (high & 0xFF) + vgpr0
        one.fields["neg"] = (high >> 20 & 1) | (high >> 22 & 1) << 1
        one.fields["abs"] = (high >> 21 & 1) | (high >> 23 & 1) << 1
    elif LITERAL in one.src:
        _literal(one, high)
    return one


_VOP1_NAMES = frozenset(tables.VOP1.values())


def _vop1_destination(one: Decoded, number: int) -> None:
    if one.name == "v_readfirstlane_b32":
        one.fields["dst"] = number
    elif one.name == "v_accvgpr_mov_b32":
        one.fields["dst"] = number + AGPR
        if one.src[0] >= VGPR:
            one.src[0] += AGPR - VGPR
    elif one.name == "v_nop":
        one.src[0] = NONE
    else:
        one.fields["dst"] = number + VGPR


def _vop2_implied(one: Decoded, dst: int) -> None:
    if one.name in ACCUMULATING:
        one.src[2] = dst
    elif one.name in MASK_IN:
        one.src[2] = VCC
    elif one.name == "v_fmamk_f32":  # D = S0 * K + S1
        one.src[:3] = [one.src[0], LITERAL, one.src[1]]
    elif one.name == "v_fmaak_f32":  # D = S0 * S1 + K
        one.src[2] = LITERAL
    if one.name in _CARRY_OUT:
        one.fields["sdst"] = VCC


def _vop3(low: int, high: int) -> Decoded:
    opcode = low >> 16 & 0x3FF
    if opcode < 256:
        one = _named(tables.VOPC, opcode, 8)
        one.fields["sdst"] = low & 0xFF
        sources = 2
    elif opcode < 320:
        one = _named(tables.VOP2, opcode - 256, 8)
        sources = 2
    elif opcode < 448:
        one = _named(tables.VOP1, opcode - 320, 8)
        sources = 1
    else:
        one = _named(tables.VOP3, opcode, 8)
        sources = 3
    fields = one.fields
    for number in range(sources):
        one.src[number] = high >> 9 * number & 0x1FF
    if one.name in ("v_fmamk_f32", "v_fmaak_f32", "v_swap_b32", "v_pk_fmac_f16"):
        one.known = False  # these have no VOP3 form
    if opcode >= 256:
        number = low & 0xFF
        if one.name in _SCALAR_DEST_VALU:
            fields["dst"] = number
        else:
            fields["dst"] = number + VGPR
            if one.name in ACCUMULATING:
                one.src[2] = number + VGPR
    if one.name in MASK_IN:
        one.src[2] = high >> 18 & 0x1FF
    fields["clamp"] = low >> 15 & 1
    fields["opsel_hi"] = 7
    fields["omod"], fields["neg"] = high >> 27 & 3, high >> 29 & 7
    if one.name in _CARRY_OUT:
        fields["sdst"] = low >> 8 & 0x7F
    else:
        fields["abs"], fields["opsel"] = low >> 8 & 7, low >> 11 & 15
    if opcode < 256:
        fields["clamp"] = 0  # asks for an exception on signalling NaNs: nothing is computed
    if one.name in _TWO_SOURCES:
        one.src[2] = NONE
    return one


_TWO_SOURCES = frozenset(
    name for opcode, name in tables.VOP3.items() if opcode >= 640
)  # the VOP3 block from 640 on holds operations of two sources


def _vop3p(low: int, high: int) -> Decoded:
    opcode = low >> 16 & 0x7F
    one = _named(tables.VOP3P, opcode, 8)
    fields, dst = one.fields, low & 0xFF
    sources = [high & 0x1FF, high >> 9 & 0x1FF, high >> 18 & 0x1FF]
    if one.name.startswith("v_mfma"):
        acc_cd = low >> 15 & 1
        fields["dst"] = dst + (AGPR if acc_cd else VGPR)
        for number, acc in enumerate((high >> 27 & 1, high >> 28 & 1, acc_cd)):
            moved = AGPR - VGPR if acc and sources[number] >= VGPR else 0
            one.src[number] = sources[number] + moved
        fields["extra"] = (low >> 8 & 0x7F) | (high >> 29 & 7) << 7  # cbsz, abid, blgp
        one.known = one.known and one.src[0] >= VGPR and one.src[1] >= VGPR
    elif one.name == "v_accvgpr_read_b32":
        fields["dst"], one.src[0] = dst + VGPR, (sources[0] & 0xFF) + AGPR
    elif one.name == "v_accvgpr_write_b32":
        fields["dst"], one.src[0] = dst + AGPR, sources[0]
    else:
        fields["dst"] = dst + VGPR
        three = "fma" in one.name or "mad" in one.name or "dot" in one.name
        one.src[:] = sources if three else [*sources[:2], NONE]
        fields["clamp"], fields["opsel"] = low >> 15 & 1, low >> 11 & 7
        fields["opsel_hi"] = (high >> 27 & 3) | (low >> 14 & 1) << 2
        fields["neg"], fields["neg_hi"] = high >> 29 & 7, low >> 8 & 7
        if not three:
            fields["opsel_hi"] |= 4  # the third source's bit means nothing
        if one.name.startswith("v_dot") and not one.name.endswith("16"):
            fields["opsel_hi"], fields["opsel"] = 7, 0
    return one


def _smem(low: int, high: int) -> Decoded:
    one = _named(tables.SMEM, low >> 18 & 0xFF, 8)
    if one.name.startswith("s_dcache"):
        return one
    one.fields["dst"] = low >> 6 & 0x7F
    if one.name.startswith("s_mem"):
        return one
    one.src[0] = (low & 0x3F) << 1
    if low >> 17 & 1:
        one.fields["imm"] = _signed(high & 0x1FFFFF, 21)
        if low >> 14 & 1:
            one.src[1] = high >> 25
    else:
        one.src[1] = high >> 25 if low >> 14 & 1 else high & 0x7F
    return one


def _ds(low: int, high: int) -> Decoded:
    one = _named(tables.DS, low >> 17 & 0xFF, 8)
    registers = AGPR if low >> 25 & 1 else VGPR
    one.src[:] = [
        (high & 0xFF) + VGPR, (high >> 8 & 0xFF) + registers, (high >> 16 & 0xFF) + registers
    ]  # fmt: skip
    one.fields.update(dst=(high >> 24) + registers, imm=low & 0xFFFF, extra=low >> 8 & 0xFF)
    one.known = one.known and not low >> 16 & 1  # GDS
    return one


def _flat(low: int, high: int) -> Decoded:
    opcode, segment = low >> 18 & 0x7F, low >> 14 & 3
    if segment == 3:
        return Decoded(size=8, known=False)
    if segment == 1:
        one = _named(tables.SCRATCH, opcode, 8)
    else:
        one = _named(tables.GLOBAL, opcode, 8)
        if segment == 0 and one.known:
            one.name = one.name.replace("global_", "flat_")
    registers = AGPR if high >> 23 & 1 else VGPR
    saddr = high >> 16 & 0x7F
    one.src[:] = [
        (high & 0xFF) + VGPR, (high >> 8 & 0xFF) + registers, NONE if saddr == NO_SADDR else saddr
    ]  # fmt: skip
    offset = low & 0x1FFF
    one.fields.update(
        dst=(high >> 24) + registers,
        imm=_signed(offset, 13) if segment else offset & 0xFFF,
        glc=low >> 16 & 1,
        offen=low >> 13 & 1 if segment == 1 else 0,
    )
    if segment == 0:
        one.src[2] = NONE
    return one


def _mubuf(low: int, high: int) -> Decoded:
    one = _named(tables.MUBUF, low >> 18 & 0x7F, 8)
    if one.name in ("buffer_wbl2", "buffer_inv"):
        one.fields.update(sc1=low >> 15 & 1)
        return one
    data = (high >> 8 & 0xFF) + (AGPR if high >> 23 & 1 else VGPR)
    one.src[:] = [(high & 0xFF) + VGPR, data, high >> 24]
    one.fields.update(
        dst=data, sdst=(high >> 16 & 0x1F) << 2, imm=low & 0xFFF, offen=low >> 12 & 1,
        idxen=low >> 13 & 1, glc=low >> 14 & 1, lds=low >> 16 & 1,
    )  # fmt: skip
    return one
