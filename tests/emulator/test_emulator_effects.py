"""What instructions are said to read and write, held to LLVM's assembler.

It takes an operand only as wide as the instruction has it, so that each mnemonic is assembled with
the widths that ``effects`` gives, then decoded again: the registers must be those of the text.
"""

from __future__ import annotations

import re

import pytest
from assembly import assemble

from pyfa import codeobject
from pyfa.emulator import decode, effects, tables
from pyfa.emulator.effects import EXEC_BITS, M0_BIT, VCC_BITS, Effects
from pyfa.emulator.operands import VGPR, matrix_dwords, memory_dwords, vector_dwords

DST, SRC = 8, (16, 24, 32)  # the first registers of operands; a matrix instruction's lie elsewhere


def registers(first: int, count: int, letter: str = "v") -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


def named(text: str) -> int:
    """The bits of all registers in a text."""
    bits = 0
    for letter, first, last in re.findall(r"\b([vas])\[?(\d+)(?::(\d+))?", text):
        start = {"s": 0, "v": VGPR, "a": decode.AGPR}[letter] + int(first)
        bits |= effects.registers(start, int(last or first) - int(first) + 1)
    for name, more in (("vcc", VCC_BITS), ("exec", EXEC_BITS), ("m0", M0_BIT)):
        bits |= more if re.search(rf"\b{name}\b", text) else 0
    return bits


# Text with {} for none of the widths, what it writes, what it reads besides.
SPECIAL = {
    "v_nop": ("v_nop", ""),
    "v_readfirstlane_b32": ("v_readfirstlane_b32 s4, v16", "s4"),
    "v_readlane_b32": ("v_readlane_b32 s4, v16, s5", "s4"),
    "v_writelane_b32": ("v_writelane_b32 v8, 7, s5", "v8"),
    "v_swap_b32": ("v_swap_b32 v8, v16", "v8 v16"),
    "v_accvgpr_read_b32": ("v_accvgpr_read_b32 v8, a16", "v8"),
    "v_accvgpr_write_b32": ("v_accvgpr_write_b32 a8, v16", "a8"),
    "v_accvgpr_mov_b32": ("v_accvgpr_mov_b32 a8, a16", "a8"),
    "v_cndmask_b32": ("v_cndmask_b32_e64 v8, v16, v24, s[10:11]", "v8"),
    "v_fmamk_f32": ("v_fmamk_f32 v8, v16, 0x1234, v24", "v8"),
    "v_fmaak_f32": ("v_fmaak_f32 v8, v16, v24, 0x1234", "v8"),
    **{
        f"v_{n}_co_u32": (f"v_{n}_co_u32_e64 v8, s[12:13], v16, v24{more}", "v8 s[12:13]")
        for n, more in (("add", ""), ("sub", ""), ("subrev", ""), ("addc", ", s[10:11]"),
                        ("subb", ", s[10:11]"), ("subbrev", ", s[10:11]"))
    },
    **{
        f"v_mad_{n}": (f"v_mad_{n} v[8:9], s[12:13], v16, v24, v[32:33]", "v[8:9] s[12:13]")
        for n in ("u64_u32", "i64_i32")
    },
}  # fmt: skip
READS_BACK = {
    "v_writelane_b32": "v8",
    "v_swap_b32": "v8 v16",
    **dict.fromkeys(("v_fmac_f32", "v_pk_fmac_f16", "v_dot2c_f32_f16", "v_dot4c_i32_i8"), "v8"),
    "v_fmac_f64": "v[8:9]",
    "v_div_fmas_f32": "vcc",
    "v_div_fmas_f64": "vcc",
}


def vector(name: str, sources: int) -> tuple[str, str]:
    if name in SPECIAL:
        return SPECIAL[name]
    to, *widths = vector_dwords(name)
    operands = [registers(SRC[n], widths[n]) for n in range(sources)]
    written = registers(DST, to)
    if name.startswith("v_cmp"):
        written = "s[12:13]"
        return f"{name}_e64 {', '.join([written, *operands])}", (
            written + (" exec" if name.startswith("v_cmpx") else "")
        )
    if name.startswith("v_div_scale"):  # its first source is one of the others
        operands[0] = operands[1]
        return f"{name} {', '.join([written, 'vcc', *operands])}", f"{written} vcc"
    return f"{name} {', '.join([written, *operands])}", written


def vectors() -> dict[str, tuple[str, str]]:
    found = {}
    for table, sources in ((tables.VOP1, 1), (tables.VOPC, 2), (tables.VOP2, 2)):
        found |= {name: vector(name, sources) for name in table.values()}
    for opcode, name in tables.VOP3.items():
        found[name] = vector(name, 2 if opcode >= 640 else 3)
    for name in tables.VOP3P.values():
        if name.startswith("v_mfma"):
            held, whole = matrix_dwords(name)
            a, b, c = registers(64, held), registers(72, held, "a"), registers(128, whole)
            to = registers(192, whole)
            found[name] = f"{name} {to}, {a}, {b}, {c}", to
        else:
            three = any(word in name for word in ("fma", "mad", "dot"))
            found[name] = vector(name, 3 if three else 2)
    return found


def lds() -> dict[str, tuple[str, str]]:
    found = {}
    for name in tables.DS.values():
        found[name] = name, ""
        if name == "ds_nop":
            continue
        if "swizzle" in name:
            found[name] = f"{name} v8, v16 offset:1", "v8"
        elif "permute" in name:
            found[name] = f"{name} v8, v16, v24", "v8"
        else:
            bits = int(re.findall(r"\d+", re.sub(r"_d16(_hi)?$|2st64|read2|write2", "", name))[-1])
            width = max(1, bits // 32)
            to = registers(DST, width * (2 if "read2" in name else 1))
            data = [registers(SRC[n + 1], width) for n in range(2)]
            if "read" in name:
                found[name] = f"{name} {to}, v16", to
            else:
                pair = "write2" in name or "cmpst" in name
                operands = ["v16", *data[: 2 if pair else 1]]
                returns = "_rtn" in name
                text = ", ".join([to, *operands] if returns else operands)
                found[name] = f"{name} {text}", to if returns else ""
    return found


def memory() -> dict[str, tuple[str, str]]:
    """Each with a scalar base, and buffers with two address registers and a scalar offset."""
    found = {}
    for prefix, table in (
        ("buffer", tables.MUBUF),
        ("global", tables.GLOBAL),
        ("flat", tables.GLOBAL),
        ("scratch", tables.SCRATCH),
    ):
        for name in (entry.replace("global_", f"{prefix}_") for entry in table.values()):
            if name in ("buffer_wbl2", "buffer_inv"):
                found[name] = f"{name} sc1", ""
                continue
            if "load_lds" in name:
                if prefix == "global":
                    found[name] = f"{name} v16, s[20:21]", ""
                continue
            width = memory_dwords(name)
            data, to = registers(SRC[1], width), registers(DST, width)
            address = {"buffer": "v[16:17], s[20:23], s5 idxen offen", "global": "v16, s[20:21]",
                       "flat": "v[16:17]", "scratch": "v16, s5"}[prefix]  # fmt: skip
            if "_load_" in name:
                found[name] = f"{name} {to}, {address}", to
            elif prefix == "buffer":
                found[name] = f"{name} {data}, {address}", ""
            else:
                first, _, rest = address.partition(", ")
                text = ", ".join(part for part in (first, data, rest) if part)
                found[name] = f"{name} {text}", ""
    return found


def effects_in(texts: list[str]) -> list[Effects]:
    parsed = codeobject.parse(assemble("\n".join(texts)))
    (function,) = parsed.functions
    found, at = [], function.address
    for _ in texts:
        low, high = (int.from_bytes(parsed.image[at + n : at + n + 4], "little") for n in (0, 4))
        one = decode.decode(low, high)
        found.append(effects.effects_of(one))
        at += one.size
    return found


@pytest.mark.parametrize("cases", [vectors, lds, memory])
def test_registers_are_those_of_the_text(cases) -> None:  # type: ignore[no-untyped-def]
    wanted = cases()
    assert len(wanted) > 60
    for (name, (text, written)), found in zip(
        wanted.items(), effects_in([text for text, _ in wanted.values()]), strict=True
    ):
        assert re.sub("_e64$", "", found.name) == name
        after = text.partition(" ")[2]
        rest = after[len(written) :] if written and after.startswith(written) else after
        if name.startswith(("v_cmp", "v_div_scale")) or name in SPECIAL:
            rest = after[len(", ".join(written.removesuffix(" exec").split())) :]
        reads = named(rest) | named(READS_BACK.get(name, ""))
        if name.startswith(("buffer", "global", "flat", "scratch")):
            reads |= EXEC_BITS
        if "load_lds" in name:
            reads |= M0_BIT
        if "_d16" in name and ("ds_read" in name or "_load_" in name):
            reads |= named(written)
        assert found.writes == named(written), text
        assert found.reads == reads, text


def test_a_matrix_instruction_tells_its_operands_apart() -> None:
    (found,) = effects_in(["v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[16:31]"])
    assert (found.a_b, found.c) == (named("v[2:5]"), named("a[16:31]"))
    assert (found.writes, found.passes, found.xdl) == (named("a[0:15]"), 8, True)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("buffer_load_dword v1, s[8:11], s5 offen lds", {"kind": "lds_dma"}),
        ("global_store_dwordx3 v16, v[24:26], s[20:21]", {"store_data": "v[24:26]"}),
        ("global_store_dwordx2 v16, v[24:25], s[20:21]", {"store_data": ""}),
        ("buffer_store_dwordx4 v[24:27], v16, s[8:11], 0 offen", {"store_data": "v[24:27]"}),
        ("buffer_store_dwordx4 v[24:27], v16, s[8:11], s5 offen", {"store_data": ""}),
        ("global_atomic_cmpswap_x2 v[8:9], v16, v[24:27], s[20:21] sc0",
         {"store_data": "v[24:27]", "writes": "v[8:9]"}),
        ("v_add_u32_dpp v8, v16, v24 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf",
         {"dpp": True, "reads": "v8 v16 v24"}),
        ("v_add_u32_sdwa v8, v16, v24 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE",
         {"part": True, "reads": "v8 v16 v24"}),
        ("v_add_u32_sdwa v8, v16, v24 dst_sel:DWORD src0_sel:WORD_1",
         {"part": False, "reads": "v16 v24"}),
        ("v_cvt_pk_fp8_f32 v8, v16, v24 op_sel:[0,0,1]", {"part": True, "reads": "v8 v16 v24"}),
        ("v_cvt_pk_fp8_f32 v8, v16, v24", {"part": False, "reads": "v16 v24"}),
        ("v_exp_f32 v8, v16", {"trans": True}),
        ("s_mov_b32 m0, s5", {"kind": "salu", "writes": "m0"}),
        ("s_and_saveexec_b64 s[4:5], vcc", {"writes": "s[4:5] exec"}),
        ("s_cmpk_eq_i32 s4, 0x1234", {"writes": ""}),
        ("s_load_dwordx16 s[16:31], s[0:1], 0x0", {"kind": "smem", "writes": "s[16:31]"}),
        ("s_load_dword s16, s[0:1], 0x0", {"kind": "smem", "writes": "s16"}),
        ("s_memtime s[16:17]", {"kind": "smem", "writes": "s[16:17]"}),
        ("s_nop 6", {"states": 7}),
    ],
)  # fmt: skip
def test_one_at_a_time(text: str, facts: dict[str, object]) -> None:
    (found,) = effects_in([text])
    for name, value in facts.items():
        bits = isinstance(value, str) and name != "kind"
        assert getattr(found, name) == (named(value) if bits else value), name  # type: ignore[arg-type]
