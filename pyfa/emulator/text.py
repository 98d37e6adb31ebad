"""An instruction as LLVM's disassembler writes it, without the suffix of the encoding (``_e64``).

The messages of faults use this text to name an instruction and its operands.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyfa.emulator import tables
from pyfa.emulator.decode import ACCUMULATING, decode
from pyfa.emulator.legal import DPP, SDWA
from pyfa.emulator.operands import LITERAL, NONE, VOP3P, Decoded, register_name, widths_of

_SELECTIONS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_OMOD = ("", " mul:2", " mul:4", " div:2")
_ROWS = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
_ALONE = {
    0x130: "wave_shl:1", 0x134: "wave_rol:1", 0x138: "wave_shr:1", 0x13C: "wave_ror:1",
    0x140: "row_mirror", 0x141: "row_half_mirror", 0x142: "row_bcast:15", 0x143: "row_bcast:31",
}  # fmt: skip
_HARDWARE = {1: "HW_REG_MODE", 2: "HW_REG_STATUS", 3: "HW_REG_TRAPSTS", 4: "HW_REG_HW_ID",
             20: "HW_REG_XCC_ID"}  # fmt: skip


def text_of(low: int, high: int) -> str:
    """Return the text of the instruction that begins with these two dwords."""
    one = decode(low, high)
    if one.illegal:
        return f"(illegal {one.name}: {one.illegal})"
    if not one.known:
        return f"(unknown 0x{low:08x})"
    name = one.name
    if name.startswith("v_"):
        operands = _vector(one, low, high)
    elif name.startswith("ds_"):
        operands = _lds(one)
    elif name.startswith("buffer_"):
        operands = _buffer(one, low)
    elif name.startswith(("global_", "flat_", "scratch_")):
        operands = _memory(one, low)
    else:
        operands = _scalar(one, low, high)
    return f"{name} {operands}".strip()


def _names(one: Decoded) -> tuple[str, str, list[str]]:
    """Return the names of the destination, the scalar destination and the sources."""
    to, pair, *widths = widths_of(one)
    given = [
        register_name(code, dwords) if code != LITERAL else f"0x{one.fields['literal']:x}"
        for code, dwords in zip(one.src, widths, strict=True)
    ]
    dst, sdst = one.fields.get("dst", NONE), one.fields.get("sdst", NONE)
    return register_name(dst, to), register_name(sdst, pair), given


def _vector(one: Decoded, low: int, high: int) -> str:
    name, fields = one.name, one.fields
    if name == "v_nop":
        return ""
    dst, sdst, given = _names(one)
    mode, short = fields.get("mode", 0), low >> 31 == 0
    if name.startswith("v_mfma"):
        extra = ((fields["extra"] & 7, "cbsz"), (fields["extra"] >> 3 & 15, "abid"),
                 (fields["extra"] >> 7, "blgp"))  # fmt: skip
        return ", ".join([dst, *given]) + "".join(f" {key}:{n}" for n, key in extra if n)
    sources = [source for code, source in zip(one.src, given, strict=True) if code != NONE]
    if name in ACCUMULATING:
        sources.pop()
    packed = not short and low >> 23 == VOP3P
    if not packed:
        sources = [_modified(source, fields, n) for n, source in enumerate(sources)]
    if mode == SDWA:
        signs = (high >> 19 & 1, high >> 27 & 1, 0)
        sources = [f"sext({s})" if sign else s for s, sign in zip(sources, signs, strict=False)]
    written = [dst] if "dst" in fields else []
    if "sdst" in fields:
        written.append(sdst)
    shown = ", ".join([*written, *sources])
    if packed:
        shown += _packed(one, len(sources))
    elif fields.get("opsel"):
        # In the assembler's form: a bit for each source, then the bit of the destination.
        bits = [fields["opsel"] >> n & 1 for n in range(len(sources))] + [fields["opsel"] >> 3]
        shown += f" op_sel:[{','.join(map(str, bits))}]"
    if fields.get("clamp"):
        shown += " clamp"
    shown += _OMOD[fields.get("omod", 0)]
    if mode == DPP:
        shown += _dpp(high)
    if mode == SDWA:
        shown += _sdwa(one, high)
    return shown


def _modified(source: str, fields: dict[str, int], number: int) -> str:
    if fields.get("abs", 0) >> number & 1:
        source = f"|{source}|"
    return f"-{source}" if fields.get("neg", 0) >> number & 1 else source


def _packed(one: Decoded, sources: int) -> str:
    shown = ""
    if one.name.startswith("v_accvgpr"):
        return shown
    mixed = one.name.startswith("v_fma_mix")
    for key, field, default in (("op_sel", "opsel", 0), ("op_sel_hi", "opsel_hi", not mixed),
                                ("neg_lo", "neg", 0), ("neg_hi", "neg_hi", 0)):  # fmt: skip
        bits = [one.fields[field] >> n & 1 for n in range(sources)]
        if any(bit != default for bit in bits):
            shown += f" {key}:[{','.join(map(str, bits))}]"
    return shown


def _dpp(extra: int) -> str:
    control = extra >> 8 & 0x1FF
    if control < 0x100:
        lanes = ",".join(str(control >> shift & 3) for shift in (0, 2, 4, 6))
        shown = f" quad_perm:[{lanes}]"
    else:
        shown = f" {_ALONE.get(control) or f'{_ROWS[control & 0x1F0]}:{control & 15}'}"
    shown += f" row_mask:0x{extra >> 28:x} bank_mask:0x{extra >> 24 & 15:x}"
    return shown + (" bound_ctrl:1" if extra >> 19 & 1 else "")


def _sdwa(one: Decoded, extra: int) -> str:
    shown = ""
    if "dst" in one.fields:
        shown += f" dst_sel:{_SELECTIONS[extra >> 8 & 7]} dst_unused:{_UNUSED[extra >> 11 & 3]}"
    shown += f" src0_sel:{_SELECTIONS[extra >> 16 & 7]}"
    return shown + (f" src1_sel:{_SELECTIONS[extra >> 24 & 7]}" if one.src[1] != NONE else "")


def _lds(one: Decoded) -> str:
    name, fields = one.name, one.fields
    if name == "ds_nop":
        return ""
    dst, _, given = _names(one)
    to, _, *used = widths_of(one)
    shown = [source for source, dwords in zip(given, used, strict=True) if dwords]
    offset = _number("offset", fields["imm"])
    if "2_" in name or "2st64" in name:
        offset = _number("offset0", fields["imm"] & 255) + _number("offset1", fields["extra"])
    return ", ".join([dst, *shown] if to else shown) + offset


def _number(key: str, value: int) -> str:
    return f" {key}:{value}" if value else ""


def _flags(low: int, bits: Iterable[tuple[int, str]]) -> str:
    return "".join(f" {name}" for bit, name in bits if low >> bit & 1)


def _buffer(one: Decoded, low: int) -> str:
    if one.name in ("buffer_wbl2", "buffer_inv"):
        return _flags(low, ((14, "sc0"), (17, "nt"), (15, "sc1"))).strip()
    fields = one.fields
    _, descriptor, (_, data, offset) = _names(one)
    addresses = widths_of(one)[2]
    address = register_name(one.src[0], addresses) if addresses else "off"
    shown = ", ".join([*([] if fields["lds"] else [data]), address, descriptor, offset])
    shown += _flags(low, ((13, "idxen"), (12, "offen"))) + _number("offset", fields["imm"])
    return shown + _flags(low, ((14, "sc0"), (17, "nt"), (15, "sc1"), (16, "lds")))


def _memory(one: Decoded, low: int) -> str:
    name, fields = one.name, one.fields
    dst, _, (address, data, base) = _names(one)
    to, _, addresses, stored, _ = widths_of(one)
    parts = [dst] if to else []
    parts.append(address if addresses else "off")
    if stored:
        parts.append(data)
    if not name.startswith("flat_"):
        parts.append("off" if one.src[2] == NONE else base)
    shown = ", ".join(parts) + _number("offset", fields["imm"])
    return shown + _flags(low, ((16, "sc0"), (17, "nt"), (25, "sc1")))


def _scalar(one: Decoded, low: int, high: int) -> str:
    name, fields = one.name, one.fields
    if low >> 23 == 0b101111111:
        return _control(name, fields["imm"] & 0xFFFF)
    if name.startswith("s_dcache"):
        return ""
    dst, _, given = _names(one)
    shown = [dst] if fields.get("dst", NONE) != NONE else []
    shown += [source for code, source in zip(one.src, given, strict=True) if code != NONE]
    if low >> 26 == 0b110000 and low >> 17 & 1:
        offset = fields["imm"]
        if one.src[1] != NONE:
            return ", ".join(shown) + (f" offset:0x{offset:x}" if offset else "")
        shown.append(f"0x{offset:x}" if offset >= 0 else f"-0x{-offset:x}")
    elif low >> 28 == 0b1011 and low >> 23 != 0b101111101 and name in _OF_SOPK:
        immediate = low & 0xFFFF
        if "reg_" not in name:
            shown.append(str(immediate) if name == "s_call_b64" else f"0x{immediate:x}")
        else:
            register = _HARDWARE.get(immediate & 63, str(immediate & 63))
            offset, size = immediate >> 6 & 31, (immediate >> 11) + 1
            part = f"{register}, {offset}, {size}" if (offset, size) != (0, 32) else register
            at = len(shown) if name == "s_getreg_b32" else 0
            shown.insert(at, f"hwreg({part})")
            if name == "s_setreg_imm32_b32":
                shown.append(f"0x{high:x}")
    return ", ".join(shown)


_OF_SOPK = frozenset(tables.SOPK.values())
_BARE = frozenset(("s_endpgm", "s_barrier", "s_icache_inv", "s_ttracedata"))


def _control(name: str, immediate: int) -> str:
    if name in _BARE:
        return ""
    if name != "s_waitcnt":
        return str(immediate)
    vm, lgkm = (immediate & 15) | (immediate >> 10 & 48), immediate >> 8 & 15
    exports = immediate >> 4 & 7
    counts = ((vm, 63, "vmcnt"), (exports, 7, "expcnt"), (lgkm, 15, "lgkmcnt"))
    shown = [f"{key}({n})" for n, most, key in counts if n != most]
    return " ".join(shown)
