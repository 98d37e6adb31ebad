"""Atomics one by one, with and without the old value: global, flat, buffer and LDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_instructions import BYTES, WAIT, U, launch, registers


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 & 1 else x


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 & 1 else x


def floats(kind: Any, function: Callable[[Any, Any], Any]) -> Callable[[int, int], int]:
    size = np.dtype(kind).itemsize
    whole = {4: np.uint32, 8: np.uint64}[size]

    def result(x: int, y: int) -> int:
        with np.errstate(all="ignore"):
            value = function(*(np.array([v], whole).view(kind)[0] for v in (x, y)))
        return int(np.array([value], kind).view(whole)[0])

    return result


def pair(
    convert: Callable[[int], float], back: Callable[[float], int]
) -> Callable[[int, int], int]:
    return lambda x, y: sum(
        back(convert(x >> n & 65535) + convert(y >> n & 65535)) << n for n in (0, 16)
    )


def half(x: int) -> Any:
    return np.array([x], np.uint16).view(np.float16)[0].astype(np.float32)


def bfloat(x: int) -> Any:
    return np.array([x << 16], U).view(np.float32)[0]


def to_half(x: Any) -> int:
    return int(np.array([x]).astype(np.float16).view(np.uint16)[0])


def to_bfloat(x: Any) -> int:
    bits = int(np.array([x], np.float32).view(U)[0])
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


INTEGER: dict[str, Callable[[int, int], int]] = {
    "swap": lambda x, y: y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "umin": min,
    "umax": max,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}
ATOMICS: dict[str, tuple[int, str, Callable[[int, int], int]]] = {
    **{name: (4, "u", f) for name, f in INTEGER.items()},
    **{f"{name}_x2": (8, "u", f) for name, f in INTEGER.items()},
    "smin": (4, "u", lambda x, y: min(x, y, key=s32)),
    "smax": (4, "u", lambda x, y: max(x, y, key=s32)),
    "smin_x2": (8, "u", lambda x, y: min(x, y, key=s64)),
    "smax_x2": (8, "u", lambda x, y: max(x, y, key=s64)),
    "inc": (4, "u", lambda x, y: 0 if x >= y else x + 1),
    "dec": (4, "u", lambda x, y: y if x == 0 or x > y else x - 1),
    "add_f32": (4, "f", floats(np.float32, lambda x, y: x + y)),
    "add_f64": (8, "d", floats(np.float64, lambda x, y: x + y)),
    "min_f32": (4, "f", floats(np.float32, min)),
    "max_f32": (4, "f", floats(np.float32, max)),
    "min_f64": (8, "d", floats(np.float64, min)),
    "max_f64": (8, "d", floats(np.float64, max)),
    "pk_add_f16": (4, "h", pair(half, to_half)),
    "pk_add_bf16": (4, "b", pair(bfloat, to_bfloat)),
    "cmpswap": (4, "u", lambda x, y: y),
    "cmpswap_x2": (8, "u", lambda x, y: y),
}
DS_NAMES = {
    "swap": "wrxchg_rtn_b",
    "umin": "min_u",
    "umax": "max_u",
    "smin": "min_i",
    "smax": "max_i",
    "and": "and_b",
    "or": "or_b",
    "xor": "xor_b",
    "add": "add_u",
    "sub": "sub_u",
    "inc": "inc_u",
    "dec": "dec_u",
    "cmpswap": "cmpst_b",
    "add_f32": "add_f",
    "add_f64": "add_f",
    "min_f32": "min_f",
    "max_f32": "max_f",
    "pk_add_f16": "pk_add_f",
    "pk_add_bf16": "pk_add_bf",
}


def operands(kind: str, seed: int) -> Any:
    """(64 lanes, 16 dwords): what memory holds, then the operand, as the type's ordinary values."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((64, 16), U)
    if kind == "u":
        rows[:] = rng.choice(
            [
                rng.integers(0, 1 << 32, (64, 16), dtype=np.uint64).astype(U),
                rng.integers(0, 3, (64, 16)).astype(U),
            ]
        )
    elif kind == "d":
        rows[:] = rng.standard_normal((64, 8)).view(U)
    elif kind == "h":
        rows[:] = rng.standard_normal((64, 32)).astype(np.float16).view(U)
    elif kind == "b":
        rows[:] = rng.standard_normal((64, 16)).astype(np.float32).view(U) & U(0xFFFF0000)
        rows |= rng.standard_normal((64, 16)).astype(np.float32).view(U) >> U(16)
    else:
        rows[:] = rng.standard_normal((64, 16)).astype(np.float32).view(U)
    return rows


def cases(place: str) -> list[tuple[str, str, int, str, Any, bool, int]]:
    """name, text, bytes, kind, function, whether it returns the old value, seed."""
    found = []
    for number, (name, (size, kind, function)) in enumerate(ATOMICS.items()):
        rows = size // 4
        data_in = registers(2 * rows if "cmpswap" in name else rows, 24)
        for returns in (False, True):
            glc = " sc0" if returns else ""
            to = registers(rows) + ", " if returns else ""
            if place == "buffer":
                if name in ("pk_add_bf16", "min_f32", "max_f32"):
                    continue
                moved = "".join(f"v_mov_b32 v{8 + n}, v{24 + n}\n" for n in range(4))
                value = registers(2 * rows if "cmpswap" in name else rows)
                text = f"{moved}buffer_atomic_{name} {value}, v1, s[12:15], 0 offen{glc}"
                full = f"buffer_atomic_{name}"
            elif place in ("global", "flat"):
                if name in ("min_f32", "max_f32"):
                    continue
                off = ", off" if place == "global" else ""
                text = f"{place}_atomic_{name} {to}v[4:5], {data_in}{off}{glc}"
                full = f"{place}_atomic_{name}"
            else:
                base = name.removesuffix("_x2")
                if base not in DS_NAMES or (name in ("inc_x2", "dec_x2")):
                    continue
                stem, bits = DS_NAMES[base], 8 * size
                if "pk_add" in name:
                    bits = 16
                if base == "swap" and not returns:
                    continue
                head, _, tail = stem.rpartition("_")
                full = (
                    f"ds_{stem}{bits}"
                    if base == "swap" or not returns
                    else (f"ds_{head}_rtn_{tail}{bits}")
                )
                both = f"{registers(rows, 24 + rows)}, " if "cmpswap" in name else ""
                text = f"{full} {to}v1, {both}{registers(rows, 24)}"
            found.append((name, text, size, kind, function, returns, number))
    return found


@pytest.mark.parametrize("place", ["global", "flat", "buffer", "ds"])
def test_atomics(place: str) -> None:
    """Memory holds dwords 0:1 of a lane's row, the operand is 4:5, a comparand 6:7 (or equal)."""
    found, inputs, body = cases(place), [], f"v_mov_b32 v30, {BYTES}\nv_mov_b32 v31, 0\n"
    for name, text, size, kind, _, returns, seed in found:
        rows = operands(kind, seed)
        if "cmpswap" in name:
            rows[::2, 4 + size // 4 : 4 + size // 2] = rows[::2, 0 : size // 4]
        inputs.append(rows)
        body += "global_load_dwordx2 v[12:13], v[2:3], off\n"
        body += "global_load_dwordx4 v[24:27], v[2:3], off offset:16\n"
        body += (
            WAIT + "v_mov_b32 v8, 0\nv_mov_b32 v9, 0\nglobal_store_dwordx2 v[4:5], v[12:13], off\n"
        )
        body += "ds_write_b64 v1, v[12:13]\n" + WAIT + text + "\n" + WAIT
        if place == "ds":
            body += (
                "ds_read_b64 v[12:13], v1\n" + WAIT + "global_store_dwordx2 v[4:5], v[12:13], off\n"
            )
        if returns:
            body += "global_store_dwordx2 v[4:5], v[8:9], off offset:8\n"
        body += (
            WAIT
            + "v_lshl_add_u64 v[2:3], v[30:31], 0, v[2:3]\n"
            + "v_lshl_add_u64 v[4:5], v[30:31], 0, v[4:5]\n"
        )
        body += f"s_add_u32 s12, s12, {BYTES}\ns_addc_u32 s13, s13, 0\n"
    outputs = np.zeros((len(found), 64, 16), U)
    launch(body, np.array(inputs), outputs)
    for (name, text, size, _, function, returns, _), rows, out in zip(
        found, inputs, outputs, strict=True
    ):
        whole = np.uint32 if size == 4 else np.uint64
        n = size // 4
        for lane in range(64):
            old, data_in, compare = (
                int(rows[lane, a : a + n].view(whole)[0]) for a in (0, 4, 4 + n)
            )
            new = function(old, data_in) & ((1 << 8 * size) - 1)
            if "cmpswap" in name:
                new = data_in if old == compare else old
            assert int(out[lane, :n].view(whole)[0]) == new, (text, lane, hex(old), hex(data_in))
            if returns:
                assert int(out[lane, 2 : 2 + n].view(whole)[0]) == old, (text, lane)
