"""SOP1, SOP2, SOPC and SOPK one by one, against Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from single_instructions import INTEGERS, run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EXEC = 0xF0F0_1234_8765_0F0F
ROUNDS = 6


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 & 1 else x


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 & 1 else x


def overflow(value: int) -> int:
    return int(not -(1 << 31) <= value < 1 << 31)


def field(x: int, y: int, bits: int, signed: bool) -> int:
    offset, width = y & (bits - 1), min(y >> 16 & 127, bits)
    value = (s32(x) if bits == 32 else s64(x)) >> offset if signed else x >> offset
    if width == 0:
        return 0
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> (width - 1) else value


def find_first(x: int, bits: int, wanted: int) -> int:
    return next((n for n in range(bits) if x >> n & 1 == wanted), -1)


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def sign_run(x: int, bits: int) -> int:
    return leading(x ^ ((1 << bits) - 1) if x >> (bits - 1) else x, bits)


def reverse(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


# name: (widths of destination, source 0, source 1; function of x, y, scc giving (result, scc)).
Rule = tuple[str, Callable[[int, int, int], Any]]
RULES: dict[str, Rule] = {}


def rule(widths: str, **functions: Callable[[int, int, int], Any]) -> None:
    for name, function in functions.items():
        RULES["s_" + name] = (widths, function)


def nonzero(function: Callable[[int, int], int], bits: int) -> Callable[[int, int, int], Any]:
    def result(x: int, y: int, scc: int) -> tuple[int, int]:
        value = function(x, y) & ((1 << bits) - 1)
        return value, int(value != 0)

    return result


rule(
    "111",
    add_u32=lambda x, y, c: (x + y, x + y >> 32),
    sub_u32=lambda x, y, c: (x - y, int(y > x)),
    add_i32=lambda x, y, c: (x + y, overflow(s32(x) + s32(y))),
    sub_i32=lambda x, y, c: (x - y, overflow(s32(x) - s32(y))),
    addc_u32=lambda x, y, c: (x + y + c, x + y + c >> 32),
    subb_u32=lambda x, y, c: (x - y - c, int(y + c > x)),
    min_i32=lambda x, y, c: (min(s32(x), s32(y)), int(s32(x) < s32(y))),
    min_u32=lambda x, y, c: (min(x, y), int(x < y)),
    max_i32=lambda x, y, c: (max(s32(x), s32(y)), int(s32(x) > s32(y))),
    max_u32=lambda x, y, c: (max(x, y), int(x > y)),
    cselect_b32=lambda x, y, c: (x if c else y, c),
    mul_i32=lambda x, y, c: (x * y, c),
    mul_hi_u32=lambda x, y, c: (x * y >> 32, c),
    mul_hi_i32=lambda x, y, c: (s32(x) * s32(y) >> 32, c),
    bfm_b32=lambda x, y, c: (((1 << (x & 31)) - 1) << (y & 31), c),
    pack_ll_b32_b16=lambda x, y, c: (x & 65535 | y << 16, c),
    pack_lh_b32_b16=lambda x, y, c: (x & 65535 | y & 0xFFFF0000, c),
    pack_hh_b32_b16=lambda x, y, c: (x >> 16 | y & 0xFFFF0000, c),
    absdiff_i32=nonzero(lambda x, y: abs(s32(x) - s32(y)), 32),
    lshl_b32=nonzero(lambda x, y: x << (y & 31), 32),
    lshr_b32=nonzero(lambda x, y: x >> (y & 31), 32),
    ashr_i32=nonzero(lambda x, y: s32(x) >> (y & 31), 32),
    bfe_u32=nonzero(lambda x, y: field(x, y, 32, False), 32),
    bfe_i32=nonzero(lambda x, y: field(x, y, 32, True), 32),
    **{
        f"lshl{n}_add_u32": lambda x, y, c, n=n: ((x << n) + y, int((x << n) + y >> 32 != 0))
        for n in (1, 2, 3, 4)
    },
)
rule(
    "221",
    lshl_b64=nonzero(lambda x, y: x << (y & 63), 64),
    lshr_b64=nonzero(lambda x, y: x >> (y & 63), 64),
    ashr_i64=nonzero(lambda x, y: s64(x) >> (y & 63), 64),
    bfe_u64=nonzero(lambda x, y: field(x, y, 64, False), 64),
    bfe_i64=nonzero(lambda x, y: field(x, y, 64, True), 64),
)
rule("222", cselect_b64=lambda x, y, c: (x if c else y, c))
rule("211", bfm_b64=lambda x, y, c: (((1 << (x & 63)) - 1) << (y & 63), c))
LOGIC = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "andn2": lambda x, y: x & ~y,
    "orn2": lambda x, y: x | ~y,
    "nand": lambda x, y: ~(x & y),
    "nor": lambda x, y: ~(x | y),
    "xnor": lambda x, y: ~(x ^ y),
}
for _name, _function in LOGIC.items():
    rule("111", **{f"{_name}_b32": nonzero(_function, 32)})
    rule("222", **{f"{_name}_b64": nonzero(_function, 64)})
rule(
    "11",
    mov_b32=lambda x, y, c: (x, c),
    not_b32=nonzero(lambda x, y: ~x, 32),
    brev_b32=lambda x, y, c: (reverse(x, 32), c),
    abs_i32=nonzero(lambda x, y: abs(s32(x)), 32),
    bcnt0_i32_b32=nonzero(lambda x, y: 32 - bin(x).count("1"), 32),
    bcnt1_i32_b32=nonzero(lambda x, y: bin(x).count("1"), 32),
    ff0_i32_b32=lambda x, y, c: (find_first(x, 32, 0), c),
    ff1_i32_b32=lambda x, y, c: (find_first(x, 32, 1), c),
    flbit_i32_b32=lambda x, y, c: (leading(x, 32), c),
    flbit_i32=lambda x, y, c: (sign_run(x, 32), c),
    sext_i32_i8=lambda x, y, c: (x & 255 | (0xFFFFFF00 if x & 128 else 0), c),
    sext_i32_i16=lambda x, y, c: (x & 65535 | (0xFFFF0000 if x & 32768 else 0), c),
    cmov_b32=lambda x, y, c: (x if c else None, c),
    bitset0_b32=lambda x, y, c: (("keep", ~(1 << (x & 31)), 0), c),
    bitset1_b32=lambda x, y, c: (("keep", M64, 1 << (x & 31)), c),
)
rule(
    "22",
    mov_b64=lambda x, y, c: (x, c),
    not_b64=nonzero(lambda x, y: ~x, 64),
    brev_b64=lambda x, y, c: (reverse(x, 64), c),
    cmov_b64=lambda x, y, c: (x if c else None, c),
)
rule(
    "12",
    bcnt0_i32_b64=nonzero(lambda x, y: 64 - bin(x).count("1"), 32),
    bcnt1_i32_b64=nonzero(lambda x, y: bin(x).count("1"), 32),
    ff0_i32_b64=lambda x, y, c: (find_first(x, 64, 0), c),
    ff1_i32_b64=lambda x, y, c: (find_first(x, 64, 1), c),
    flbit_i32_b64=lambda x, y, c: (leading(x, 64), c),
    flbit_i32_i64=lambda x, y, c: (sign_run(x, 64), c),
)
rule(
    "21",
    bitset0_b64=lambda x, y, c: (("keep", ~(1 << (x & 63)), 0), c),
    bitset1_b64=lambda x, y, c: (("keep", M64, 1 << (x & 63)), c),
    bitreplicate_b64_b32=lambda x, y, c: (sum((x >> n & 1) * 3 << 2 * n for n in range(32)), c),
)
ORDER = {
    "eq": lambda x, y: x == y,
    "lg": lambda x, y: x != y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
}
for _name, _order in ORDER.items():
    rule(
        "c11",
        **{
            f"cmp_{_name}_i32": lambda x, y, c, f=_order: (None, int(f(s32(x), s32(y)))),
            f"cmp_{_name}_u32": lambda x, y, c, f=_order: (None, int(f(x, y))),
        },
    )
    rule(
        "k",
        **{
            f"cmpk_{_name}_i32": lambda x, y, c, f=_order: (None, int(f(s32(x), s32(y)))),
            f"cmpk_{_name}_u32": lambda x, y, c, f=_order: (None, int(f(x, y & 65535))),
        },
    )
rule(
    "c22",
    cmp_eq_u64=lambda x, y, c: (None, int(x == y)),
    cmp_lg_u64=lambda x, y, c: (None, int(x != y)),
)
rule(
    "c11",
    bitcmp0_b32=lambda x, y, c: (None, int(not x >> (y & 31) & 1)),
    bitcmp1_b32=lambda x, y, c: (None, x >> (y & 31) & 1),
)
rule(
    "c21",
    bitcmp0_b64=lambda x, y, c: (None, int(not x >> (y & 63) & 1)),
    bitcmp1_b64=lambda x, y, c: (None, x >> (y & 63) & 1),
)
rule(
    "m",
    movk_i32=lambda x, y, c: (y, c),
    cmovk_i32=lambda x, y, c: (y if c else None, c),
    addk_i32=lambda x, y, c: (x + s32(y), overflow(s32(x) + s32(y))),
    mulk_i32=lambda x, y, c: (x * s32(y), c),
)
EXEC_RULES: dict[str, Callable[[int, int], int]] = {
    **{f"s_{name}_saveexec_b64": function for name, function in LOGIC.items()},
    "s_andn1_saveexec_b64": lambda x, e: ~x & e,
    "s_orn1_saveexec_b64": lambda x, e: ~x | e,
    "s_andn1_wrexec_b64": lambda x, e: ~x & e,
    "s_andn2_wrexec_b64": lambda x, e: x & ~e,
}


def registers(first: int, width: str) -> str:
    return f"s[{first}:{first + 1}]" if width == "2" else f"s{first}"


def write(name: str, widths: str, constant: int) -> str:
    """x in s[30:31], y in s[32:33], the destination s[34:35]."""
    if widths == "k":
        return f"{name} s30, 0x{constant & 65535:x}"
    if widths == "m":
        copy = "s_mov_b32 s34, s30\n" if name in ("s_addk_i32", "s_mulk_i32") else ""
        return f"{copy}{name} s34, 0x{constant & 65535:x}"
    operands = [registers(30 + 2 * n, w) for n, w in enumerate(widths[1:])]
    if widths[0] != "c":
        operands.insert(0, registers(34, widths[0]))
    return f"{name} {', '.join(operands)}"


LOAD = "\n".join(f"v_readfirstlane_b32 s{30 + n}, v{2 + n}" for n in range(6))
SAVE = "v_mov_b32 v8, s34\nv_mov_b32 v9, s35"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    rng = np.random.default_rng(3)
    jobs, snippets, inputs = [], [], []
    for name in [*RULES, *EXEC_RULES]:
        for number in range(ROUNDS):
            values = rng.choice(np.array(INTEGERS), 6).astype(np.uint32)
            if number % 2:
                values = rng.integers(0, 1 << 32, 6).astype(np.uint32)
            if number == 2:
                values[2:4] = values[0:2]
            scc, constant = number & 1, int(rng.choice([0, 1, 5, 0x7FFF, 0x8000, 0xFFFF]))
            if name in EXEC_RULES:
                text = (
                    f"s_mov_b32 exec_lo, 0x{EXEC & M32:x}\ns_mov_b32 exec_hi, 0x{EXEC >> 32:x}\n"
                    f"{name} s[34:35], s[30:31]\ns_mov_b64 s[20:21], exec\ns_mov_b64 exec, -1"
                )
            else:
                text = (
                    f"s_cmp_eq_u32 0, {int(not scc)}\n{write(name, RULES[name][0], constant)}\n"
                    "s_cselect_b32 s20, 1, 0"
                )
            snippets.append(f"{LOAD}\n{text}\n{SAVE}")
            inputs.append(
                np.repeat(np.concatenate([values, [0, 0]]).astype(np.uint32)[:, None], 64, 1)
            )
            jobs.append((name, [int(v) for v in values], scc, constant))
    results = run(snippets, np.array(inputs))
    found: dict[str, list[Any]] = {}
    for (name, *rest), result in zip(jobs, results, strict=True):
        found.setdefault(name, []).append((*rest, [int(v) for v in result[:, 0]]))
    return found


@pytest.mark.parametrize("name", sorted(RULES))
def test_scalar_instruction(name: str, outcomes: dict[str, list[Any]]) -> None:
    widths, function = RULES[name]
    for values, scc, constant, result in outcomes[name]:
        wide = [values[2 * n] | values[2 * n + 1] << 32 for n in range(3)]
        sources = widths[1:] if widths not in ("k", "m") else "11"
        x = wide[0] if sources[0] == "2" else values[0]
        y = wide[1] if sources[1:2] == "2" else values[2]
        if widths in ("k", "m"):
            y = constant | (0xFFFF0000 if constant & 0x8000 else 0)
        value, flag = function(x, y, scc)
        expected = wide[2]
        if isinstance(value, tuple):
            value = wide[2] & value[1] | value[2]
        if value is not None:
            keep = 0 if widths[0] == "2" else wide[2] & ~M32
            expected = keep | value & (M64 if widths[0] == "2" else M32)
        elif widths == "m":
            expected = wide[2]
        assert result[0] | result[1] << 32 == expected, (hex(x), hex(y), scc)
        assert result[2] == flag, (hex(x), hex(y), scc)


@pytest.mark.parametrize("name", sorted(EXEC_RULES))
def test_exec_instruction(name: str, outcomes: dict[str, list[Any]]) -> None:
    for values, _, _, result in outcomes[name]:
        mask = EXEC_RULES[name](values[0] | values[1] << 32, EXEC) & M64
        assert result[2] | result[3] << 32 == mask
        saved = result[0] | result[1] << 32
        assert saved == (mask if "wrexec" in name else EXEC)
