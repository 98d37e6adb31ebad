"""The resources of an instruction in a compute unit: its pipe, its duration, its registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyfa.emulator import native
from pyfa.emulator.counters import MFMA_CLOCKS
from pyfa.emulator.decode import Code
from pyfa.emulator.operands import AGPR, NONE, VGPR

# The layout of `Step` in core/timing.c, and its kinds by number.
STEP = np.dtype(
    [
        ("read", "u2", (4,)), ("reads", "u2", (4,)), ("write", "u2"), ("writes", "u2"),
        ("kind", "u1"), ("bytes", "u1"), ("vmcnt", "u1"), ("lgkmcnt", "u1"), ("amount", "u2"),
        ("reserved", "u2"),
    ],
    align=True,
)  # fmt: skip
KINDS = (
    "scalar", "vector", "transcendental", "matrix", "lds", "load", "load_to_lds", "store", "atomic",
    "scalar_load", "jump", "barrier", "wait", "idle", "priority", "end",
)  # fmt: skip
NUMBER = {name: number for number, name in enumerate(KINDS)}
QUANTUM = 4
_GROUP_KIND = {
    "salu": "scalar", "valu": "vector", "trans": "transcendental", "mfma": "matrix", "lds": "lds",
    "smem": "scalar_load", "branch": "jump", "barrier": "barrier", "waitcnt": "wait",
}  # fmt: skip
_SIZES = {
    "b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128":
    16, "f32": 4, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f64": 8,
}  # fmt: skip


def steps_of(code: Code) -> npt.NDArray[Any]:
    """Return one STEP for each instruction of ``code``."""
    group_of = native.group_of()
    steps = np.zeros(len(code.instructions), STEP)
    for number, (name, row) in enumerate(zip(code.names, code.instructions, strict=True)):
        _fill(steps, number, name, row, group_of.get(name, "salu"))
    return steps


def lds_size(name: str) -> int:
    """Return the bytes per lane of one access of a DS instruction (read2 and write2 make two)."""
    for part in reversed(name.split("_")):
        if part in _SIZES:
            return _SIZES[part]
    return 4


def is_lds_store(name: str) -> bool:
    """Return whether a DS instruction writes or updates."""
    return not name.startswith("ds_read")


def _fill(steps: npt.NDArray[Any], number: int, name: str, row: Any, group: str) -> None:
    step = steps[number]
    step["bytes"] = int(row["size"])
    step["vmcnt"], step["lgkmcnt"] = 63, 15
    kind = _kind(name, row, group)
    step["kind"] = NUMBER[kind]
    step["amount"] = _amount(name, row, kind)
    if kind == "wait":
        immediate = int(row["imm"])
        step["vmcnt"] = (immediate & 15) | (immediate >> 10 & 48)
        step["lgkmcnt"] = immediate >> 8 & 15
    sources, result = _widths(name, kind)
    for n in range(3):
        _range(step, ("read", "reads", n), int(row["src"][n]), sources[n])
    _range(step, ("write", "writes", None), int(row["dst"]), result)


def _kind(name: str, row: Any, group: str) -> str:
    if name == "s_endpgm":
        return "end"
    if name == "s_setprio":
        return "priority"
    if name in ("s_nop", "s_sleep"):
        return "idle"
    if group == "vmem":
        if "atomic" in name:
            return "atomic"
        if "store" in name:
            return "store"
        return "load_to_lds" if row["lds"] or "load_lds" in name else "load"
    return _GROUP_KIND[group]


def _amount(name: str, row: Any, kind: str) -> int:
    if kind == "matrix":
        return MFMA_CLOCKS[name] // QUANTUM
    if kind == "idle":  # s_nop: wait states less one; s_sleep: 64 clocks each
        return 1 + (int(row["imm"]) & 15 if name == "s_nop" else 16 * (int(row["imm"]) & 127))
    if kind == "priority":
        return int(row["imm"]) & 3
    if kind == "vector" and (
        "_mul_lo_" in name or "_mul_hi_" in name or name.startswith("v_mad_u64")
    ):
        return 4  # integer products of 32 bits: quarter rate (LLVM's model)
    return 1


def _widths(name: str, kind: str) -> tuple[tuple[int, int, int], int]:
    """Return the registers of the three sources and of the result; 0 if the model does not track
    them."""
    if kind == "matrix":
        blocks = next((int(p[:-1]) for p in name.split("_") if p in ("2b", "4b", "16b")), 1)
        shape = next(p for p in name.split("_") if p.count("x") == 2)
        m, n, _ = (int(x) for x in shape.split("x"))
        operand = 1 if name.endswith("_f32") and "x8_" not in name and "x4_" in name else 2
        return (operand, operand, m * n * blocks // 64), m * n * blocks // 64
    if kind in ("vector", "transcendental"):
        wide = 2 if name.startswith("v_pk_") and name.endswith("_f32") else 1
        wide = 2 if name.endswith(("_f64", "_u64", "_i64", "_b64")) else wide
        return (wide, wide, wide), wide
    if kind == "lds":
        words = max(1, lds_size(name) // 4)
        return (1, words, words), 0
    if kind in ("store", "atomic"):
        words = next((int(name[-1]) for w in ("x2", "x3", "x4") if name.endswith(w)), 1)
        return (2 if name.startswith(("global", "flat")) else 1, words, 0), 0
    if kind in ("load", "load_to_lds"):
        return (2 if name.startswith(("global", "flat")) else 1, 0, 0), 0
    return (0, 0, 0), 0


def _range(step: Any, place: tuple[str, str, int | None], code: int, count: int) -> None:
    """Return the registers of an operand, AGPRs after the VGPRs; scalars and constants are not
    tracked."""
    if code == NONE or code < VGPR or not count:
        return
    first = code - VGPR if code < AGPR else code - AGPR + 256
    name, counts, at = place
    if at is None:
        step[name], step[counts] = first, count
    else:
        step[name][at], step[counts][at] = first, count
