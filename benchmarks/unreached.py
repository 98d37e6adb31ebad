"""What no case executes of a code object, and the reasons.

A way in is a branch that was executed and never went to one of its sides. Code that was not
executed is only reached by ways in. So it has a reason if each of its ways in has one: a rule of
``RULES`` that names the source line of the branch, or of the code to which it leads, and says why
no case goes there. A rule is keyed by the text of the line, since addresses and numbers of lines
change with every edit.

A rule is *refuted* by a code object in which each branch of its line went both ways. Then the code
can be executed after all, and the rule has to go.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from source_lines import Place

from pyfa.emulator.decode import Code

NEVER, TOO_LARGE = "never", "too large"
# Of 2^64 / 2^32 and more, in the code that LLVM writes for a division of 64 bits where the numbers
# do not fit into 32: 0x5f7ffffc, a float just below 2^64.
_DIVISION = "0x5f7ffffc"


class Rule(NamedTuple):
    """``kernels``: of which it holds, none for all; ``text``: a part of the source line;
    ``machine``: a part of an instruction behind the branch; ``kind``: NEVER for code that no
    accepted call reaches, TOO_LARGE for code that only calls beyond the emulator reach."""

    kind: str
    reason: str
    kernels: tuple[str, ...] = ()
    text: str = ""
    machine: str = ""


RULES: tuple[Rule, ...] = (
    Rule(TOO_LARGE, "a 64-bit division of numbers of 2^32 and more", machine=_DIVISION),
)


class Way(NamedTuple):
    """The branch at instruction ``branch`` never went to instruction ``to``."""

    branch: int
    to: int


class Left(NamedTuple):
    """``count`` instructions of a code object that are reached by these ``ways`` alone."""

    ways: tuple[Way, ...]
    count: int


def following(code: Code, index: int) -> tuple[int, ...]:
    """Return the instructions that may come after the one at ``index``."""
    name = code.names[index]
    if name == "s_endpgm":
        return ()
    target = int(code.instructions["imm"][index])
    if name == "s_branch":
        return (target,)
    return (index + 1, target) if name.startswith("s_cbranch") else (index + 1,)


def left(code: Code, executed: Collection[int]) -> list[Left]:
    """Return what is not among the addresses ``executed``, by the ways that lead there."""
    ran = [int(pc) in executed for pc in code.instructions["pc"]]
    ways_to: dict[int, list[Way]] = collections.defaultdict(list)
    for index, was in enumerate(ran):
        if was:
            for to in following(code, index):
                if not ran[to]:
                    way = Way(index, to)
                    for reached in _reached(code, ran, to):
                        ways_to[reached].append(way)
    sums = collections.Counter(tuple(ways_to[index]) for index, was in enumerate(ran) if not was)
    return [Left(ways, count) for ways, count in sums.items()]


def _reached(code: Code, ran: Sequence[bool], begin: int) -> set[int]:
    found, waiting = {begin}, [begin]
    while waiting:
        for to in following(code, waiting.pop()):
            if not ran[to] and to not in found:
                found.add(to)
                waiting.append(to)
    return found


class Explained:
    """The rules of one code object: which hold for which of its branches."""

    def __init__(
        self,
        kernel: str,
        code: Code,
        places: Sequence[Place],
        rules: Sequence[Rule] | None = None,
    ) -> None:
        self.code, self.places = code, places
        rules = RULES if rules is None else rules
        self.rules = [rule for rule in rules if not rule.kernels or kernel in rule.kernels]

    def rule_of(self, way: Way) -> Rule | None:
        return next((rule for rule in self.rules if self._is_of(rule, way)), None)

    def line_of(self, way: Way) -> str:
        """Return the source line of the branch and, where that is inlined, of the call."""
        return " ← ".join(self._lines(way.branch, -1)[:2])

    def refuted(self, executed: Collection[int]) -> list[Rule]:
        """Return the rules whose branches all went both ways."""
        at = [int(pc) in executed for pc in self.code.instructions["pc"]]
        closed = dict[Rule, bool]()
        for way in self._branches():
            for rule in self.rules:
                if at[way.branch] and self._is_of(rule, way):
                    closed[rule] = closed.get(rule, False) or not at[way.to]
        return [rule for rule, has_closed in closed.items() if not has_closed]

    def _branches(self) -> Iterator[Way]:
        for index, name in enumerate(self.code.names):
            if name.startswith("s_cbranch"):
                for to in following(self.code, index):
                    yield Way(index, to)

    def _is_of(self, rule: Rule, way: Way) -> bool:
        if rule.machine:
            return any(rule.machine in text for text in self._block(way.to))
        lines = (*self._lines(way.branch, -1)[:1], *self._lines(way.to, 1)[:1])
        return any(rule.text in line for line in lines)

    def _lines(self, index: int, step: int) -> tuple[str, ...]:
        """Return the lines of the instruction, or of the next one that has any."""
        while 0 <= index < len(self.places) - 1 and not self.places[index].lines:
            index += step
        return self.places[index].lines

    def _block(self, index: int) -> Iterator[str]:
        """Yield the instructions from ``index`` to the next branch."""
        for place in self.places[index:]:
            yield place.text
            if place.text.startswith(("s_cbranch", "s_branch", "s_endpgm")):
                return
