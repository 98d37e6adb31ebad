"""The encodings of gfx942 that the emulator knows: opcode numbers and mnemonics by format.

Numbers are those of AMD's "Instinct MI300 Instruction Set Architecture" (chapter "Microcode
formats"). A mnemonic is in a table only if the C core implements it. Executing any other encoding
is an error that names it. VOP3 also encodes VOP2 (at 256), VOP1 (at 320) and VOPC (at 0); FLAT,
GLOBAL and SCRATCH share opcodes.
"""

from __future__ import annotations

from collections.abc import Mapping


def _table(prefix: str, runs: Mapping[int, str]) -> dict[int, str]:
    return {
        start + offset: prefix + name
        for start, names in runs.items()
        for offset, name in enumerate(names.split())
    }


def _comparisons() -> dict[int, str]:
    floats = "f lt eq le gt lg ge o u nge nlg ngt nle neq nlt tru".split()  # noqa: SIM905
    integers = ["f", "lt", "eq", "le", "gt", "ne", "ge", "t"]
    table = {}
    for first, conditions, types in (
        (32, floats, ["f16", "f32", "f64"]),
        (160, integers, ["i16", "i32", "i64"]),
        (168, integers, ["u16", "u32", "u64"]),
    ):
        for number, kind in enumerate(types):
            for index, condition in enumerate(conditions):
                opcode = first + number * 32 + index
                table[opcode] = f"v_cmp_{condition}_{kind}"
                table[opcode + 16] = f"v_cmpx_{condition}_{kind}"
    for number, kind in enumerate(("f32", "f64", "f16")):
        table[16 + 2 * number] = f"v_cmp_class_{kind}"
        table[17 + 2 * number] = f"v_cmpx_class_{kind}"
    return table


VOPC = _comparisons()
SOP2 = _table(
    "s_",
    {
        0: (
            "add_u32 sub_u32 add_i32 sub_i32 addc_u32 subb_u32 min_i32 min_u32 max_i32 max_u32 "
            "cselect_b32 cselect_b64 and_b32 and_b64 or_b32 or_b64 xor_b32 xor_b64 andn2_b32 "
            "andn2_b64 orn2_b32 orn2_b64 nand_b32 nand_b64 nor_b32 nor_b64 xnor_b32 xnor_b64 "
            "lshl_b32 lshl_b64 lshr_b32 lshr_b64 ashr_i32 ashr_i64 bfm_b32 bfm_b64 mul_i32 "
            "bfe_u32 bfe_i32 bfe_u64 bfe_i64"
        ),
        42: "absdiff_i32",
        44: (
            "mul_hi_u32 mul_hi_i32 lshl1_add_u32 lshl2_add_u32 lshl3_add_u32 lshl4_add_u32 "
            "pack_ll_b32_b16 pack_lh_b32_b16 pack_hh_b32_b16"
        ),
    },
)
SOPK = _table(
    "s_",
    {
        0: (
            "movk_i32 cmovk_i32 cmpk_eq_i32 cmpk_lg_i32 cmpk_gt_i32 cmpk_ge_i32 cmpk_lt_i32 "
            "cmpk_le_i32 cmpk_eq_u32 cmpk_lg_u32 cmpk_gt_u32 cmpk_ge_u32 cmpk_lt_u32 cmpk_le_u32 "
            "addk_i32 mulk_i32"
        ),
        17: "getreg_b32 setreg_b32",
        20: "setreg_imm32_b32 call_b64",
    },
)
SOP1 = _table(
    "s_",
    {
        0: "mov_b32 mov_b64 cmov_b32 cmov_b64 not_b32 not_b64",
        8: (
            "brev_b32 brev_b64 bcnt0_i32_b32 bcnt0_i32_b64 bcnt1_i32_b32 bcnt1_i32_b64 "
            "ff0_i32_b32 ff0_i32_b64 ff1_i32_b32 ff1_i32_b64 flbit_i32_b32 flbit_i32_b64 "
            "flbit_i32 flbit_i32_i64 sext_i32_i8 sext_i32_i16 bitset0_b32 bitset0_b64 bitset1_b32 "
            "bitset1_b64 getpc_b64 setpc_b64 swappc_b64"
        ),
        32: (
            "and_saveexec_b64 or_saveexec_b64 xor_saveexec_b64 andn2_saveexec_b64 "
            "orn2_saveexec_b64 nand_saveexec_b64 nor_saveexec_b64 xnor_saveexec_b64"
        ),
        48: "abs_i32",
        51: (
            "andn1_saveexec_b64 orn1_saveexec_b64 andn1_wrexec_b64 andn2_wrexec_b64 "
            "bitreplicate_b64_b32"
        ),
    },
)
SOPC = _table(
    "s_",
    {
        0: (
            "cmp_eq_i32 cmp_lg_i32 cmp_gt_i32 cmp_ge_i32 cmp_lt_i32 cmp_le_i32 cmp_eq_u32 "
            "cmp_lg_u32 cmp_gt_u32 cmp_ge_u32 cmp_lt_u32 cmp_le_u32 bitcmp0_b32 bitcmp1_b32 "
            "bitcmp0_b64 bitcmp1_b64"
        ),
        18: "cmp_eq_u64 cmp_lg_u64",
    },
)
SOPP = _table(
    "s_",
    {
        0: "nop endpgm branch",
        4: (
            "cbranch_scc0 cbranch_scc1 cbranch_vccz cbranch_vccnz cbranch_execz cbranch_execnz "
            "barrier"
        ),
        12: "waitcnt sethalt sleep setprio",
        18: "trap icache_inv",
        22: "ttracedata",
    },
)
SMEM = _table(
    "s_",
    {
        0: "load_dword load_dwordx2 load_dwordx4 load_dwordx8 load_dwordx16",
        8: (
            "buffer_load_dword buffer_load_dwordx2 buffer_load_dwordx4 buffer_load_dwordx8 "
            "buffer_load_dwordx16"
        ),
        32: "dcache_inv dcache_wb",
        36: "memtime memrealtime",
    },
)
VOP1 = _table(
    "v_",
    {
        0: (
            "nop mov_b32 readfirstlane_b32 cvt_i32_f64 cvt_f64_i32 cvt_f32_i32 cvt_f32_u32 "
            "cvt_u32_f32 cvt_i32_f32"
        ),
        10: "cvt_f16_f32 cvt_f32_f16 cvt_rpi_i32_f32 cvt_flr_i32_f32",
        15: (
            "cvt_f32_f64 cvt_f64_f32 cvt_f32_ubyte0 cvt_f32_ubyte1 cvt_f32_ubyte2 cvt_f32_ubyte3 "
            "cvt_u32_f64 cvt_f64_u32 trunc_f64 ceil_f64 rndne_f64 floor_f64 fract_f32 trunc_f32 "
            "ceil_f32 rndne_f32 floor_f32 exp_f32 log_f32 rcp_f32 rcp_iflag_f32 rsq_f32 rcp_f64 "
            "rsq_f64 sqrt_f32 sqrt_f64 sin_f32 cos_f32 not_b32 bfrev_b32 ffbh_u32 ffbl_b32 "
            "ffbh_i32 frexp_exp_i32_f64 frexp_mant_f64"
        ),
        51: "frexp_exp_i32_f32 frexp_mant_f32",
        56: (
            "mov_b64 cvt_f16_u16 cvt_f16_i16 cvt_u16_f16 cvt_i16_f16 rcp_f16 sqrt_f16 rsq_f16 "
            "log_f16 exp_f16"
        ),
        68: "floor_f16 ceil_f16 trunc_f16 rndne_f16",
        81: "swap_b32 accvgpr_mov_b32",
        84: "cvt_f32_fp8 cvt_f32_bf8 cvt_pk_f32_fp8 cvt_pk_f32_bf8",
    },
)
VOP2 = _table(
    "v_",
    {
        0: (
            "cndmask_b32 add_f32 sub_f32 subrev_f32 fmac_f64 mul_f32 mul_i32_i24 mul_hi_i32_i24 "
            "mul_u32_u24 mul_hi_u32_u24 min_f32 max_f32 min_i32 max_i32 min_u32 max_u32 "
            "lshrrev_b32 ashrrev_i32 lshlrev_b32 and_b32 or_b32 xor_b32"
        ),
        23: (
            "fmamk_f32 fmaak_f32 add_co_u32 sub_co_u32 subrev_co_u32 addc_co_u32 subb_co_u32 "
            "subbrev_co_u32 add_f16 sub_f16 subrev_f16 mul_f16"
        ),
        38: (
            "add_u16 sub_u16 subrev_u16 mul_lo_u16 lshlrev_b16 lshrrev_b16 ashrrev_i16 max_f16 "
            "min_f16 max_u16 max_i16 min_u16 min_i16 ldexp_f16 add_u32 sub_u32 subrev_u32 "
            "dot2c_f32_f16"
        ),
        57: "dot4c_i32_i8",
        59: "fmac_f32 pk_fmac_f16 xnor_b32",
    },
)
VOP3 = _table(
    "v_",
    {
        450: "mad_i32_i24 mad_u32_u24",
        456: "bfe_u32 bfe_i32 bfi_b32 fma_f32 fma_f64",
        462: (
            "alignbit_b32 alignbyte_b32 min3_f32 min3_i32 min3_u32 max3_f32 max3_i32 max3_u32 "
            "med3_f32 med3_i32 med3_u32 sad_u8"
        ),
        475: "sad_u16 sad_u32",
        478: "div_fixup_f32 div_fixup_f64 div_scale_f32 div_scale_f64 div_fmas_f32 div_fmas_f64",
        488: "mad_u64_u32 mad_i64_i32",
        493: "perm_b32",
        497: (
            "mad_u32_u16 mad_i32_i16 xad_u32 min3_f16 min3_i16 min3_u16 max3_f16 max3_i16 "
            "max3_u16 med3_f16 med3_i16 med3_u16 lshl_add_u32 add_lshl_u32 add3_u32 lshl_or_b32 "
            "and_or_b32 or3_b32"
        ),
        516: "mad_u16 mad_i16 fma_f16",
        520: "lshl_add_u64",
        640: (
            "add_f64 mul_f64 min_f64 max_f64 ldexp_f64 mul_lo_u32 mul_hi_u32 mul_hi_i32 ldexp_f32 "
            "readlane_b32 writelane_b32 bcnt_u32_b32 mbcnt_lo_u32_b32 mbcnt_hi_u32_b32"
        ),
        655: "lshlrev_b64 lshrrev_b64 ashrrev_i64",
        659: "bfm_b32",
        662: "cvt_pkrtz_f16_f32 cvt_pk_u16_u32 cvt_pk_i16_i32",
        668: (
            "add_i32 sub_i32 add_i16 sub_i16 pack_b32_f16 mul_legacy_f32 cvt_pk_fp8_f32 "
            "cvt_pk_bf8_f32"
        ),
    },
)
VOP3P = _table(
    "v_",
    {
        0: (
            "pk_mad_i16 pk_mul_lo_u16 pk_add_i16 pk_sub_i16 pk_lshlrev_b16 pk_lshrrev_b16 "
            "pk_ashrrev_i16 pk_max_i16 pk_min_i16 pk_mad_u16 pk_add_u16 pk_sub_u16 pk_max_u16 "
            "pk_min_u16 pk_fma_f16 pk_add_f16 pk_mul_f16 pk_min_f16 pk_max_f16"
        ),
        32: "fma_mix_f32 fma_mixlo_f16 fma_mixhi_f16 dot2_f32_f16",
        38: "dot2_i32_i16 dot2_u32_u16 dot4_i32_i8 dot4_u32_u8",
        48: "pk_fma_f32 pk_mul_f32 pk_add_f32 pk_mov_b32",
        64: "mfma_f32_32x32x1_2b_f32 mfma_f32_16x16x1_4b_f32 mfma_f32_4x4x1_16b_f32",
        68: "mfma_f32_32x32x2_f32 mfma_f32_16x16x4_f32",
        72: "mfma_f32_32x32x4_2b_f16 mfma_f32_16x16x4_4b_f16 mfma_f32_4x4x4_16b_f16",
        76: "mfma_f32_32x32x8_f16 mfma_f32_16x16x16_f16",
        86: "mfma_i32_32x32x16_i8 mfma_i32_16x16x32_i8 accvgpr_read_b32 accvgpr_write_b32",
        93: (
            "mfma_f32_32x32x4_2b_bf16 mfma_f32_16x16x4_4b_bf16 mfma_f32_4x4x4_16b_bf16 "
            "mfma_f32_32x32x8_bf16 mfma_f32_16x16x16_bf16"
        ),
        112: (
            "mfma_f32_16x16x32_bf8_bf8 mfma_f32_16x16x32_bf8_fp8 mfma_f32_16x16x32_fp8_bf8 "
            "mfma_f32_16x16x32_fp8_fp8 mfma_f32_32x32x16_bf8_bf8 mfma_f32_32x32x16_bf8_fp8 "
            "mfma_f32_32x32x16_fp8_bf8 mfma_f32_32x32x16_fp8_fp8"
        ),
    },
)
DS = _table(
    "ds_",
    {
        0: "add_u32 sub_u32",
        3: "inc_u32 dec_u32 min_i32 max_i32 min_u32 max_u32 and_b32 or_b32 xor_b32",
        13: "write_b32 write2_b32 write2st64_b32 cmpst_b32",
        18: "min_f32 max_f32 nop add_f32",
        23: "pk_add_f16 pk_add_bf16",
        30: "write_b8 write_b16 add_rtn_u32 sub_rtn_u32",
        35: (
            "inc_rtn_u32 dec_rtn_u32 min_rtn_i32 max_rtn_i32 min_rtn_u32 max_rtn_u32 and_rtn_b32 "
            "or_rtn_b32 xor_rtn_b32"
        ),
        45: "wrxchg_rtn_b32",
        48: "cmpst_rtn_b32",
        50: "min_rtn_f32 max_rtn_f32",
        53: (
            "add_rtn_f32 read_b32 read2_b32 read2st64_b32 read_i8 read_u8 read_i16 read_u16 "
            "swizzle_b32 permute_b32 bpermute_b32 add_u64 sub_u64"
        ),
        69: "min_i64 max_i64 min_u64 max_u64 and_b64 or_b64 xor_b64",
        77: "write_b64 write2_b64 write2st64_b64 cmpst_b64",
        84: (
            "write_b8_d16_hi write_b16_d16_hi read_u8_d16 read_u8_d16_hi read_i8_d16 "
            "read_i8_d16_hi read_u16_d16 read_u16_d16_hi add_f64"
        ),
        96: "add_rtn_u64 sub_rtn_u64",
        101: "min_rtn_i64 max_rtn_i64 min_rtn_u64 max_rtn_u64 and_rtn_b64 or_rtn_b64 xor_rtn_b64",
        109: "wrxchg_rtn_b64",
        112: "cmpst_rtn_b64",
        118: "read_b64 read2_b64 read2st64_b64",
        124: "add_rtn_f64",
        183: "pk_add_rtn_f16 pk_add_rtn_bf16",
        222: "write_b96 write_b128",
        254: "read_b96 read_b128",
    },
)
MUBUF = _table(
    "buffer_",
    {
        16: (
            "load_ubyte load_sbyte load_ushort load_sshort load_dword load_dwordx2 load_dwordx3 "
            "load_dwordx4 store_byte store_byte_d16_hi store_short store_short_d16_hi store_dword "
            "store_dwordx2 store_dwordx3 store_dwordx4 load_ubyte_d16 load_ubyte_d16_hi "
            "load_sbyte_d16 load_sbyte_d16_hi load_short_d16 load_short_d16_hi"
        ),
        40: "wbl2 inv",
        64: (
            "atomic_swap atomic_cmpswap atomic_add atomic_sub atomic_smin atomic_umin atomic_smax "
            "atomic_umax atomic_and atomic_or atomic_xor atomic_inc atomic_dec atomic_add_f32 "
            "atomic_pk_add_f16 atomic_add_f64 atomic_min_f64 atomic_max_f64"
        ),
        96: (
            "atomic_swap_x2 atomic_cmpswap_x2 atomic_add_x2 atomic_sub_x2 atomic_smin_x2 "
            "atomic_umin_x2 atomic_smax_x2 atomic_umax_x2 atomic_and_x2 atomic_or_x2 "
            "atomic_xor_x2"
        ),
    },
)
GLOBAL = _table(
    "global_",
    {
        16: (
            "load_ubyte load_sbyte load_ushort load_sshort load_dword load_dwordx2 load_dwordx3 "
            "load_dwordx4 store_byte store_byte_d16_hi store_short store_short_d16_hi store_dword "
            "store_dwordx2 store_dwordx3 store_dwordx4 load_ubyte_d16 load_ubyte_d16_hi "
            "load_sbyte_d16 load_sbyte_d16_hi load_short_d16 load_short_d16_hi"
        ),
        42: "load_lds_dword",
        64: (
            "atomic_swap atomic_cmpswap atomic_add atomic_sub atomic_smin atomic_umin atomic_smax "
            "atomic_umax atomic_and atomic_or atomic_xor atomic_inc atomic_dec atomic_add_f32 "
            "atomic_pk_add_f16 atomic_add_f64 atomic_min_f64 atomic_max_f64 atomic_pk_add_bf16"
        ),
        96: (
            "atomic_swap_x2 atomic_cmpswap_x2 atomic_add_x2 atomic_sub_x2 atomic_smin_x2 "
            "atomic_umin_x2 atomic_smax_x2 atomic_umax_x2 atomic_and_x2 atomic_or_x2 "
            "atomic_xor_x2"
        ),
    },
)
SCRATCH = _table(
    "scratch_",
    {
        16: (
            "load_ubyte load_sbyte load_ushort load_sshort load_dword load_dwordx2 load_dwordx3 "
            "load_dwordx4 store_byte store_byte_d16_hi store_short store_short_d16_hi store_dword "
            "store_dwordx2 store_dwordx3 store_dwordx4 load_ubyte_d16 load_ubyte_d16_hi "
            "load_sbyte_d16 load_sbyte_d16_hi load_short_d16 load_short_d16_hi"
        ),
    },
)
