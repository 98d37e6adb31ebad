"""What each vector instruction should compute, written in numpy from the ISA's description.

A case is the instruction's operands (as the assembler takes them), the types of its sources and
destination, and a function of arrays of 64 lanes. Types: u u32, i i32, f f32, h f16 (low half),
s/t u16/i16 (low half), d f64, q u64, l i64, p two f16, w two u16, F two f32 in a register pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from vector_rules import (
    BF8,
    FP8,
    D,
    F,
    H,
    Q,
    S,
    T,
    U,
    clip_int,
    count_bits,
    dot_halves,
    fixup,
    fma,
    i64,
    median,
    no_denormal,
    number_max,
    number_min,
    packed,
    per_lane,
    perm,
    quiet,
    signed_bits,
    to_fp8,
    toward_zero,
    trig,
    u64,
    wide,
)

Case = tuple[str, str, str, Callable[..., Any]]
CASES: dict[str, Case] = {}


def case(types: str, **functions: Callable[..., Any]) -> None:
    """``types`` is sources and destination, as ``ff:f``; sources come in v[2:3], v[4:5], v[6:7]."""
    for name, function in functions.items():
        sources, destination = types.split(":")
        CASES["v_" + name] = (sources, destination, "", function)


case(
    "u:u",
    mov_b32=quiet,
    not_b32=lambda x: ~x,
    bfrev_b32=per_lane(lambda x: int(f"{x:032b}"[::-1], 2)),
    ffbh_u32=per_lane(lambda x: 32 - x.bit_length() if x else 0xFFFFFFFF),
    ffbl_b32=per_lane(lambda x: (x & -x).bit_length() - 1 if x else 0xFFFFFFFF),
    ffbh_i32=per_lane(
        lambda x: (lambda y: 32 - y.bit_length() if y else 0xFFFFFFFF)(
            x ^ 0xFFFFFFFF if x >> 31 else x
        )
    ),
    cvt_f32_ubyte0=lambda x: (x & U(255)).astype(F).view(U),
    cvt_f32_ubyte1=lambda x: (x >> U(8) & U(255)).astype(F).view(U),
    cvt_f32_ubyte2=lambda x: (x >> U(16) & U(255)).astype(F).view(U),
    cvt_f32_ubyte3=lambda x: (x >> U(24)).astype(F).view(U),
)
case("q:q", mov_b64=quiet)
case(
    "u:f",
    cvt_f32_u32=lambda x: x.astype(F),
    cvt_f32_fp8=lambda x: FP8[x & U(255)],
    cvt_f32_bf8=lambda x: BF8[x & U(255)],
)
case("i:f", cvt_f32_i32=lambda x: x.astype(F))
case(
    "u:F",
    cvt_pk_f32_fp8=lambda x: (FP8[x & U(255)], FP8[x >> U(8) & U(255)]),
    cvt_pk_f32_bf8=lambda x: (BF8[x & U(255)], BF8[x >> U(8) & U(255)]),
)
case(
    "f:i",
    cvt_i32_f32=lambda x: clip_int(wide(x), -(2**31), 2**31 - 1),
    cvt_flr_i32_f32=lambda x: clip_int(np.floor(wide(x)), -(2**31), 2**31 - 1),
    cvt_rpi_i32_f32=lambda x: clip_int(np.floor(wide(x) + 0.5), -(2**31), 2**31 - 1),
    frexp_exp_i32_f32=lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0),
)
case("f:u", cvt_u32_f32=lambda x: clip_int(wide(x), 0, 2**32 - 1))
case(
    "f:f",
    trunc_f32=np.trunc,
    ceil_f32=np.ceil,
    floor_f32=np.floor,
    rndne_f32=np.rint,
    fract_f32=lambda x: np.where(np.isinf(x), np.nan, np.minimum(x - np.floor(x), F(1 - 2**-24))),
    exp_f32=lambda x: no_denormal(np.exp2(wide(x)).astype(F)),
    log_f32=lambda x: np.log2(wide(no_denormal(x))).astype(F),
    rcp_f32=lambda x: no_denormal((1 / wide(no_denormal(x))).astype(F)),
    rcp_iflag_f32=lambda x: no_denormal((1 / wide(no_denormal(x))).astype(F)),
    rsq_f32=lambda x: (1 / np.sqrt(wide(no_denormal(x)))).astype(F),
    sqrt_f32=lambda x: np.sqrt(wide(no_denormal(x))).astype(F),
    sin_f32=trig(np.sin, 0),
    cos_f32=trig(np.cos, 1),
    frexp_mant_f32=lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x),
)
case(
    "ff:f",
    add_f32=np.add,
    sub_f32=np.subtract,
    subrev_f32=lambda x, y: y - x,
    mul_f32=np.multiply,
    mul_legacy_f32=lambda x, y: np.where((x == 0) | (y == 0), F(0), x * y),
    max_f32=number_max,
    min_f32=number_min,
)
case(
    "fff:f",
    fma_f32=fma,
    max3_f32=lambda x, y, z: number_max(number_max(x, y), z),
    min3_f32=lambda x, y, z: number_min(number_min(x, y), z),
    med3_f32=median,
)
case("fi:f", ldexp_f32=lambda x, y: np.ldexp(wide(x), np.clip(y, -500, 500)).astype(F))
case("f:h", cvt_f16_f32=lambda x: x.astype(H))
case("h:f", cvt_f32_f16=lambda x: x.astype(F))


case("ff:u", cvt_pkrtz_f16_f32=lambda x, y: toward_zero(x) | toward_zero(y) << U(16))
case(
    "uu:u",
    cvt_pk_u16_u32=lambda x, y: np.minimum(x, 65535) | np.minimum(y, 65535) << U(16),
    and_b32=np.bitwise_and,
    or_b32=np.bitwise_or,
    xor_b32=np.bitwise_xor,
    xnor_b32=lambda x, y: ~(x ^ y),
    lshlrev_b32=lambda x, y: y << (x & U(31)),
    lshrrev_b32=lambda x, y: y >> (x & U(31)),
    add_u32=np.add,
    sub_u32=np.subtract,
    subrev_u32=lambda x, y: y - x,
    add_i32=np.add,
    sub_i32=np.subtract,
    mul_lo_u32=np.multiply,
    mul_hi_u32=lambda x, y: u64(x) * u64(y) >> Q(32),
    mul_u32_u24=lambda x, y: u64(x & U(0xFFFFFF)) * u64(y & U(0xFFFFFF)),
    mul_hi_u32_u24=lambda x, y: u64(x & U(0xFFFFFF)) * u64(y & U(0xFFFFFF)) >> Q(32),
    min_u32=np.minimum,
    max_u32=np.maximum,
    bfm_b32=lambda x, y: ((U(1) << (x & U(31))) - U(1)) << (y & U(31)),
    bcnt_u32_b32=lambda x, y: count_bits(x) + i64(y),
    mbcnt_lo_u32_b32=lambda x, y: (
        i64(y)
        + np.array([bin(int(v) & ((1 << min(n, 32)) - 1)).count("1") for n, v in enumerate(x)])
    ),
    mbcnt_hi_u32_b32=lambda x, y: (
        i64(y)
        + np.array([bin(int(v) & ((1 << max(n - 32, 0)) - 1)).count("1") for n, v in enumerate(x)])
    ),
)
case(
    "ii:i",
    ashrrev_i32=lambda x, y: y >> (x & 31),
    min_i32=np.minimum,
    max_i32=np.maximum,
    mul_hi_i32=lambda x, y: i64(x) * i64(y) >> 32,
    mul_i32_i24=lambda x, y: signed_bits(x, 24) * signed_bits(y, 24),
    mul_hi_i32_i24=lambda x, y: signed_bits(x, 24) * signed_bits(y, 24) >> 32,
)
case(
    "ii:u",
    cvt_pk_i16_i32=lambda x, y: (
        (np.clip(x, -32768, 32767).astype(U) & U(65535))
        | (np.clip(y, -32768, 32767).astype(U) << U(16))
    ),
)
case(
    "uuu:u",
    bfe_u32=lambda x, y, z: x >> (y & U(31)) & ((U(1) << (z & U(31))) - U(1)),
    bfi_b32=lambda x, y, z: (x & y) | (~x & z),
    alignbit_b32=lambda x, y, z: (u64(x) << Q(32) | u64(y)) >> u64(z & U(31)),
    alignbyte_b32=lambda x, y, z: (u64(x) << Q(32) | u64(y)) >> u64(U(8) * (z & U(3))),
    add3_u32=lambda x, y, z: x + y + z,
    lshl_add_u32=lambda x, y, z: (x << (y & U(31))) + z,
    add_lshl_u32=lambda x, y, z: (x + y) << (z & U(31)),
    lshl_or_b32=lambda x, y, z: (x << (y & U(31))) | z,
    and_or_b32=lambda x, y, z: (x & y) | z,
    or3_b32=lambda x, y, z: x | y | z,
    xad_u32=lambda x, y, z: (x ^ y) + z,
    mad_u32_u24=lambda x, y, z: u64(x & U(0xFFFFFF)) * u64(y & U(0xFFFFFF)) + u64(z),
    min3_u32=lambda x, y, z: np.minimum(np.minimum(x, y), z),
    max3_u32=lambda x, y, z: np.maximum(np.maximum(x, y), z),
    med3_u32=lambda x, y, z: np.sort([x, y, z], axis=0)[1],
    sad_u32=lambda x, y, z: np.abs(i64(x) - i64(y)) + i64(z),
    sad_u16=lambda x, y, z: (
        sum(np.abs(i64(x >> U(n) & U(65535)) - i64(y >> U(n) & U(65535))) for n in (0, 16)) + i64(z)
    ),
    sad_u8=lambda x, y, z: (
        sum(np.abs(i64(x >> U(n) & U(255)) - i64(y >> U(n) & U(255))) for n in (0, 8, 16, 24))
        + i64(z)
    ),
    perm_b32=per_lane(perm),
    mad_u32_u16=lambda x, y, z: u64(x & U(65535)) * u64(y & U(65535)) + u64(z),
    dot4_u32_u8=lambda x, y, z: (
        sum(u64(x >> U(n) & U(255)) * u64(y >> U(n) & U(255)) for n in (0, 8, 16, 24)) + u64(z)
    ),
    dot2_u32_u16=lambda x, y, z: (
        sum(u64(x >> U(n) & U(65535)) * u64(y >> U(n) & U(65535)) for n in (0, 16)) + u64(z)
    ),
)
case(
    "iii:i",
    bfe_i32=lambda x, y, z: np.where(
        z & 31,
        (x.astype(np.int64) >> (y & 31))
        << (64 - (z & 31)).astype(np.int64)
        >> (64 - (z & 31)).astype(np.int64),
        0,
    ),
    min3_i32=lambda x, y, z: np.minimum(np.minimum(x, y), z),
    max3_i32=lambda x, y, z: np.maximum(np.maximum(x, y), z),
    med3_i32=lambda x, y, z: np.sort([x, y, z], axis=0)[1],
    mad_i32_i24=lambda x, y, z: signed_bits(x, 24) * signed_bits(y, 24) + z,
    mad_i32_i16=lambda x, y, z: signed_bits(x, 16) * signed_bits(y, 16) + z,
    dot4_i32_i8=lambda x, y, z: (
        sum(signed_bits(x >> n, 8) * signed_bits(y >> n, 8) for n in (0, 8, 16, 24)) + i64(z)
    ),
    dot2_i32_i16=lambda x, y, z: (
        sum(signed_bits(x >> n, 16) * signed_bits(y >> n, 16) for n in (0, 16)) + i64(z)
    ),
)
case(
    "uq:q",
    lshlrev_b64=lambda x, y: y << u64(x & U(63)),
    lshrrev_b64=lambda x, y: y >> u64(x & U(63)),
)
case("ul:l", ashrrev_i64=lambda x, y: y >> i64(x & U(63)))
case("quq:q", lshl_add_u64=lambda x, y, z: (x << u64(y & U(7))) + z)
case("dd:d", add_f64=np.add, mul_f64=np.multiply, max_f64=number_max, min_f64=number_min)
case("ddd:d", fma_f64=fma)
case(
    "d:d",
    trunc_f64=np.trunc,
    ceil_f64=np.ceil,
    floor_f64=np.floor,
    rndne_f64=np.rint,
    rcp_f64=lambda x: 1 / x,
    rsq_f64=lambda x: 1 / np.sqrt(x),
    sqrt_f64=np.sqrt,
    frexp_mant_f64=lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x),
)
case("di:d", ldexp_f64=lambda x, y: np.ldexp(x, np.clip(y, -5000, 5000)))
case("f:d", cvt_f64_f32=lambda x: x.astype(D))
case("d:f", cvt_f32_f64=lambda x: x.astype(F))
case("i:d", cvt_f64_i32=lambda x: x.astype(D))
case("u:d", cvt_f64_u32=lambda x: x.astype(D))
case(
    "d:i",
    cvt_i32_f64=lambda x: clip_int(x, -(2**31), 2**31 - 1),
    frexp_exp_i32_f64=lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0),
)
case("d:u", cvt_u32_f64=lambda x: clip_int(x, 0, 2**32 - 1))
case("FFF:F", pk_fma_f32=lambda x, y, z: (fma(x[0], y[0], z[0]), fma(x[1], y[1], z[1])))
case(
    "FF:F",
    pk_mul_f32=lambda x, y: (x[0] * y[0], x[1] * y[1]),
    pk_add_f32=lambda x, y: (x[0] + y[0], x[1] + y[1]),
)
case(
    "hh:h",
    add_f16=np.add,
    sub_f16=np.subtract,
    subrev_f16=lambda x, y: y - x,
    mul_f16=np.multiply,
    max_f16=number_max,
    min_f16=number_min,
)
case(
    "hhh:H",
    fma_f16=fma,
    max3_f16=lambda x, y, z: number_max(number_max(x, y), z),
    min3_f16=lambda x, y, z: number_min(number_min(x, y), z),
    med3_f16=median,
)
case(
    "h:h",
    rcp_f16=lambda x: (1 / wide(x)).astype(H),
    sqrt_f16=lambda x: np.sqrt(wide(x)).astype(H),
    rsq_f16=lambda x: (1 / np.sqrt(wide(x))).astype(H),
    exp_f16=lambda x: np.exp2(wide(x)).astype(H),
    log_f16=lambda x: np.log2(wide(x)).astype(H),
    floor_f16=np.floor,
    ceil_f16=np.ceil,
    trunc_f16=np.trunc,
    rndne_f16=np.rint,
)
case("ht:h", ldexp_f16=lambda x, y: np.ldexp(wide(x), np.clip(y, -60, 60)).astype(H))
case("s:h", cvt_f16_u16=lambda x: x.astype(F).astype(H))
case("t:h", cvt_f16_i16=lambda x: x.astype(F).astype(H))
case("h:s", cvt_u16_f16=lambda x: clip_int(x.astype(F), 0, 65535))
case("h:t", cvt_i16_f16=lambda x: clip_int(x.astype(F), -32768, 32767))
UNSIGNED16 = {
    "add_u16": np.add,
    "sub_u16": np.subtract,
    "mul_lo_u16": np.multiply,
    "max_u16": np.maximum,
    "min_u16": np.minimum,
    "lshlrev_b16": lambda x, y: y << (x & S(15)),
    "lshrrev_b16": lambda x, y: y >> (x & S(15)),
}
SIGNED16 = {
    "max_i16": np.maximum,
    "min_i16": np.minimum,
    "ashrrev_i16": lambda x, y: y >> (x & T(15)),
}
case("ss:s", subrev_u16=lambda x, y: y - x, **UNSIGNED16)
case("tt:t", **SIGNED16)
case("ss:S", add_i16=np.add, sub_i16=np.subtract)
case(
    "sss:S",
    mad_u16=lambda x, y, z: x * y + z,
    mad_i16=lambda x, y, z: x * y + z,
    min3_u16=lambda x, y, z: np.minimum(np.minimum(x, y), z),
    max3_u16=lambda x, y, z: np.maximum(np.maximum(x, y), z),
    med3_u16=lambda x, y, z: np.sort([x, y, z], axis=0)[1],
)
case(
    "ttt:S",
    min3_i16=lambda x, y, z: np.minimum(np.minimum(x, y), z),
    max3_i16=lambda x, y, z: np.maximum(np.maximum(x, y), z),
    med3_i16=lambda x, y, z: np.sort([x, y, z], axis=0)[1],
)
case("uu:u", **{f"pk_{name}": packed(function, S) for name, function in UNSIGNED16.items()})
case(
    "uu:u",
    **{f"pk_{name}": packed(function, T) for name, function in SIGNED16.items()},
    pk_add_i16=packed(np.add, S),
    pk_sub_i16=packed(np.subtract, S),
)
case(
    "uuu:u",
    pk_mad_u16=packed(lambda x, y, z: x * y + z, S),
    pk_mad_i16=packed(lambda x, y, z: x * y + z, S),
)
case(
    "pp:p",
    pk_add_f16=packed(np.add, H),
    pk_mul_f16=packed(np.multiply, H),
    pk_max_f16=packed(number_max, H),
    pk_min_f16=packed(number_min, H),
)
case("ppp:p", pk_fma_f16=packed(fma, H))
case("uu:u", pack_b32_f16=lambda x, y: (x & U(65535)) | y << U(16))
case("ff:S", cvt_pk_fp8_f32=to_fp8(FP8), cvt_pk_bf8_f32=to_fp8(BF8))


case("ppf:f", dot2_f32_f16=dot_halves)
case("fff:f", div_fixup_f32=lambda x, y, z: fixup(x, y, z))
case("ddd:d", div_fixup_f64=lambda x, y, z: fixup(x, y, z))
