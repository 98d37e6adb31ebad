"""Arithmetic for the expected results of vector instructions, written from the ISA in numpy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

U, I, F, H, S, T, D, Q = (  # noqa: E741
    np.uint32,
    np.int32,
    np.float32,
    np.float16,
    np.uint16,
    np.int16,
    np.float64,
    np.uint64,
)


def quiet(x: Any) -> Any:
    return x


def number_max(x: Any, y: Any) -> Any:
    larger = np.where((x > y) | ((x == y) & np.signbit(y)), x, y)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, larger))


def number_min(x: Any, y: Any) -> Any:
    smaller = np.where((x < y) | ((x == y) & np.signbit(x)), x, y)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, smaller))


def median(x: Any, y: Any, z: Any) -> Any:
    low, high = number_min(x, y), number_max(x, y)
    nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    return np.where(nan, number_min(number_min(x, y), z), number_max(low, number_min(high, z)))


def wide(x: Any) -> Any:
    return np.asarray(x).astype(np.longdouble)


def fma(x: Any, y: Any, z: Any) -> Any:
    """A fused multiply-add rounded once: exact rational arithmetic per lane, then to nearest."""
    kind = x.dtype.type
    with np.errstate(all="ignore"):
        plain = (wide(x) * wide(y) + wide(z)).astype(kind)
    result = plain.copy()
    for lane in range(x.size):
        a, b, c = float(x[lane]), float(y[lane]), float(z[lane])
        if not np.isfinite([a, b, c]).all():
            with np.errstate(all="ignore"):
                product = np.float64(a) * np.float64(b)  # signs and infinities, not rounding
                if not np.isinf([a, b]).any() and not np.isnan([a, b]).any():
                    product = np.float64(1.0)  # finite, whatever it overflows to
                result[lane] = kind(product + np.float64(c))
            continue
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            negative = np.signbit(a) != np.signbit(b)
            both = negative and np.signbit(c) and (a == 0 or b == 0)
            result[lane] = -0.0 if both or (negative and np.signbit(c)) else 0.0
            continue
        result[lane] = round_fraction(exact, kind)
    return result


def round_fraction(value: Any, kind: Any) -> Any:
    """The nearest number of a float type, ties to even; overflow to infinity."""
    info = np.finfo(kind)
    bits, low = info.nmant + 1, int(info.minexp)
    sign, value = (-1 if value < 0 else 1), abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, low) - bits + 1)
    scaled = value / unit
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    rounded = whole * unit
    if rounded > Fraction(float(info.max)):
        return kind(sign * np.inf)
    with np.errstate(all="ignore"):
        return kind(sign * (float(rounded)))


def no_denormal(x: Any) -> Any:
    return np.where(np.abs(x) < np.finfo(F).tiny, np.copysign(F(0), x), x)


def clip_int(x: Any, low: int, high: int) -> Any:
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x), low, high))


def signed_bits(x: Any, bits: int) -> Any:
    return ((x.astype(np.int64) & ((1 << bits) - 1)) ^ (1 << (bits - 1))) - (1 << (bits - 1))


def i64(x: Any) -> Any:
    return x.astype(np.int64)


def u64(x: Any) -> Any:
    return x.astype(np.uint64)


def lanes() -> Any:
    return np.arange(64)


def count_bits(x: Any) -> Any:
    return np.array([bin(int(v)).count("1") for v in x])


def per_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: np.array([function(*(int(a[n]) for a in arrays)) for n in range(64)])


def perm(x: int, y: int, z: int) -> int:
    data = (x << 32 | y).to_bytes(8, "little")
    result = []
    for n in range(4):
        s = z >> 8 * n & 255
        if s < 8:
            result.append(data[s])
        elif s < 12:
            result.append(255 if data[2 * (s - 8) + 1] & 128 else 0)
        else:
            result.append(0 if s == 12 else 255)
    return int.from_bytes(bytes(result), "little")


def trig(function: Callable[..., Any], beyond: float) -> Callable[..., Any]:
    def result(x: Any) -> Any:
        turns = wide(x) - np.rint(wide(x))
        value = function(2 * np.pi * turns.astype(D)).astype(F)
        return np.where(np.isfinite(x), np.where(np.abs(x) > 256, F(beyond), value), np.nan)

    return result


def fp8_table(mantissa: int, bias: int) -> Any:
    table = []
    for code in range(256):
        e, m = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
        value = (
            (1 + m / 2**mantissa) * 2.0 ** (e - bias) if e else m / 2**mantissa * 2.0 ** (1 - bias)
        )
        table.append(np.nan if code == 128 else -value if code & 128 else value)
    return np.array(table)


FP8, BF8 = fp8_table(3, 8), fp8_table(2, 16)


def to_fp8(table: Any) -> Callable[..., Any]:
    """The nearest code, ties to the even one; NaN beyond half a step over the largest."""
    positive = table[:128]

    def one(x: float) -> int:
        if not np.isfinite(x):
            return 128
        size = abs(float(x))
        step = positive[127] - positive[126]
        if size >= positive[127] + step / 2:
            return 128
        distance = np.abs(positive - size)
        nearest = np.flatnonzero(distance == distance.min())
        code = next((int(n) for n in nearest if n % 2 == 0), int(nearest[0]))
        return code | (128 if x < 0 and code else 0)

    return lambda x, y: np.array([one(a) | one(b) << 8 for a, b in zip(x, y, strict=True)])


def packed(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    def both(*arrays: Any) -> Any:
        halves = []
        for shift in (0, 16):
            parts = [((a >> U(shift)) & U(0xFFFF)).astype(S).view(kind) for a in arrays]
            with np.errstate(all="ignore"):
                halves.append(np.asarray(function(*parts)).astype(kind).view(S).astype(U))
        return halves[0] | halves[1] << U(16)

    return both


def toward_zero(x: Any) -> Any:
    near = x.astype(H)
    back = near.astype(F)
    larger = np.abs(back) > np.abs(x)
    bits = near.view(S).copy()
    bits[larger & np.isfinite(x)] -= S(1)
    return bits.astype(U)


def dot_halves(x: Any, y: Any, z: Any) -> Any:
    for shift in (0, 16):
        left = (x >> U(shift)).astype(S).view(H).astype(F)
        right = (y >> U(shift)).astype(S).view(H).astype(F)
        z = fma(left, right, z)
    return z


def fixup(x: Any, y: Any, z: Any) -> Any:
    """The quotient z / y where special, and x with the quotient's sign elsewhere."""
    with np.errstate(all="ignore"):
        sign = np.where(np.signbit(y) != np.signbit(z), -1, 1).astype(x.dtype.type)
        special = ~np.isfinite(y) | ~np.isfinite(z) | (y == 0) | (z == 0)
        gap = 150 if x.dtype.type is F else 1075
        fields = [biased_exponent(v) for v in (y, z)]
        tiny = fields[1] - fields[0] < -gap
        size = np.where(np.isnan(x), np.inf, np.abs(x))  # NaN: the quotient overflowed
        ordinary = np.where(tiny, sign * 0, np.copysign(size, sign))
        return np.where(special, wide(z) / wide(y), ordinary).astype(x.dtype.type)


def biased_exponent(x: Any) -> Any:
    if x.dtype.type is F:
        return (x.view(U) >> U(23) & U(255)).astype(int)
    return (x.view(Q) >> Q(52) & Q(2047)).astype(int)
