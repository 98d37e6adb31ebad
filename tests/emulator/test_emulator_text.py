"""Instructions as text: what the assembler was given comes back."""

from __future__ import annotations

import re

import numpy as np
import pytest
from assembly import assemble
from test_emulator_effects import lds, memory, vectors
from test_emulator_faults import assembled

from pyfa import codeobject
from pyfa.emulator import EmulatorError
from pyfa.emulator.decode import decode
from pyfa.emulator.text import text_of

MASKS = "row_mask:0xf bank_mask:0xa"
TEXTS = f"""
s_add_u32 s4, s5, 0x12345678
s_and_b64 s[4:5], vcc, exec
s_lshl_b64 s[4:5], s[6:7], s8
s_mov_b32 m0, -16
s_mov_b64 s[4:5], src_shared_base
s_bcnt1_i32_b64 s4, s[6:7]
s_bitreplicate_b64_b32 s[4:5], s6
s_getpc_b64 s[4:5]
s_setpc_b64 s[4:5]
s_swappc_b64 s[4:5], s[6:7]
s_cmp_eq_u64 s[4:5], 0
s_bitcmp1_b64 s[4:5], s6
s_movk_i32 s4, 0xff80
s_cmpk_gt_u32 s4, 0x1234
s_getreg_b32 s4, hwreg(HW_REG_MODE, 4, 2)
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0x3
s_setreg_b32 hwreg(HW_REG_MODE), s4
s_nop 7
s_waitcnt vmcnt(3)
s_waitcnt vmcnt(0) lgkmcnt(0)
s_barrier
s_cbranch_execz 4
s_load_dwordx16 s[16:31], s[0:1], 0x40
s_load_dword s4, s[0:1], -0x8
s_load_dword s4, s[0:1], s5
s_load_dword s4, s[0:1], s5 offset:0x10
s_buffer_load_dwordx4 s[4:7], s[8:11], 0x10
s_memtime s[4:5]
s_dcache_inv
v_add_f32 v1, -v2, |v3| clamp
v_mul_f32 v1, s2, v3 mul:2
v_fma_f32 v1, -|v2|, 1.0, -v4
v_cmp_lt_f32 vcc, v1, v2
v_cmp_class_f64 s[4:5], v[2:3], v4
v_mad_u16 v1, v2, v3, v4 op_sel:[1,0,0,1]
v_pk_fma_f32 v[2:3], v[4:5], s[6:7], v[8:9] op_sel:[0,1,0] op_sel_hi:[1,0,1] neg_lo:[0,0,1]
v_fma_mix_f32 v1, v2, v3, v4 op_sel_hi:[1,0,0]
v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], 1.0
v_mfma_f32_4x4x1_16b_f32 v[32:35], v8, v8, 0 cbsz:1 abid:2 blgp:3
v_mov_b32 v1, v2 quad_perm:[1,0,3,2] {MASKS}
v_add_f32 v1, -v2, v3 row_shr:7 {MASKS} bound_ctrl:1
v_mov_b32 v1, v2 row_bcast:31 {MASKS}
v_add_u32 v1, sext(v2), v3 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:DWORD
v_cmp_eq_u32 s[4:5], v2, v3 src0_sel:BYTE_3 src1_sel:WORD_0
ds_read2_b32 v[2:3], v1 offset0:1 offset1:2
ds_read_b128 v[4:7], v1 offset:1024
ds_write_b8 v1, v2 offset:3
ds_bpermute_b32 v1, v2, v3 offset:4
global_load_dwordx4 v[4:7], v[2:3], off offset:-16 sc0 nt sc1
global_load_lds_dword v1, s[4:5] offset:4
global_store_dword v1, v2, s[4:5]
global_atomic_add_f32 v1, v2, s[4:5] offset:8
global_atomic_cmpswap_x2 v[8:9], v16, v[24:27], s[20:21] sc0
flat_store_dwordx2 v[2:3], v[4:5] offset:8
scratch_load_dword v1, off, s4 offset:4
scratch_store_dword v2, v1, off
buffer_load_dword v1, v2, s[8:11], s5 offen offset:16 nt
buffer_load_dword off, s[8:11], 0 lds
buffer_store_dwordx4 v[4:7], v[2:3], s[8:11], 0 idxen offen
buffer_wbl2 sc1
""".strip().splitlines()


def come_back(texts: list[str]) -> list[str]:
    parsed = codeobject.parse(assemble("\n".join(texts)))
    at, found = parsed.functions[0].address, []
    for _ in texts:
        low, high = (int.from_bytes(parsed.image[n : n + 4], "little") for n in (at, at + 4))
        found.append(text_of(low, high))
        at += decode(low, high).size
    return found


def test_what_is_assembled_comes_back() -> None:
    assert come_back(TEXTS) == TEXTS


@pytest.mark.parametrize("cases", [vectors, lds, memory])
def test_each_mnemonic_comes_back(cases) -> None:  # type: ignore[no-untyped-def]
    texts = [text for text, _ in cases().values()]
    assert come_back(texts) == [re.sub(r"_e64\b", "", text) for text in texts]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("s_mov_b32 m0, 0x380\nglobal_load_lds_dword v0, s[4:5]",
         "global_load_lds_dword v0, s[4:5]"),
        ("v_mov_b32 v2, 2\nds_read_b64 v[8:9], v2", "ds_read_b64 v[8:9], v2"),
        ("ds_write_b32 v0, v0 offset:4000", "ds_write_b32 v0, v0 offset:4000"),
        ("v_pk_add_f32 v[8:9], v[8:9], v[40:41]\nglobal_store_dword v0, v8, s[4:5] offset:4",
         "global_store_dword v0, v8, s[4:5] offset:4"),
    ],
)  # fmt: skip
def test_a_fault_names_the_instruction_as_its_bytes_have_it(body: str, named: str) -> None:
    start = "s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
    with pytest.raises(EmulatorError) as error:
        assembled(start + body, np.zeros(64, np.float32), lds=1024)
    assert re.search(rf"pc 0x[0-9a-f]+: {re.escape(named)}\n", str(error.value)), str(error.value)
