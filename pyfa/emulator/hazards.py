"""Wait states: checks pairs of instructions that gfx942 hardware does not keep apart.

For such pairs the compiler's hazard recognizer inserts ``s_nop``, but it does not look into inline
assembly. This module checks every instruction of a code object against the table below, along every
path of control flow from it.

An instruction counts as one wait state, ``s_nop N`` as N + 1. An undecoded instruction, or a jump
to a register, is also a finding, because it cannot be checked. Float64 matrix instructions are not
decoded, so the table has no rows for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyfa import codeobject
from pyfa.emulator import decode, tables
from pyfa.emulator.effects import (
    EXEC_BITS,
    EXECZ,
    HARDWARE,
    M0_BIT,
    SCALARS,
    VCC_BITS,
    VCCZ,
    Effects,
    effects_of,
)
from pyfa.emulator.operands import LITERAL, Decoded

# A rule's source is a function of LLVM's llvm/lib/Target/AMDGPU/GCNHazardRecognizer.cpp, read in
# ROCm/llvm-project at 03a23131, or the ISA's table.
ISA = "AMD Instinct MI300 ISA, 4.5: Required Software-inserted Wait States"

Registers = Callable[[Effects], int]
_MEMORY = frozenset(("vmem", "lds_dma", "lds"))


@dataclass(frozen=True)
class Rule:
    """A rule: ``states`` wait states are required between an instruction and a later one if a
    register in ``first(earlier)`` is also in ``second(later)``. The two functions return bits of
    registers, and 0 for an instruction that the rule does not apply to."""

    what: str
    first: Registers
    second: Registers
    states: int | Callable[[Effects, Effects], int]
    source: str

    def between(self, first: Effects, second: Effects) -> int:
        """Return the wait states that this pair needs if they share a register."""
        return self.states if isinstance(self.states, int) else self.states(first, second)


def _vectors(bits: int) -> int:
    return bits & ~SCALARS & ((1 << HARDWARE) - 1)


def _valu_writes(mask: int) -> Registers:
    return lambda one: one.writes & mask if one.kind == "valu" else 0


def _reads(kinds: frozenset[str], mask: int = -1) -> Registers:
    return lambda one: one.reads & mask if one.kind in kinds else 0


def _touches(one: Effects) -> int:
    """Return the vector registers that a VALU or memory instruction reads or writes."""
    return _vectors(one.reads | one.writes) if one.kind == "valu" or one.kind in _MEMORY else 0


def _overwrites(one: Effects) -> int:
    return _vectors(one.writes) if one.kind == "valu" or one.kind in _MEMORY else 0


def _matrix_writes(one: Effects) -> int:
    return one.writes if one.kind == "mfma" else 0


def _vector_writes(one: Effects) -> int:
    return _vectors(one.writes) if one.kind == "valu" else 0


def _after_matrix(first: Effects, _: Effects) -> int:
    return first.passes + (3 if first.xdl else 2)


def _after_matrix_as_c(first: Effects, second: Effects) -> int:
    if second.c == first.writes:  # the very same registers are forwarded
        return 2 if first.passes == 2 else 0
    if first.xdl:
        return first.passes + 1
    return 0 if second.xdl else first.passes


def _after_dot(first: Effects, second: Effects) -> int:
    # Between two of one kind the accumulator is forwarded; nothing of ours has them, so that C is
    # not told from A and B here, which asks for more.
    return 3


# LLVM counts a load that goes to LDS among VALU instructions too, and a matrix one.
_VALU_LIKE = frozenset(("valu", "mfma", "lds_dma"))
_LANES = ("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")
_SENDS = ("s_sendmsg", "s_ttracedata")

RULES: tuple[Rule, ...] = (
    Rule(
        "a matrix instruction writes a register that a vector or memory instruction touches",
        _matrix_writes, _touches, _after_matrix, "checkMAIVALUHazards",
    ),
    Rule(
        "a matrix instruction writes what another takes as A or B",
        _matrix_writes, lambda one: one.a_b, _after_matrix, "checkMAIHazards90A",
    ),
    Rule(
        "a matrix instruction writes what another takes as C, and not the very same registers",
        _matrix_writes, lambda one: one.c, _after_matrix_as_c, "checkMAIHazards90A",
    ),
    Rule(
        "a matrix instruction reads as C what a vector or memory instruction overwrites",
        lambda one: _vectors(one.c) if one.xdl else 0, _overwrites,
        lambda first, _: first.passes - 1, "checkMAIVALUHazards",
    ),
    Rule(
        "a vector instruction writes what a matrix instruction reads",
        lambda one: 0 if one.dot else _vector_writes(one), _reads(frozenset(("mfma",))),
        2, "checkMAIHazards90A",
    ),
    Rule(
        "a vector instruction writes EXEC before a matrix instruction",
        _valu_writes(EXEC_BITS), lambda one: EXEC_BITS if one.kind == "mfma" else 0,
        4, "checkMAIHazards90A",
    ),
    Rule(
        "a dot product writes what another instruction touches",
        lambda one: _vector_writes(one) if one.dot else 0,
        lambda one: one.reads if one.dot else _touches(one), _after_dot, "checkMAIVALUHazards",
    ),
    Rule(
        "a vector instruction writes a scalar register that a memory instruction reads",
        _valu_writes(SCALARS), _reads(frozenset(("vmem", "lds_dma")), SCALARS),
        5, "checkVMEMHazards",
    ),
    Rule(
        "a vector instruction writes a scalar register that a vector instruction reads",
        _valu_writes(SCALARS), _reads(_VALU_LIKE, SCALARS), 2, "checkVALUHazards",
    ),
    Rule(
        "a vector instruction writes the scalar register that selects a lane",
        _valu_writes(SCALARS), lambda one: one.lane_select, 4, "checkRWLaneHazards",
    ),
    Rule(
        "a vector instruction writes EXEC before a lane is read or written",
        _valu_writes(EXEC_BITS), lambda one: EXEC_BITS if one.name in _LANES else 0,
        4, "checkVALUHazards",
    ),
    Rule(
        "a vector instruction writes a register of which a lane is read",
        _vector_writes, lambda one: one.reads if one.name in _LANES[:2] else 0,
        1, "checkVALUHazards",
    ),
    Rule(
        "a vector instruction writes VCC before v_div_fmas",
        _valu_writes(VCC_BITS),
        lambda one: VCC_BITS if one.name.startswith("v_div_fmas") else 0,
        4, "checkDivFMasHazards",
    ),
    Rule(
        "a register is written that DPP reads",
        lambda one: _vectors(one.writes), lambda one: _vectors(one.reads) if one.dpp else 0,
        2, "checkDPPHazards",
    ),
    Rule(
        "a vector instruction writes EXEC before DPP",
        _valu_writes(EXEC_BITS), lambda one: EXEC_BITS if one.dpp else 0, 5, "checkDPPHazards",
    ),
    Rule(
        "a transcendental's result is read by another kind of vector instruction",
        lambda one: _vector_writes(one) if one.trans else 0,
        lambda one: _vectors(one.reads) if one.kind in _VALU_LIKE and not one.trans else 0,
        1, "checkVALUHazards",
    ),
    Rule(
        "a part of a register is written (SDWA, op_sel) that a vector instruction touches",
        lambda one: _vector_writes(one) if one.part else 0,
        lambda one: _vectors(one.reads | one.writes) if one.kind in _VALU_LIKE else 0,
        1, "checkVALUHazards",
    ),
    Rule(
        "data of a store of more than 8 bytes is overwritten by a vector instruction",
        lambda one: one.store_data,
        lambda one: _vectors(one.writes) if one.kind in ("valu", "mfma") else 0,
        2, "checkVALUHazards",
    ),
    Rule(
        "a scalar instruction writes M0 before it is used",
        lambda one: one.writes & M0_BIT if one.kind == "salu" else 0,
        lambda one: M0_BIT if one.kind == "lds_dma" or one.name in _SENDS else 0,
        1, "checkReadM0Hazards",
    ),
    Rule(
        "s_setreg writes a hardware register that s_getreg or s_setreg uses",
        lambda one: one.mode if one.name.startswith("s_setreg") else 0, lambda one: one.mode,
        2, "checkGetRegHazards, checkSetRegHazards",
    ),
    Rule(
        "a vector instruction writes VCC before VCCZ is an operand",
        _valu_writes(VCC_BITS), lambda one: VCC_BITS if one.reads >> VCCZ & 1 else 0, 5, ISA,
    ),
    Rule(
        "a vector instruction writes EXEC before EXECZ is an operand",
        _valu_writes(EXEC_BITS), lambda one: EXEC_BITS if one.reads >> EXECZ & 1 else 0, 5, ISA,
    ),
)  # fmt: skip
REACH = 19  # the most that any pair needs: 16 passes and 3


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction of a function; ``after`` are its possible successors."""

    address: int
    effects: Effects
    after: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """Two instructions, given by their addresses. There are ``have`` wait states between them, but
    ``need`` are required. ``first`` is None if an instruction cannot be checked at all."""

    what: str
    function: str
    second: int
    name: str
    first: int | None = None
    first_name: str = ""
    need: int = 0
    have: int = 0

    def __str__(self) -> str:
        place = f"{self.function} at 0x{self.second:x}: {self.name}"
        if self.first is None:
            return f"{place}: {self.what}"
        return (
            f"{place} comes {self.have} wait states after {self.first_name} at 0x{self.first:x} "
            f"and needs {self.need}: {self.what}"
        )


def check(data: bytes) -> list[Finding]:
    """Return every finding in the functions of a code object, in the order of addresses."""
    parsed = codeobject.parse(data)
    found: list[Finding] = []
    for function in parsed.functions:
        code, unknown = _functions_code(parsed.image, function)
        found += unknown
        for index in range(len(code)):
            found += _from(index, code, function.name)
    return sorted(found, key=lambda one: (one.second, one.first or 0))


_ENDS = ("s_endpgm", "s_branch", "s_setpc_b64")
_BRANCHES = frozenset(name for name in tables.SOPP.values() if "branch" in name)
_CALLS = ("s_swappc_b64", "s_call_b64")


def _functions_code(
    image: bytes, function: codeobject.Function
) -> tuple[list[Instruction], list[Finding]]:
    """Return the instructions of a function, and findings for those that cannot be checked."""
    unknown: list[Finding] = []
    addresses, decoded = [], []
    at, end = function.address, function.address + function.code_bytes
    while at < end:
        low, high = (int.from_bytes(image[at + n : at + n + 4], "little") for n in (0, 4))
        one = decode.decode(low, high)
        if not one.known:
            why = "is not decoded, so it cannot be checked"
            unknown.append(Finding(why, function.name, at, f"0x{low:08x}"))
            one = Decoded("s_nop", fields={"imm": 0})
        addresses.append(at)
        decoded.append(one)
        at += one.size
    index_of = {address: index for index, address in enumerate(addresses)}
    code = []
    for index, (address, one) in enumerate(zip(addresses, decoded, strict=True)):
        after = []
        if one.name not in _ENDS and index + 1 < len(addresses):
            after.append(index + 1)
        if one.name in _CALLS:
            unknown.append(Finding("calls another function", function.name, address, one.name))
        elif one.name in _BRANCHES or one.name == "s_setpc_b64":
            target = _target(index, addresses, decoded)
            if target in index_of:
                after.append(index_of[target])
            else:
                why = "jumps to an address that cannot be followed"
                unknown.append(Finding(why, function.name, address, one.name))
        code.append(Instruction(address, effects_of(one), tuple(after)))
    return code, unknown


def _target(index: int, addresses: list[int], decoded: list[Decoded]) -> int | None:
    """Return the target of a branch with a 16-bit offset, or of the four instructions of a far one:
    s_getpc_b64 s[n:n+1]; s_add_u32 sn, sn, low; s_addc_u32 sm, sm, high; s_setpc_b64 s[n:n+1]. None
    if it cannot be determined."""
    one = decoded[index]
    if one.name in _BRANCHES:
        return addresses[index] + 4 + 4 * one.fields["imm"]
    if index < 3:
        return None
    ask, low, high = decoded[index - 3 : index]
    names = tuple(each.name for each in (ask, low, high))
    at, n = addresses[index - 2], one.src[0]
    if names != ("s_getpc_b64", "s_add_u32", "s_addc_u32"):
        return None
    places = [(each.fields["dst"], each.src[0]) for each in (low, high)]
    if ask.fields["dst"] != n or places != [(n, n), (n + 1, n + 1)]:
        return None
    parts = [_constant(each, each.src[1]) for each in (low, high)]
    if None in parts:
        return None
    return (at + (parts[0] or 0) + ((parts[1] or 0) << 32)) & (1 << 64) - 1


def _constant(one: Decoded, code: int) -> int | None:
    """Return the 32 bits of a scalar operand that is a constant; None if it is a register."""
    if code == LITERAL:
        return one.fields["literal"]
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & 0xFFFFFFFF
    return None


def _from(start: int, code: list[Instruction], function: str) -> Iterator[Finding]:
    """Yield a finding for each instruction that, on any path, comes too soon after instruction
    ``start``."""
    first = code[start].effects
    begun = tuple((rule, shared) for rule in RULES if (shared := rule.first(first)))
    if not begun:
        return
    worst: dict[tuple[Rule, int], tuple[int, int]] = {}
    ways = [(index, 0, begun) for index in code[start].after]
    seen = set()
    while ways:
        index, states, rules = ways.pop()
        second = code[index].effects
        left = []
        for rule, shared in rules:
            need = 0
            if shared & rule.second(second):
                need = rule.between(first, second)
                if states < need and states <= worst.get((rule, index), (0, states))[1]:
                    worst[rule, index] = need, states
            # The nearest writer counts: what `second` writes in the same way is its own affair.
            shared &= ~rule.first(second)
            if shared and states + second.states < _reach(rule, first):
                left.append((rule, shared))
        if left:
            way = tuple(left)
            for after in code[index].after:
                key = after, states + second.states, tuple((id(r), s) for r, s in way)
                if key not in seen:
                    seen.add(key)
                    ways.append((after, states + second.states, way))
    for (rule, index), (need, states) in worst.items():
        second_one = code[index]
        yield Finding(
            rule.what, function, second_one.address, second_one.effects.name,
            code[start].address, first.name, need, states,
        )  # fmt: skip


def _reach(rule: Rule, first: Effects) -> int:
    """Return the number of wait states after ``first`` beyond which ``rule`` has no effect."""
    return rule.states if isinstance(rule.states, int) else min(REACH, first.passes + 3)
