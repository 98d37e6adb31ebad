"""The gate for wait states: its table, the paths it follows, and faults planted in real kernels."""

from __future__ import annotations

import itertools
from io import BytesIO

import pytest
from assembly import assemble
from elftools.elf.elffile import ELFFile

from pyfa import codeobject
from pyfa.backends.hip import code, compiler
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.emulator import decode, hazards, native
from pyfa.emulator.operands import M0, Decoded
from pyfa.plan import Plan

FAR = "s_nop 15\ns_nop 7\n"  # more than any pair needs
# Two instructions and the wait states between them; by hand from the table that SOURCE names.
PAIRS = [
    # A product of 8 passes (32 x 32 x 8), of 4 (16 x 16 x 16), of 2 (4 x 4 x 4), of 16 (float32).
    ("v_mfma_f32_32x32x8_f16 v[32:47], v[0:1], v[2:3], 0", "v_add_f32 v9, v47, v8", 11),
    ("v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], 0", "v_accvgpr_read_b32 v9, a15", 11),
    ("v_mfma_f32_16x16x16_f16 v[32:35], v[0:1], v[2:3], 0", "v_add_f32 v32, v9, v8", 7),
    ("v_mfma_f32_4x4x4_16b_f16 v[32:35], v[0:1], v[2:3], 0", "v_exp_f32 v9, v32", 5),
    ("v_mfma_f32_32x32x2_f32 v[32:47], v0, v2, 0", "v_add_f32 v9, v47, v8", 18),
    ("v_mfma_f32_32x32x16_fp8_fp8 v[32:47], v[0:1], v[2:3], 0",
     "global_store_dword v9, v40, s[2:3]", 11),
    ("v_mfma_f32_16x16x16_bf16 v[32:35], v[0:1], v[2:3], 0", "ds_read_b32 v33, v9", 7),
    ("v_mfma_f32_32x32x8_f16 v[32:47], v[0:1], v[2:3], 0",
     "v_mfma_f32_32x32x8_f16 v[48:63], v[46:47], v[2:3], 0", 11),
    ("v_mfma_f32_32x32x2_f32 v[32:47], v0, v2, 0",
     "v_mfma_f32_32x32x8_f16 v[48:63], v[46:47], v[2:3], 0", 18),
    ("v_mfma_f32_16x16x16_f16 v[32:35], v[0:1], v[2:3], 0",
     "v_mfma_f32_32x32x8_f16 v[48:63], v[4:5], v[2:3], v[32:47]", 5),
    ("v_mfma_f32_16x16x4_f32 v[32:35], v0, v2, 0",
     "v_mfma_f32_32x32x2_f32 v[48:63], v4, v2, v[32:47]", 8),
    ("v_mfma_f32_16x16x4_f32 v[32:35], v0, v2, 0",
     "v_mfma_f32_32x32x8_f16 v[48:63], v[4:5], v[2:3], v[32:47]", 0),
    ("v_mfma_f32_32x32x8_f16 v[32:47], v[0:1], v[2:3], 0",
     "v_mfma_f32_32x32x8_f16 v[32:47], v[4:5], v[2:3], v[32:47]", 0),
    ("v_mfma_f32_4x4x4_16b_f16 v[32:35], v[0:1], v[2:3], 0",
     "v_mfma_f32_4x4x4_16b_f16 v[32:35], v[4:5], v[2:3], v[32:35]", 2),
    ("v_mfma_f32_32x32x8_f16 v[48:63], v[0:1], v[2:3], v[32:47]", "v_mov_b32 v40, 0", 7),
    ("v_mfma_f32_32x32x8_f16 v[48:63], v[0:1], v[2:3], v[32:47]", "ds_read_b32 v40, v9", 7),
    ("v_mfma_f32_32x32x2_f32 v[48:63], v0, v2, v[32:47]", "v_mov_b32 v40, 0", 0),
    ("v_mfma_f32_32x32x8_f16 v[48:63], v[0:1], v[2:3], 0", "v_mov_b32 v1, 0", 0),
    ("v_mov_b32 v1, 0", "v_mfma_f32_32x32x8_f16 v[48:63], v[0:1], v[2:3], 0", 2),
    ("v_accvgpr_write_b32 a7, v8", "v_mfma_f32_16x16x16_f16 a[4:7], v[0:1], v[2:3], a[4:7]", 2),
    ("v_cmpx_lt_f32 vcc, v0, v1", "v_mfma_f32_32x32x8_f16 v[48:63], v[4:5], v[2:3], 0", 4),
    ("v_dot2_f32_f16 v8, v0, v1, v8", "v_add_f32 v9, v8, v7", 3),
    ("v_readfirstlane_b32 s9, v0", "buffer_load_dword v1, v2, s[8:11], 0 offen", 5),
    ("v_readfirstlane_b32 s5, v0", "buffer_load_dword v2, s[8:11], s5 offen lds", 5),
    ("v_readlane_b32 s3, v0, 1", "global_load_dword v1, v2, s[2:3]", 5),
    ("v_cmpx_lt_f32 vcc, v0, v1", "global_load_dword v1, v[2:3], off", 5),
    ("v_cmp_lt_f32 s[4:5], v0, v1", "v_cndmask_b32_e64 v8, v2, v3, s[4:5]", 2),
    ("v_cmp_lt_f32 vcc, v0, v1", "v_cndmask_b32 v8, v2, v3, vcc", 2),
    ("v_add_co_u32 v8, vcc, v0, v1", "v_addc_co_u32 v9, vcc, v2, v3, vcc", 2),
    ("v_readfirstlane_b32 s5, v0", "v_mul_f32 v8, s5, v3", 2),
    ("v_readfirstlane_b32 s5, v0", "s_add_u32 s6, s5, 1", 0),
    ("v_readfirstlane_b32 s5, v0", "v_readlane_b32 s6, v1, s5", 4),
    ("v_readfirstlane_b32 s5, v0", "v_writelane_b32 v1, 7, s5", 4),
    ("v_cmpx_lt_f32 vcc, v0, v1", "v_readfirstlane_b32 s6, v2", 4),
    ("v_mov_b32 v0, v1", "v_readfirstlane_b32 s6, v0", 1),
    ("v_cmp_lt_f32 vcc, v0, v1", "v_div_fmas_f32 v8, v2, v3, v4", 4),
    ("v_mov_b32 v0, v1", "v_add_u32_dpp v8, v0, v2 quad_perm:[1,0,3,2] row_mask:0xf", 2),
    ("ds_read_b32 v0, v1", "v_mov_b32_dpp v8, v0 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    ("v_cmpx_lt_f32 vcc, v0, v1", "v_mov_b32_dpp v8, v2 row_shr:1 row_mask:0xf", 5),
    ("v_exp_f32 v0, v1", "v_add_f32 v2, v0, v3", 1),
    ("v_exp_f32 v0, v1", "v_log_f32 v2, v0", 0),
    ("v_rcp_f32 v0, v1", "buffer_load_dword v0, s[8:11], s5 offen lds", 1),
    ("v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32 v3, v0", 1),
    ("v_cvt_pk_fp8_f32 v0, v1, v2", "v_mov_b32 v3, v0", 0),
    ("v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE", "v_mov_b32 v0, 1", 1),
    ("global_store_dwordx4 v8, v[0:3], s[2:3]", "v_mov_b32 v3, 0", 2),
    ("global_store_dwordx2 v8, v[0:1], s[2:3]", "v_mov_b32 v1, 0", 0),
    ("buffer_store_dwordx4 v[0:3], v8, s[8:11], 0 offen", "v_mov_b32 v3, 0", 2),
    ("buffer_store_dwordx4 v[0:3], v8, s[8:11], s5 offen", "v_mov_b32 v3, 0", 0),
    ("s_mov_b32 m0, s4", "buffer_load_dword v2, s[8:11], s5 offen lds", 1),
    ("s_mov_b32 m0, s4", "global_load_lds_dword v[2:3], off", 1),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", "s_getreg_b32 s4, hwreg(HW_REG_MODE)", 2),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", "s_getreg_b32 s4, hwreg(HW_REG_HW_ID)", 0),
    ("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s3", "s_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s3", 2),
    ("v_cmp_lt_f32 vcc, v0, v1", "v_mov_b32 v8, src_vccz", 5),
    ("v_cmpx_lt_f32 s[4:5], v0, v1", "v_mov_b32 v8, src_execz", 5),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if compiler.why_unavailable():
        pytest.skip("no assembler")


def wait(states: int) -> str:
    return "s_nop 7\n" * (states // 8) + (f"s_nop {states % 8 - 1}\n" if states % 8 else "")


def test_every_row_of_the_table() -> None:
    """One state too few is found, with what is needed; as many as are needed are not."""
    close = "".join(f"{a}\n{wait(need - 1)}{b}\n{FAR}" for a, b, need in PAIRS if need)
    found = hazards.check(assemble(close))
    assert [(one.need, one.have) for one in found] == [(n, n - 1) for *_, n in PAIRS if n]
    assert {one.what for one in found} == {rule.what for rule in hazards.RULES}
    far = "".join(f"{a}\n{wait(need)}{b}\n{FAR}" for a, b, need in PAIRS)
    assert hazards.check(assemble(far)) == []


PRODUCT = "v_mfma_f32_16x16x16_f16 v[32:35], v[0:1], v[2:3], 0\n"  # 7 states until it is read
READ = "v_add_f32 v9, v32, v8\n"


@pytest.mark.parametrize(
    ("body", "have"),
    [
        (f"{PRODUCT}s_nop 5\n{READ}", [6]),
        (f"{PRODUCT}s_waitcnt 0\ns_nop 5\n{READ}", []),
        # A branch is a state, and so is each instruction on the way.
        (f"{PRODUCT}s_branch there\ns_nop 15\nthere: s_nop 4\n{READ}", [6]),
        # What lies between in the text and not on the way.
        (f"{PRODUCT}s_cbranch_scc0 there\ns_endpgm\n{READ}there: s_nop 5\n", []),
        # The shorter of two ways, whichever is looked at first: the compiler's recognizer looks
        # at a block once and misses the second.
        (f"{PRODUCT}s_cbranch_scc0 other\ns_nop 15\ns_branch there\nother: s_nop 2\n"
         f"there: s_nop 0\n{READ}", [5]),
        (f"{PRODUCT}s_cbranch_scc0 other\ns_nop 2\ns_branch there\nother: s_nop 15\n"
         f"there: s_nop 0\n{READ}", [6]),
        # Round a loop, backwards.
        (f"s_branch begin\nagain: {READ}begin: s_nop 15\n{PRODUCT}s_nop 3\n"
         "s_cbranch_scc1 again\n", [5]),
        # The nearest writer counts: a VALU write hides the one before it.
        ("v_cmp_lt_f32 vcc, v0, v1\nv_cmp_gt_f32 vcc, v0, v1\ns_nop 0\n"
         "v_cndmask_b32 v8, v2, v3, vcc\n", [1]),
        # A far jump, as the compiler writes one.
        (f"{PRODUCT}s_getpc_b64 s[4:5]\nafter: s_add_u32 s4, s4, (there-after)&4294967295\n"
         f"s_addc_u32 s5, s5, (there-after)>>32\ns_setpc_b64 s[4:5]\ns_nop 15\n"
         f"there: s_nop 1\n{READ}", [6]),
    ],
)  # fmt: skip
def test_every_way_is_followed(body: str, have: list[int]) -> None:
    assert [one.have for one in hazards.check(assemble(body))] == have


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v_mfma_f64_4x4x4_4b_f64 v[0:1], v[2:3], v[4:5], 0", "is not decoded"),
        ("s_setpc_b64 s[4:5]", "cannot be followed"),
        ("s_nop 0\ns_nop 0\ns_nop 0\ns_setpc_b64 s[4:5]", "cannot be followed"),
        ("s_swappc_b64 s[4:5], s[6:7]", "calls another function"),
        ("s_branch 0x4000", "cannot be followed"),
    ],
)
def test_what_cannot_be_judged_is_a_finding(body: str, expected: str) -> None:
    (found,) = hazards.check(assemble(body))
    assert expected in str(found)


def test_a_finding_names_the_place() -> None:
    (found,) = hazards.check(assemble(f"{PRODUCT}s_nop 5\n{READ}"))
    text = str(found)
    assert text.startswith(f"test at 0x{found.second:x}: v_add_f32 comes 6 wait states after ")
    assert f"v_mfma_f32_16x16x16_f16 at 0x{found.first:x} and needs 7: a matrix" in text


# ---- planted faults ------------------------------------------------------------------------------

SAMPLE = [
    next(plan for plan in catalog.common_plans(TARGET, "gfx942")
         if plan.kernel == f"hip/{kernel}.hip" and wanted.items() <= dict(plan.constants).items())
    for kernel, wanted in (
        ("attn_fwd", {"HEAD_DIM": 64, "DTYPE": 0}),
        ("attn_fwd", {"HEAD_DIM": 128, "DTYPE": 1, "SCORE": 1}),
        ("attn_bwd", {"HEAD_DIM": 64, "DTYPE": 1}),
        ("attn_decode", {"HEAD_DIM": 64, "DTYPE": 0, "TILES": 4}),
    )
]  # fmt: skip


def instructions(data: bytes) -> list[tuple[int, int, Decoded]]:
    """Address, place in the file and meaning of each."""
    parsed = codeobject.parse(data)
    section = ELFFile(BytesIO(data)).get_section_by_name(".text")
    moved = section["sh_offset"] - section["sh_addr"]
    found = []
    for function in parsed.functions:
        at = function.address
        while at < function.address + function.code_bytes:
            low, high = (
                int.from_bytes(parsed.image[at + n : at + n + 4], "little") for n in (0, 4)
            )
            one = decode.decode(low, high)
            found.append((at, at + moved, one))
            at += one.size
    return found


@pytest.mark.parametrize("plan", SAMPLE, ids=str)
def test_each_nop_that_is_shortened_is_found(plan: Plan) -> None:
    """Of the compiler's, which has none too many: a finding spans each, and each finding one. A nop
    may stand between two pairs of instructions."""
    if native.why_unavailable() or code.why_unavailable():
        pytest.skip("no compiler for the kernels")
    data = bytearray(code.load(plan, "gfx942").data)
    assert hazards.check(bytes(data)) == []
    shortened = []
    for at, place, one in instructions(bytes(data)):
        if one.name == "s_nop" and one.fields["imm"]:
            data[place] -= 1
            shortened.append(at)
    assert shortened
    found = hazards.check(bytes(data))
    for at in shortened:
        assert any((one.first or 0) < at < one.second for one in found), hex(at)
    for one in found:
        assert any((one.first or 0) < at < one.second for at in shortened), one
    assert all(one.have == one.need - 1 for one in found)


@pytest.mark.parametrize("plan", SAMPLE[:2], ids=str)
def test_a_nop_after_m0_that_is_missing_is_found(plan: Plan) -> None:
    """Of inline assembly: its s_mov and its s_nop change places."""
    if native.why_unavailable() or code.why_unavailable():
        pytest.skip("no compiler for the kernels")
    data = bytearray(code.load(plan, "gfx942").data)
    lines = instructions(bytes(data))
    moved = 0
    for (_, place, one), (_, behind, after) in itertools.pairwise(lines):
        if one.fields.get("dst") == M0 and after.name == "s_nop":
            data[place : place + 4], data[behind : behind + 4] = (
                data[behind : behind + 4], data[place : place + 4]
            )  # fmt: skip
            moved += 1
    assert moved > 4
    found = hazards.check(bytes(data))
    assert len(found) == moved
    assert {one.what for one in found} == {"a scalar instruction writes M0 before it is used"}
