"""The operands of a gfx942 instruction: their codes, how many registers each has, their names.

Widths follow from the mnemonic; the tests compare them with LLVM's assembler.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

VCC, M0, EXEC, LITERAL, VGPR, AGPR, NONE = 106, 124, 126, 255, 256, 512, 0xFFFF
VOP3P = 0b110100111  # the upper 9 bits of its first dword
CONSTANTS = 128  # operand codes from here to VGPR are constants
MASK_IN = frozenset(("v_cndmask_b32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"))

_MFMA = re.compile(r"v_mfma_\w32_(\d+)x(\d+)x(\d+)_(?:(\d+)b_)?(\w+)")
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
# Dwords of the destination and of each source, where not all are the width of the last type.
_WIDTHS = {
    "v_mad_u64_u32": (2, 1, 1, 2), "v_mad_i64_i32": (2, 1, 1, 2), "v_ldexp_f64": (2, 2, 1, 1),
    "v_lshlrev_b64": (2, 1, 2, 1), "v_lshrrev_b64": (2, 1, 2, 1), "v_ashrrev_i64": (2, 1, 2, 1),
    "v_lshl_add_u64": (2, 2, 1, 2), "v_frexp_mant_f64": (2, 2, 1, 1),
    "v_frexp_exp_i32_f64": (1, 2, 1, 1), "v_cmp_class_f64": (2, 2, 1, 1),
    "v_cmpx_class_f64": (2, 2, 1, 1), "v_cvt_pk_f32_fp8": (2, 1, 1, 1),
    "v_cvt_pk_f32_bf8": (2, 1, 1, 1), "v_pk_fma_f32": (2, 2, 2, 2), "v_pk_mul_f32": (2, 2, 2, 1),
    "v_pk_add_f32": (2, 2, 2, 1), "v_pk_mov_b32": (2, 2, 2, 1),
}  # fmt: skip
_ONE_DWORD_SOURCES = ("s_bfm_b64", "s_bitset", "s_bitreplicate")
_COUNTED = ("s_lsh", "s_ashr", "s_bfe", "s_bitcmp")  # the second source is a count, one dword
_SPECIAL = {106: "vcc", 107: "vcc_hi", 102: "flat_scratch", 104: "xnack_mask", 126: "exec"}
_NAMES = {
    102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi",
    106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi",
    235: "src_shared_base", 236: "src_shared_limit", 237: "src_private_base",
    238: "src_private_limit", 251: "src_vccz", 252: "src_execz", 253: "src_scc",
}  # fmt: skip
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494")


@dataclass
class Decoded:
    """One instruction during decoding. Operand codes are those of core.h (AGPRs from 512 on).
    ``illegal`` says why the ISA has no such instruction."""

    name: str = ""
    size: int = 4
    src: list[int] = field(default_factory=lambda: [NONE, NONE, NONE])
    fields: dict[str, int] = field(default_factory=dict)
    known: bool = True
    illegal: str = ""


def register_name(code: int, dwords: int = 1) -> str:
    """Return an operand as the disassembler writes it: ``v12``, ``a[0:15]``, ``vcc``, ``-16``."""
    for first, letter in ((AGPR, "a"), (VGPR, "v")):
        if code >= first:
            return _tuple(letter, code - first, dwords)
    if code < 102:
        return _tuple("s", code, dwords)
    if 108 <= code < M0:
        return _tuple("ttmp", code - 108, dwords)
    if dwords == 2 and code in _SPECIAL:
        return _SPECIAL[code]
    if CONSTANTS <= code <= 192:
        return str(code - CONSTANTS)
    if 193 <= code <= 208:
        return str(192 - code)
    if 240 <= code <= 248:
        return _FLOATS[code - 240]
    return _NAMES.get(code, f"src{code}")


def _tuple(letter: str, first: int, dwords: int) -> str:
    return f"{letter}[{first}:{first + dwords - 1}]" if dwords > 1 else f"{letter}{first}"


def widths_of(one: Decoded) -> tuple[int, int, int, int, int]:
    """Return how many dwords the destination, the scalar destination and the three sources have; 0
    where the instruction does not use the field."""
    fields = one.fields
    return _widths(
        one.name,
        one.src[2] != NONE,
        fields.get("offen", 0) + fields.get("idxen", 0),
        bool(fields.get("glc", 0)),
        bool(fields.get("lds", 0)),
    )


@functools.cache
def _widths(
    name: str, third: bool, addresses: int, glc: bool, lds: bool
) -> tuple[int, int, int, int, int]:
    if name.startswith("v_mfma"):
        held, whole = matrix_dwords(name)
        return whole, 0, held, held, whole
    if name.startswith("v_"):
        to, a, b, c = vector_dwords(name)
        return to, 2, a, b, 2 if name in MASK_IN else c
    if name.startswith("ds_"):
        return _lds(name)
    if name in ("buffer_wbl2", "buffer_inv"):
        return 0, 0, 0, 0, 0
    if name.startswith(("buffer_", "scratch_", "global_", "flat_")):
        direct = lds or "load_lds" in name
        data, load = 0 if direct else memory_dwords(name), "_load_" in name
        if name.startswith("buffer_"):
            return 0, 4, addresses, data, 1
        returns = glc and "_atomic_" in name  # of a store, the bit is a part of its scope
        back = data if load else (data // 2 if "cmpswap" in name else data) if returns else 0
        if name.startswith("scratch_"):
            return back, 0, addresses, 0 if load else data, 1
        return back, 0, 1 if third else 2, 0 if load else data, 2
    if name.startswith("s_dcache"):
        return 0, 0, 0, 0, 0
    if name.startswith(("s_load", "s_buffer_load", "s_mem")):
        return scalar_load_dwords(name), 0, 4 if "buffer" in name else 2, 1, 0
    to, a, b = _scalar_dwords(name)
    return to, 0, a, b, 0


@functools.cache
def matrix_dwords(name: str) -> tuple[int, int]:
    """Return how many registers A has in one lane (B has as many), and how many C has (D has as
    many)."""
    found = _MFMA.fullmatch(name)
    assert found, name
    rows, columns, depth, blocks = (int(group or 1) for group in found.groups()[:4])
    size = _ELEMENT_BYTES.get(found[5], 1)  # the others are pairs of float8 types
    return rows * depth * blocks * size // 256, rows * columns * blocks // 64


@functools.cache
def vector_dwords(name: str) -> tuple[int, int, int, int]:
    """Return how many registers the destination and the three sources of a VALU instruction
    have."""
    if name in _WIDTHS:
        return _WIDTHS[name]
    types = re.findall(r"_([biuf]\d+)(?=_|$)", name)
    wide = [2 if kind.endswith("64") else 1 for kind in types] or [1]
    if name.startswith("v_cvt"):
        return wide[0], wide[-1], 1, 1
    return wide[-1], wide[-1], wide[-1], wide[-1]


def _lds(name: str) -> tuple[int, int, int, int, int]:
    if name == "ds_nop":
        return 0, 0, 0, 0, 0
    if "permute" in name:
        return 1, 0, 1, 1, 0
    dwords = lds_dwords(name)
    if name.startswith(("ds_read", "ds_swizzle")):
        return dwords * (2 if "read2" in name else 1), 0, 1, 0, 0
    second = dwords if "write2" in name or "cmpst" in name else 0
    return dwords if "_rtn" in name else 0, 0, 1, dwords, second


def lds_dwords(name: str) -> int:
    """Return how many registers one element of a DS instruction has in one lane."""
    width = re.search(r"(\d+)$", name.replace("_d16_hi", "").replace("_d16", ""))
    assert width, name
    return max(1, int(width[1]) // 32)


def memory_dwords(name: str) -> int:
    """Return how many data registers a VMEM instruction has in one lane."""
    found = re.search(r"dwordx(\d)", name)
    if found:
        return int(found[1])
    wide = name.endswith(("_x2", "_f64"))
    return (2 if wide else 1) * (2 if "cmpswap" in name else 1)


def scalar_load_dwords(name: str) -> int:
    """Return how many registers a scalar load or ``s_memtime`` writes."""
    return int(re.sub(r"\D", "", name.rpartition("dword")[2]) or 2 - ("dword" in name))


def _scalar_dwords(name: str) -> tuple[int, int, int]:
    """Return the registers of the destination and of the two sources of a SALU instruction."""
    types = re.findall(r"_[biu](\d+)", name)
    wide = [2 if kind == "64" else 1 for kind in types] or [1]
    source = 1 if name.startswith(_ONE_DWORD_SOURCES) else wide[-1]
    return wide[0], source, 1 if name.startswith(_COUNTED) else source
