"""Encodings with an opcode that are no instruction: not decoded, and rejected by the assembler."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from assembly import HEADER, assemble
from test_emulator_faults import assembled

from pyfa import codeobject
from pyfa.backends.hip import compiler
from pyfa.emulator import EmulatorError
from pyfa.emulator.decode import decode

DPP = "row_mask:0xf bank_mask:0xf"
SDWA = "dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD"
# An instruction; what changes of its two dwords; the same as text, where there is one; the reason.
CASES = [
    ("s_and_b64 s[4:5], s[6:7], s[8:9]", 1 << 16, 0, "s_and_b64 s[5:6], s[6:7], s[8:9]", "s[5:6]"),
    ("s_and_b64 s[4:5], s[6:7], s[8:9]", 1, 0, "s_and_b64 s[4:5], s[7:8], s[8:9]", "s[7:8]"),
    ("s_lshl_b64 s[4:5], s[6:7], s8", 1, 0, "s_lshl_b64 s[4:5], s[7:8], s8", "s[7:8]"),
    ("s_mov_b64 s[4:5], vcc", 106 ^ 124, 0, "s_mov_b64 s[4:5], m0", "m0"),
    ("s_load_dwordx2 s[4:5], s[0:1], 0x0", 1 << 6, 0, "s_load_dwordx2 s[5:6], s[0:1], 0x0",
     "s[5:6]"),
    ("s_load_dwordx4 s[4:7], s[0:1], 0x0", 1 << 7, 0, "s_load_dwordx4 s[6:9], s[0:1], 0x0",
     "s[6:9]"),
    ("s_load_dwordx4 s[96:99], s[0:1], 0x0", 4 << 6, 0, "s_load_dwordx4 s[100:103], s[0:1], 0x0",
     "4 registers from s100"),
    ("s_load_dwordx16 s[64:79], s[0:1], 0x0", 28 << 6, 0, "s_load_dwordx16 s[92:107], s[0:1], 0x0",
     "16 registers from s92"),
    ("s_buffer_load_dword s4, s[8:11], 0x0", 1, 0, "s_buffer_load_dword s4, s[10:13], 0x0",
     "s[10:13]"),
    ("buffer_load_dword v1, v2, s[96:99], 0 offen", 0, 1 << 16,
     "buffer_load_dword v1, v2, s[100:103], 0 offen", "4 registers from s100"),
    ("global_load_dword v1, v2, s[4:5]", 0, 1 << 16, "global_load_dword v1, v2, s[5:6]", "s[5:6]"),
    ("v_cmp_lt_f32_e64 s[4:5], v1, v2", 1, 0, "v_cmp_lt_f32_e64 s[5:6], v1, v2", "s[5:6]"),
    ("v_cmp_lt_f32_e64 s[4:5], v1, v2", 4 ^ 128, 0, "", "operand 128"),
    ("v_cndmask_b32_e64 v1, v2, v3, s[4:5]", 0, 1 << 18, "v_cndmask_b32_e64 v1, v2, v3, s[5:6]",
     "s[5:6]"),
    ("v_add_co_u32_e64 v1, s[4:5], v2, v3", 1 << 8, 0, "v_add_co_u32_e64 v1, s[5:6], v2, v3",
     "s[5:6]"),
    ("v_add_f64 v[2:3], s[4:5], v[6:7]", 0, 1, "v_add_f64 v[2:3], s[5:6], v[6:7]", "s[5:6]"),
    ("v_readfirstlane_b32 s4, v1", 132 << 17, 0, "", "operand 128"),
    ("v_add_f64 v[2:3], v[4:5], v[6:7]", 1, 0, "v_add_f64 v[3:4], v[4:5], v[6:7]", "v[3:4]"),
    ("v_lshl_add_u64 v[2:3], v[4:5], 1, v[6:7]", 0, 1 << 18,
     "v_lshl_add_u64 v[2:3], v[4:5], 1, v[7:8]", "v[7:8]"),
    ("global_load_dwordx4 v[4:7], v[2:3], off", 0, 1 << 24,
     "global_load_dwordx4 v[5:8], v[2:3], off", "v[5:8]"),
    ("global_load_dwordx4 v[252:255], v[2:3], off", 0, 2 << 24, "", "v[254:257]"),
    ("ds_read_b64 v[4:5], v1", 0, 1 << 24, "ds_read_b64 v[5:6], v1", "v[5:6]"),
    ("v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]", 0, 1,
     "v_mfma_f32_32x32x8_f16 a[0:15], v[3:4], v[4:5], a[0:15]", "v[3:4]"),
    ("v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]", 0, 8 << 18,
     "v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[8:23]", "overlaps"),
    ("v_add_f32_e64 v1, s2, v3", 0, (259 ^ 1) << 9,
     "v_add_f32_e64 v1, s2, s1", "at most one scalar"),
    ("v_addc_co_u32_e32 v1, vcc, v2, v3, vcc", 258 ^ 4, 0, "v_addc_co_u32_e32 v1, vcc, s4, v3, vcc",
     "at most one scalar"),
    ("v_fma_f32 v1, v2, v3, v4", 0, (260 ^ 255) << 18, "v_fma_f32 v1, v2, v3, 0x1234", "literal"),
    ("v_writelane_b32 v1, s2, 3", 0, 256, "v_writelane_b32 v1, v2, 3", "takes no v2"),
    (f"v_mov_b32_dpp v1, v2 row_shl:1 {DPP}", 0, 1 << 8, f"v_mov_b32_dpp v1, v2 row_shl:0 {DPP}",
     "control 0x100"),
    (f"v_mov_b32_dpp v1, v2 row_shr:1 {DPP}", 0, 1 << 8, f"v_mov_b32_dpp v1, v2 row_shr:0 {DPP}",
     "control 0x110"),
    (f"v_mov_b32_dpp v1, v2 row_ror:15 {DPP}", 0, 15 << 8, f"v_mov_b32_dpp v1, v2 row_ror:0 {DPP}",
     "control 0x120"),
    (f"v_mov_b32_dpp v1, v2 wave_shl:1 {DPP}", 0, 1 << 8, f"v_mov_b32_dpp v1, v2 wave_shl:2 {DPP}",
     "control 0x131"),
    (f"v_mov_b32_dpp v1, v2 row_bcast:15 {DPP}", 0, 6 << 8,
     f"v_mov_b32_dpp v1, v2 row_bcast:16 {DPP}", "control 0x144"),
    (f"v_mov_b32_dpp v1, v2 row_newbcast:15 {DPP}", 0, 0x30 << 8,
     f"v_mov_b32_dpp v1, v2 row_newbcast:16 {DPP}", "control 0x16f"),
    (f"v_mov_b64_dpp v[2:3], v[4:5] row_newbcast:1 {DPP}", 0, 0x40 << 8,
     f"v_mov_b64_dpp v[2:3], v[4:5] row_shr:1 {DPP}", "64 bits"),
    (f"v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 {SDWA}", 0, 2 << 8,
     f"v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_3 {SDWA}", "selection 7"),
    (f"v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 {SDWA}", 0, 3 << 11, "", "dst_unused 3"),
    ("v_add_f32_e64 v1, v2, v3", 1 << 11, 0, "v_add_f32_e64 v1, v2, v3 op_sel:[1,0,0]",
     "op_sel 0x1"),
    ("v_add_f16_e64 v1, v2, v3", 1 << 14, 0, "v_add_f16_e64 v1, v2, v3 op_sel:[0,0,1]",
     "op_sel 0x8"),
    ("v_add_i16 v1, v2, v3 op_sel:[1,0,1]", 1 << 13, 0, "", "op_sel 0x"),
    ("v_bfe_u32 v1, v2, v3, v4", 1 << 13, 0, "v_bfe_u32 v1, v2, v3, v4 op_sel:[0,0,1,0]",
     "op_sel 0x4"),
    ("v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]", 1 << 11, 0, "", "op_sel 0x"),
    ("v_pk_add_f16 v1, v2, v3", 1 << 13, 0, "", "op_sel 0x4"),
    ("v_dot2_f32_f16 v1, v2, v3, v4", 1 << 11, 0, "v_dot2_f32_f16 v1, v2, v3, v4 op_sel:[1,0,0]",
     "no op_sel"),
    ("v_dot4_i32_i8 v1, v2, v3, v4", 0, 1 << 27, "v_dot4_i32_i8 v1, v2, v3, v4 op_sel_hi:[0,1,1]",
     "no op_sel"),
]  # fmt: skip


def words(text: str) -> tuple[int, int]:
    parsed = codeobject.parse(assemble(text))
    at = parsed.functions[0].address
    low, high = (int.from_bytes(parsed.image[n : n + 4], "little") for n in (at, at + 4))
    return low, high


@pytest.fixture(scope="module")
def encodings() -> dict[str, tuple[int, int]]:
    """The dwords of each text, from one run of the assembler."""
    texts = list(dict.fromkeys(case[0] for case in CASES))
    parsed = codeobject.parse(assemble("\n".join(texts)))
    at, found = parsed.functions[0].address, {}
    for text in texts:
        low, high = (int.from_bytes(parsed.image[n : n + 4], "little") for n in (at, at + 4))
        found[text] = low, high
        at += decode(low, high).size
    return found


@pytest.mark.parametrize(("text", "low", "high", "changed", "why"), CASES)
def test_no_such_instruction(
    encodings: dict[str, tuple[int, int]], text: str, low: int, high: int, changed: str, why: str
) -> None:
    first, second = encodings[text]
    assert decode(first, second).known
    one = decode(first ^ low, second ^ high)
    assert not one.known
    assert why in one.illegal


def test_the_assembler_rejects_them_too(tmp_path: Path) -> None:
    texts = [case[3] for case in CASES if case[3]]
    body = "\n".join(texts)
    path = tmp_path / "t.s"
    path.write_text(HEADER.format(name="test", body=body, lds=0, scratch=0))
    command = [str(compiler.zig()), "clang", "-x", "assembler", "-target", "amdgcn-amd-amdhsa",
               "-mcpu=gfx942", "-c", str(path), "-o", str(tmp_path / "t.o")]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    lines = path.read_text().splitlines()
    rejected = {lines[int(line) - 1] for line in re.findall(r"t\.s:(\d+):\d+: error", told)}
    assert set(texts) - rejected == set()


def test_executing_one_is_an_error_that_says_why() -> None:
    low, high = words("v_add_f64 v[2:3], v[4:5], v[6:7]")
    with pytest.raises(EmulatorError, match="illegal v_add_f64: v\\[3:4\\] does not begin at") as e:
        assembled(f".long 0x{low ^ 1:x}, 0x{high:x}", np.zeros(1, np.float32))
    assert e.value.check == "unknown instruction"
