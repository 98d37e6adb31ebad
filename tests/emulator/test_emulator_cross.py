"""Carries, lane exchanges, modifiers, DPP and SDWA, accumulating forms: against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from single_instructions import draw, run, view
from vector_rules import dot_halves, fma

VCC = 0x00FF_F00F_1234_8421
EXEC = 0xFFF0_0FFF_8765_FFF1
LANES = np.arange(64)
U, F = np.uint32, np.float32
SET_VCC = f"s_mov_b32 vcc_lo, 0x{VCC & 0xFFFFFFFF:x}\ns_mov_b32 vcc_hi, 0x{VCC >> 32:x}"
SET_EXEC = f"s_mov_b32 exec_lo, 0x{EXEC & 0xFFFFFFFF:x}\ns_mov_b32 exec_hi, 0x{EXEC >> 32:x}"
GET_VCC = "s_mov_b64 s[20:21], vcc"


def bits(mask: int) -> Any:
    return np.array([mask >> lane & 1 for lane in range(64)], np.uint64)


def to_mask(flags: Any) -> int:
    return sum(1 << lane for lane in range(64) if flags[lane])


def u64(x: Any) -> Any:
    return x.astype(np.uint64)


C = bits(VCC)
# text, types of sources, expected low dword, expected mask in s[20:21] (or None).
Check = tuple[str, str, Callable[..., Any], Callable[..., Any] | None]
CHECKS: dict[str, Check] = {}


def check(
    name: str,
    text: str,
    types: str,
    value: Callable[..., Any],
    mask: Callable[..., Any] | None = None,
) -> None:
    CHECKS[name] = (text, types, value, mask)


for _form in ("e32", "e64"):
    check(
        f"cndmask_{_form}",
        f"{SET_VCC}\nv_cndmask_b32_{_form} v8, v2, v4, vcc",
        "uu",
        lambda x, y: np.where(C, y, x),
    )
    for _name, _value in {
        "add_co": lambda x, y: u64(x) + u64(y),
        "sub_co": lambda x, y: u64(x) - u64(y),
        "subrev_co": lambda x, y: u64(y) - u64(x),
    }.items():
        check(
            f"{_name}_{_form}",
            f"v_{_name}_u32_{_form} v8, vcc, v2, v4\n{GET_VCC}",
            "uu",
            lambda x, y, f=_value: f(x, y),
            lambda x, y, f=_value: f(x, y) >> 32 != 0,
        )
    for _name, _value in {
        "addc_co": lambda x, y: u64(x) + u64(y) + C,
        "subb_co": lambda x, y: u64(x) - u64(y) - C,
        "subbrev_co": lambda x, y: u64(y) - u64(x) - C,
    }.items():
        check(
            f"{_name}_{_form}",
            f"{SET_VCC}\nv_{_name}_u32_{_form} v8, vcc, v2, v4, vcc\n{GET_VCC}",
            "uu",
            lambda x, y, f=_value: f(x, y),
            lambda x, y, f=_value: f(x, y) >> 32 != 0,
        )
check(
    "cndmask_neg",
    f"{SET_VCC}\nv_cndmask_b32_e64 v8, -v2, |v4|, vcc",
    "ff",
    lambda x, y: np.where(C, np.abs(y), -x).view(U),
)
check(
    "mad_u64_u32",
    "v_mad_u64_u32 v[8:9], s[20:21], v2, v4, v[6:7]",
    "uuq",
    lambda x, y, z: u64(x) * u64(y) + z,
    lambda x, y, z: [int(a) * int(b) + int(c) >> 64 for a, b, c in zip(x, y, z, strict=True)],
)
check(
    "mad_i64_i32",
    "v_mad_i64_i32 v[8:9], s[22:23], v2, v4, v[6:7]",
    "iil",
    lambda x, y, z: x.astype(np.int64) * y + z,
)
check(
    "readlane", "v_readlane_b32 s22, v2, 37\nv_mov_b32 v8, s22", "u", lambda x: np.full(64, x[37])
)
check(
    "readfirstlane",
    f"{SET_EXEC}\ns_mov_b64 exec, 0x60\nv_readfirstlane_b32 s22, v2\n"
    "s_mov_b64 exec, -1\nv_mov_b32 v8, s22",
    "u",
    lambda x: np.full(64, x[5]),
)
check("writelane", "v_writelane_b32 v8, 7, 9", "u_", lambda x, d: np.where(LANES == 9, 7, d))
check("swap", "v_swap_b32 v8, v2\nv_mov_b32 v8, v2", "u_", lambda x, d: d)
check(
    "accvgpr",
    "v_accvgpr_write_b32 a3, v2\nv_accvgpr_mov_b32 a9, a3\nv_accvgpr_read_b32 v8, a9",
    "u",
    lambda x: x,
)
check(
    "nop", "v_nop\ns_nop 3\ns_sleep 1\ns_setprio 2\ns_setprio 0\nv_mov_b32 v8, v2", "u", lambda x: x
)
check("fmac_f32", "v_fmac_f32_e32 v8, v2, v4", "ff_", lambda x, y, d: fma(x, y, d.view(F)).view(U))
check(
    "fmac_f32_e64",
    "v_fmac_f32_e64 v8, -v2, v4",
    "ff_",
    lambda x, y, d: fma(-x, y, d.view(F)).view(U),
)
check(
    "fmac_f64",
    "v_mov_b64 v[8:9], v[6:7]\nv_fmac_f64_e32 v[8:9], v[2:3], v[4:5]",
    "GGG",
    lambda x, y, z: fma(x, y, z).view(np.uint64),
)
check(
    "fmamk_f32",
    "v_fmamk_f32 v8, v2, 0x40490fdb, v4",
    "ff",
    lambda x, y: fma(x, np.full(64, np.pi, F), y).view(U),
)
check(
    "fmaak_f32",
    "v_fmaak_f32 v8, v2, v4, 0x40490fdb",
    "ff",
    lambda x, y: fma(x, y, np.full(64, np.pi, F)).view(U),
)
check(
    "dot2c_f32_f16",
    "v_dot2c_f32_f16_e32 v8, v2, v4",
    "pp_",
    lambda x, y, d: dot_halves(x, y, d.view(F)).view(U),
)
check(
    "dot4c_i32_i8",
    "v_dot4c_i32_i8_e32 v8, v2, v4",
    "uu_",
    lambda x, y, d: (
        d
        + sum(
            (x >> U(n)).astype(np.int8).astype(np.int64) * (y >> U(n)).astype(np.int8)
            for n in (0, 8, 16, 24)
        )
    ),
)


def halves(x: Any, shift: int) -> Any:
    return (x >> U(shift)).astype(np.uint16).view(np.float16)


def join(low: Any, high: Any) -> Any:
    parts = [np.asarray(p).astype(np.float16).view(np.uint16).astype(U) for p in (low, high)]
    return parts[0] | parts[1] << U(16)


check(
    "pk_fmac_f16",
    "v_pk_fmac_f16 v8, v2, v4",
    "pp_",
    lambda x, y, d: join(*(fma(halves(x, n), halves(y, n), halves(d, n)) for n in (0, 16))),
)
check(
    "fma_mix_f32",
    "v_fma_mix_f32 v8, v2, -v4, |v6| op_sel:[1,0,0] op_sel_hi:[1,1,0]",
    "ppf",
    lambda x, y, z: fma(halves(x, 16).astype(F), -halves(y, 0).astype(F), np.abs(z)).view(U),
)


def once(x: Any) -> Any:
    return x.astype(np.float16).view(np.uint16).astype(U)


check(
    "fma_mixlo_f16",
    "v_fma_mixlo_f16 v8, v2, v4, v6 op_sel_hi:[0,1,0]",
    "fpf_",
    lambda x, y, z, d: once(fma(x, halves(y, 0).astype(F), z)) | d & U(0xFFFF0000),
)
check(
    "fma_mixhi_f16",
    "v_fma_mixhi_f16 v8, v2, v4, v6 op_sel:[0,1,0] op_sel_hi:[0,1,0]",
    "fpf_",
    lambda x, y, z, d: once(fma(x, halves(y, 16).astype(F), z)) << U(16) | d & U(0xFFFF),
)
check("neg_abs", "v_add_f32_e64 v8, -v2, -|v4|", "ff", lambda x, y: (-x - np.abs(y)).view(U))
check(
    "clamp",
    "v_add_f32_e64 v8, v2, v4 clamp",
    "ff",
    lambda x, y: np.where(np.isnan(x + y), 0, np.clip(x + y, 0, 1)).astype(F).view(U),
)
check("omod", "v_mul_f32_e64 v8, v2, v4 mul:4", "gg", lambda x, y: (x * y * F(4)).view(U))
check("omod_half", "v_mul_f32_e64 v8, v2, v4 div:2", "gg", lambda x, y: (x * y * F(0.5)).view(U))
check(
    "inline",
    "v_add_f32_e32 v8, 0.15915494, v2",
    "g",
    lambda x: (x + np.array(0x3E22F983, U).view(F)).view(U),
)
check("inline_f16", "v_add_f16_e32 v8, 4.0, v2", "h", lambda x: once(x + np.float16(4)))
check("literal", "v_add_u32_e32 v8, 0x12345678, v2", "u", lambda x: x + U(0x12345678))
check("negative_inline", "v_add_u32_e32 v8, -16, v2", "u", lambda x: x - U(16))
check("inline_f64", "v_add_f64 v[8:9], v[2:3], -2.0", "G", lambda x: (x - 2.0).view(np.uint64))
check(
    "op_sel",
    "v_mad_u16 v8, v2, v4, v6 op_sel:[1,0,1,1]",
    "uuu_",
    lambda x, y, z, d: ((x >> U(16)) * (y & U(65535)) + (z >> U(16))) << U(16) | d & U(65535),
)
check(
    "pk_op_sel",
    "v_pk_add_u16 v8, v2, v4 op_sel:[1,0] op_sel_hi:[0,0]",
    "uu",
    lambda x, y: ((x >> U(16)) + y & U(65535)) | (x + y) << U(16),
)
check(
    "pk_neg",
    "v_pk_mul_f16 v8, v2, v4 neg_lo:[1,0] neg_hi:[0,1]",
    "kk",
    lambda x, y: join(-halves(x, 0) * halves(y, 0), halves(x, 16) * -halves(y, 16)),
)
check(
    "pk_f32_op_sel",
    "v_pk_mul_f32 v[8:9], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[1,0] neg_hi:[0,1]",
    "FF",
    lambda x, y: u64((x[1] * y[0]).view(U)) | u64((x[1] * -y[0]).view(U)) << np.uint64(32),
)
check(
    "pk_mov_b32",
    "v_pk_mov_b32 v[8:9], v[2:3], v[4:5] op_sel:[1,0]",
    "FF",
    lambda x, y: u64(x[1].view(U)) | u64(y[0].view(U)) << np.uint64(32),
)


def moved(x: Any, source: Any, valid: Any, old: Any, bound: bool) -> Any:
    """DPP: each lane takes ``source``'s value; invalid ones 0 if bound_ctrl, else keep ``old``."""
    taken = x[np.clip(source, 0, 63)]
    return np.where(valid, taken, 0 if bound else old)


ROW = LANES // 16 * 16
DPP = {
    "quad_perm:[3,0,2,1]": (LANES // 4 * 4 + np.array([3, 0, 2, 1])[LANES % 4], None),
    "row_shl:3": (LANES + 3, LANES % 16 + 3 < 16),
    "row_shr:5": (LANES - 5, LANES % 16 >= 5),
    "row_ror:6": (ROW + (LANES - 6) % 16, None),
    "wave_shl:1": (LANES + 1, LANES < 63),
    "wave_rol:1": ((LANES + 1) % 64, None),
    "wave_shr:1": (LANES - 1, LANES > 0),
    "wave_ror:1": ((LANES - 1) % 64, None),
    "row_mirror": (ROW + 15 - LANES % 16, None),
    "row_half_mirror": (LANES // 8 * 8 + 7 - LANES % 8, None),
    "row_bcast:15": (ROW - 1, LANES >= 16),
    "row_bcast:31": (np.full(64, 31), LANES >= 32),
    "row_newbcast:5": (ROW + 5, None),
}
for _control, (_source, _valid) in DPP.items():
    _ok = np.ones(64, bool) if _valid is None else _valid
    for _bound in (True, False):
        check(
            f"dpp_{_control}_{_bound}",
            f"v_mov_b32_dpp v8, v2 {_control} row_mask:0xf bank_mask:0xf"
            + (" bound_ctrl:0" if _bound else ""),
            "u_",
            lambda x, d, s=_source, v=_ok, b=_bound: moved(x, s, v, d, b),
        )
check(
    "dpp_masks",
    "v_add_u32_dpp v8, v2, v4 quad_perm:[0,1,2,3] row_mask:0x5 bank_mask:0x3",
    "uu_",
    lambda x, y, d: np.where((LANES // 16 % 2 == 0) & (LANES // 4 % 4 < 2), x + y, d),
)
check(
    "dpp_exec",
    f"{SET_EXEC}\nv_mov_b32_dpp v8, v2 row_shl:1 row_mask:0xf bank_mask:0xf",
    "u_",
    lambda x, d: np.where(
        bits(EXEC).astype(bool) & (LANES % 16 < 15) & np.append(bits(EXEC)[1:], 0).astype(bool),
        np.append(x[1:], 0),
        d,
    ),
)
check(
    "dpp_neg",
    "v_add_f32_dpp v8, -v2, |v4| row_ror:1 row_mask:0xf bank_mask:0xf",
    "gg",
    lambda x, y: (-x[ROW + (LANES - 1) % 16] + np.abs(y)).view(U),
)
check(
    "sdwa_sources",
    "v_add_u32_sdwa v8, v2, sext(v4) dst_sel:DWORD dst_unused:UNUSED_PAD "
    "src0_sel:BYTE_2 src1_sel:WORD_1",
    "uu",
    lambda x, y: (x >> U(16) & U(255)) + (y.view(np.int32) >> 16).view(U),
)
check(
    "sdwa_pad",
    "v_mov_b32_sdwa v8, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_3",
    "u",
    lambda x: (x >> U(24)) << U(8),
)
check(
    "sdwa_keep",
    "v_mov_b32_sdwa v8, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0",
    "u_",
    lambda x, d: x << U(16) | d & U(65535),
)
check(
    "sdwa_sext",
    "v_mov_b32_sdwa v8, v2 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:BYTE_0",
    "u",
    lambda x: ((x << U(24)).view(np.int32) >> 16).view(U),
)
check(
    "sdwa_compare",
    "v_cmp_lt_u32_sdwa s[20:21], v2, v4 src0_sel:BYTE_0 src1_sel:WORD_1",
    "uu_",
    lambda x, y, d: d,
    lambda x, y, d: (x & U(255)) < y >> U(16),
)
check("sdwa_fp8", "v_cvt_f32_fp8_sdwa v8, v2 src0_sel:BYTE_2", "u", lambda x: fp8(x >> U(16)))
check(
    "exec",
    f"{SET_EXEC}\nv_add_u32_e32 v8, v2, v4",
    "uu_",
    lambda x, y, d: np.where(bits(EXEC), x + y, d),
)
check(
    "getreg",
    "s_getreg_b32 s22, hwreg(HW_REG_MODE, 4, 4)\nv_mov_b32 v8, s22",
    "u",
    lambda x: np.full(64, 15),
)
check(
    "flush",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\nv_mul_f32 v8, v2, v4\n"
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3",
    "ff",
    lambda x, y: flush(flush(x) * flush(y)),
)
check(
    "setreg",
    "s_mov_b32 s22, 3\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s22\nv_mov_b32 v8, v2",
    "u",
    lambda x: x,
)
check(
    "calls",
    "s_getpc_b64 s[22:23]\ns_add_u32 s22, s22, 16\ns_addc_u32 s23, s23, 0\n"
    "s_swappc_b64 s[24:25], s[22:23]\ns_branch 2\nv_mov_b32 v8, v2\ns_setpc_b64 s[24:25]",
    "u",
    lambda x: x,
)
check(
    "call",
    "s_call_b64 s[24:25], 1\ns_branch 2\nv_mov_b32 v8, v2\ns_setpc_b64 s[24:25]",
    "u",
    lambda x: x,
)
check(
    "branches",
    "s_mov_b32 s22, 0\ns_cmp_eq_u32 s22, 0\ns_cbranch_scc0 9\ns_cbranch_scc1 1\ns_branch 7\n"
    "s_mov_b64 vcc, 0\ns_cbranch_vccnz 5\ns_cbranch_vccz 1\ns_branch 3\ns_cbranch_execz 2\n"
    "s_cbranch_execnz 1\ns_branch 1\nv_mov_b32 v8, v2",
    "u",
    lambda x: x,
)
check(
    "time",
    "s_memtime s[22:23]\ns_memrealtime s[24:25]\ns_waitcnt lgkmcnt(0)\ns_dcache_inv\n"
    "s_dcache_wb\ns_icache_inv\ns_ttracedata\ns_sethalt 0\nv_mov_b32 v8, v2",
    "u",
    lambda x: x,
)


def fp8(codes: Any) -> Any:
    from vector_rules import FP8

    return FP8[codes & U(255)].astype(F).view(U)


def flush(x: Any) -> Any:
    result = np.where(np.abs(x) < np.finfo(F).tiny, np.copysign(F(0), x), x)
    return result.astype(F)


def finite(kind: str, rng: np.random.Generator) -> Any:
    """Ordinary values: an output modifier's results are not denormal, NaN or infinite then."""
    values = rng.standard_normal((2, 64)) * 100
    if kind == "k":
        return values.astype(np.float16).view(np.uint16).astype(U)
    if kind == "G":
        return values[0].view(U).reshape(64, 2).T
    return values.astype(F).view(U)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    inputs = []
    for _, types, _, _ in CHECKS.values():
        kinds = (types.rstrip("_") + "uuu")[:3] + "u"
        inputs.append(
            np.concatenate([finite(k, rng) if k in "gkG" else draw(k, rng) for k in kinds])
        )
    results = run([c[0] for c in CHECKS.values()], np.array(inputs))
    return dict(zip(CHECKS, zip(inputs, results, strict=True), strict=True))


@pytest.mark.parametrize("name", list(CHECKS))
def test_form(name: str, outcomes: dict[str, Any]) -> None:
    _, types, value, mask = CHECKS[name]
    rows, result = outcomes[name]
    kinds = {"g": "f", "k": "p", "G": "d"}
    arguments = [
        view(rows[2 * n : 2 * n + 2], kinds.get(k, k)) for n, k in enumerate(types.rstrip("_"))
    ]
    if types.endswith("_"):
        arguments.append(rows[6])
    with np.errstate(all="ignore"):
        wanted = np.asarray(value(*arguments))
        flags = None if mask is None else to_mask(mask(*arguments))
    got = result[0]
    if wanted.dtype == np.uint64 or wanted.dtype == np.int64:
        wide = any(f"v[8:9], {n}" in CHECKS[name][0] for n in ("s[", "v["))
        wanted = wanted.view(np.uint64)
        if wide:
            got = u64(result[0]) | u64(result[1]) << np.uint64(32)
        else:
            wanted = wanted & np.uint64(0xFFFFFFFF)
    elif wanted.dtype == F:
        wanted = wanted.view(U)
    same = got == wanted
    if got.dtype == U:  # NaNs are equal whatever their bits, in f32 and in each half
        a, b = got, wanted.astype(U)
        both = ((a & 0x7FFFFFFF) > 0x7F800000) & ((b & 0x7FFFFFFF) > 0x7F800000)
        part = [
            (a >> n & 65535 == b >> n & 65535)
            | ((a >> n & 0x7FFF) > 0x7C00) & ((b >> n & 0x7FFF) > 0x7C00)
            for n in (0, 16)
        ]
        same |= both | (part[0] & part[1] & ("p" in types or "k" in types))
    else:
        same |= np.isnan(got.view(np.float64)) & np.isnan(wanted.view(np.float64))
    assert same.all(), (np.flatnonzero(~same)[:4], got[~same][:4], wanted[~same][:4])
    if flags is not None:
        assert int(result[2, 0]) | int(result[3, 0]) << 32 == flags
