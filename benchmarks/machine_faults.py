"""Plant a fault in one gfx942 instruction: as many bytes, another meaning.

``KINDS`` are the kinds, ``faults`` all that an instruction can have. A fault is kept where what it
makes decodes to an instruction that the emulator knows, so that it stands for a programmer's or a
compiler's error and not for a damaged file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyfa.emulator import tables
from pyfa.emulator.decode import decode
from pyfa.emulator.operands import Decoded, widths_of

_NOP = 0xBF800000  # s_nop 0
KINDS = ("wait", "barrier", "offset", "register", "branch", "comparison")
_BRANCH_PAIRS = ((4, 5), (6, 7), (8, 9))  # s_cbranch_: scc0 and scc1, vccz and vccnz, execz, execnz
# What a comparison is taken for: the same with the edge on the other side, or the other way round.
_OTHERS = {
    "lt": ("le", "gt"), "le": ("lt", "ge"), "gt": ("ge", "lt"), "ge": ("gt", "le"),
    "eq": ("lg", "ne", "neq"), "lg": ("eq",), "ne": ("eq",), "neq": ("eq",), "nlt": ("nle",),
    "nle": ("nlt",), "ngt": ("nge",), "nge": ("ngt",),
}  # fmt: skip


class Fault(NamedTuple):
    """``kind``, and the two dwords that stand in the place of an instruction's first two."""

    kind: str
    low: int
    high: int


def faults(low: int, high: int) -> list[Fault]:
    """All faults of the instruction that begins with these dwords."""
    before = decode(low, high)
    if not before.known:
        return []
    found = []
    for fault in _changed(before, low, high):
        after = decode(fault.low, fault.high)
        if after.known and (after.size == before.size or fault.low == _NOP):
            found.append(fault)
    return found


def _changed(one: Decoded, low: int, high: int) -> Iterator[Fault]:
    if one.name == "s_waitcnt":
        yield Fault("wait", _NOP, high)
    elif one.name == "s_barrier":
        yield Fault("barrier", _NOP, high)
    elif low >> 23 == 0b101111111:
        opcode = low >> 16 & 0x7F
        if any(opcode in pair for pair in _BRANCH_PAIRS):
            yield Fault("branch", low ^ 1 << 16, high)
    else:
        yield from _offsets(one, low, high)
        yield from _comparisons(one, low, high)
        yield from _registers(one, low, high)


def _offsets(one: Decoded, low: int, high: int) -> Iterator[Fault]:
    """One bit of an offset in bytes, from that of 4 bytes on."""
    format_bits = low >> 26
    places = {0b110110: range(2, 14), 0b110111: range(2, 11), 0b111000: range(2, 11)}
    bits = places.get(format_bits, range(0))
    if "permute" in one.name:
        bits = range(2, 8)  # of a lane's number: higher ones mean nothing
    for bit in bits:
        yield Fault("offset", low ^ 1 << bit, high)
    if format_bits == 0b110000 and low >> 17 & 1:
        for bit in range(2, 9):
            yield Fault("offset", low, high ^ 1 << bit)


def _comparisons(one: Decoded, low: int, high: int) -> Iterator[Fault]:
    for table, at, mask in (
        (tables.VOPC, 17, 0xFF) if low >> 25 == 0b0111110 else (tables.VOPC, 16, 0x3FF),
        (tables.SOPC, 16, 0x7F),
        (tables.SOPK, 23, 0x1F),
    ):
        opcode = low >> at & mask
        if table.get(opcode) != one.name or "_cmp" not in one.name:
            continue
        numbers = {name: number for number, name in table.items()}
        parts = one.name.split("_")
        for other in _OTHERS.get(parts[2], ()):
            name = "_".join((*parts[:2], other, *parts[3:]))
            if name in numbers:
                yield Fault("comparison", low & ~(mask << at) | numbers[name] << at, high)
        return


def _registers(one: Decoded, low: int, high: int) -> Iterator[Fault]:
    """The next register in the place of one: the lowest bit of its number."""
    if low >> 31 == 0:  # VOP1, VOP2, VOPC: a VGPR source, the destination
        if low & 0x100 and low & 0x1FF not in (249, 250):
            yield Fault("register", low ^ 1, high)
        if low >> 25 not in (0b0111110, 0b0111111):
            yield Fault("register", low ^ 1 << 9, high)
        if low >> 25 != 0b0111110:
            yield Fault("register", low ^ 1 << 17, high)
    elif low >> 26 == 0b110100:  # VOP3 and VOP3P: each source that is a VGPR, the destination
        for number, code in enumerate(one.src):
            if code >= 256 and high >> 9 * number + 8 & 1:
                yield Fault("register", low, high ^ 1 << 9 * number)
        if "cmp" not in one.name:
            yield Fault("register", low ^ 1, high)
    elif low >> 30 == 2 and low >> 23 not in (0b101111111,) and low >> 28 != 0b1011:
        if low & 0xFF < 100:  # SOP2, SOP1, SOPC: the first source, where it is a register
            yield Fault("register", low ^ 1, high)
    elif low >> 26 in (0b110110, 0b110111, 0b111000):  # LDS and memory: address, data
        to, _, address, data, _ = widths_of(one)
        held = one.name.startswith("buffer_")  # one field is a load's destination, a store's data
        for bit, used in ((0, address and low >> 26 == 0b110110), (8, data), (24, to and not held)):
            if used:
                yield Fault("register", low, high ^ 1 << bit)
