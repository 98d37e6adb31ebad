"""Traces written by hand, and constants that make their clocks countable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyfa.emulator.decode import Code
from pyfa.emulator.timing import constants, issue, program

# Nothing costs more than its issue, but for what a test sets.
PLAIN = {
    **constants.of(constants.ISSUE, "low"),
    "barrier": 0.0,
    "branch": 0.0,
    "transcendental_apart": 0.0,
    "matrix_apart": 0.0,
    "matrix_extra": 12.0,
    "transcendental_extra": 4.0,
    "lds_latency": 100.0,
    "lds_queue": 64.0,
    "lds_direct_bytes": 64.0,
    "l1_latency": 100.0,
    "l2_latency": 300.0,
    "l2_bytes": 64.0,
    "fetch_bytes": 64.0,
}


class I(NamedTuple):  # noqa: E742
    """One instruction: registers are ranges (first, count); ``clocks`` and ``lines`` of memory."""

    kind: str
    reads: Sequence[tuple[int, int]] = ()
    write: tuple[int, int] = (0, 0)
    amount: int = 1
    clocks: int = 0
    lines: Sequence[int] = ()
    taken: bool = False
    vmcnt: int = 63
    lgkmcnt: int = 15


def mfma(to: int, a: int = 100, c: int = 0, passes: int = 8) -> I:
    """A product of 16 registers; ``c`` is its addend where that is not ``to``."""
    return I("matrix", ((a, 2), (a + 2, 2), (c or to, 16)), (to, 16), passes)


def valu(to: int, source: int = 200) -> I:
    return I("vector", ((source, 1),), (to, 1))


def exp(to: int, source: int = 200) -> I:
    return I("transcendental", ((source, 1),), (to, 1))


def turns(
    *waves: Sequence[I], simds: Sequence[int] = (), groups: Sequence[int] = ()
) -> issue.Turns:
    """Wavefronts side by side, each on the SIMD of its number if ``simds`` does not say."""
    steps = np.zeros(sum(map(len, waves)), program.STEP)
    made = np.zeros(len(steps), issue.TURN)
    lines: list[int] = []
    table = np.zeros(len(waves), issue.WAVE)
    at = 0
    for number, wave in enumerate(waves):
        simd = simds[number] if simds else number % 4
        table[number] = (at, len(wave), simd, groups[number] if groups else 0, 0.0)
        for one in wave:
            step = steps[at]
            for n, (first, count) in enumerate(one.reads):
                step["read"][n], step["reads"][n] = first, count
            step["write"], step["writes"] = one.write
            step["kind"], step["amount"], step["bytes"] = program.NUMBER[one.kind], one.amount, 8
            step["vmcnt"], step["lgkmcnt"] = one.vmcnt, one.lgkmcnt
            made[at] = (at, len(lines), one.clocks, len(one.lines), one.taken, (0, 0, 0))
            lines += one.lines
            at += 1
    code = Code(np.zeros(0), (), 0, np.zeros(0, np.uint32))
    return issue.Turns(code, steps, made, np.array(lines, np.uint64), table)


def run(some: issue.Turns, **changed: float) -> issue.Result:
    return issue.run(some, some.waves, {**PLAIN, **changed})


def clocks(*waves: Sequence[I], simds: Sequence[int] = (), **changed: float) -> list[list[int]]:
    """The clock at which each instruction of each wavefront issues."""
    some = turns(*waves, simds=simds)
    at = run(some, **changed).issued
    found, first = [], 0
    for wave in waves:
        found.append([int(x) for x in at[first : first + len(wave)]])
        first += len(wave)
    return found


def lost(result: issue.Result) -> dict[str, Any]:
    return dict(zip(issue.CAUSES, result.lost.sum(axis=0).tolist(), strict=True))
