"""Faults in the source of a CUDA kernel: which there are, and the source with one in it.

Faults are a comparison with its edge on the other side, && for ||, + for -, max for min, and a call
left out whose result nobody takes: barriers, waits, stores, fences. ``hold`` and ``pin`` are no
such calls. They are no instruction, but tell the compiler how long a value stays in its register.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MARK = "pyfa_executed"

_SWAPS = {
    "comparison": ((" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "),
                   (" == ", " != "), (" != ", " == ")),
    "logic": ((" && ", " || "), (" || ", " && ")),
    "arithmetic": ((" + ", " - "), (" - ", " + "), (" * ", " + ")),
    "extremum": (("max(", "min("), ("min(", "max(")),
}  # fmt: skip
CALL_LEFT_OUT = "call left out"
_CALL = re.compile(
    r"^\s*(?:if \([^;{}]*\) )?(?!hold\(|pin\()[A-Za-z_][\w:]*(?:<[^;()]*>)?\([^;{}]*\);\s*$"
)
_NO_CODE = ("#", "//", "static_assert", "template", "DEVICE", "constexpr", "extern", "struct")
# The end of a statement, of what stands in front of one, or of a line of the preprocessor.
_ENDS = re.compile(r"^\s*#|[;{}:>]$|^$|\belse$|^\s*(if|for|while) \(.*\)$")


class Fault(NamedTuple):
    """``new`` in the place of ``old`` in one line of a flattened source. ``before``: the code of
    the line in front of it, which tells equal lines apart."""

    kind: str
    line: int
    old: str
    new: str
    before: str = ""


def code_of(line: str) -> str:
    return line.split("//")[0].strip()


def in_front(source: str, number: int) -> str:
    """Return the code of the three lines in front of a line: what tells equal lines apart."""
    code = map(code_of, source.splitlines()[:number])
    return "\n".join([line for line in code if line][-3:])


def faults(source: str) -> Iterator[Fault]:
    """Yield all faults that can be planted in a flattened source."""
    before = ""
    for number, line in enumerate(source.splitlines()):
        text = line.split("//")[0]
        if not text.strip():
            continue
        no_code = text.strip().startswith(_NO_CODE) or before.endswith("\\")
        if not (no_code or "asm" in text or '"' in text):
            for kind, swaps in _SWAPS.items():
                for old, new in swaps:
                    at = text.find(old)
                    while at >= 0:
                        changed = text[:at] + new + text[at + len(old) :]
                        yield Fault(kind, number, line, changed, before)
                        at = text.find(old, at + 1)
            if _CALL.match(text):
                yield Fault(CALL_LEFT_OUT, number, line, "", before)
        before = text.strip()


def planted(source: str, fault: Fault) -> str:
    """Return the source with the fault."""
    lines = source.splitlines()
    assert lines[fault.line] == fault.old
    lines[fault.line] = fault.new
    return "\n".join(lines) + "\n"


def marked(source: str, fault: Fault) -> str:
    """Return the source with a mark where the fault would be: at the beginning of its
    statement."""
    lines = source.splitlines()
    number = fault.line
    while number and not _ENDS.search(lines[number - 1].split("//")[0].rstrip()):
        number -= 1
    line = lines[number]
    for begin in ("if (", "while (", "return ", "for ("):
        at = line.find(begin)
        if at >= 0 and line[:at].strip() in ("", "}", "else", "} else"):
            at = line.find("; ", at) + 2 if begin == "for (" else at + len(begin)
            empty = line[at : at + 1] in (";", ")")
            lines[number] = f"{line[:at]}{MARK} = 1{'' if empty else ', '}{line[at:]}"
            break
    else:
        lines[number] = f"{MARK} = 1; {line}"
    return "\n".join([f'extern "C" __device__ volatile int {MARK};', *lines]) + "\n"


def found_again(source: str, line: int, old: str, new: str) -> Fault | None:
    """Return the fault of ``source`` that makes ``new`` of ``old``, the nearest to ``line``; None
    if there is none. Both are without indentation and comment."""
    there = [
        fault for fault in faults(source) if (code_of(fault.old), code_of(fault.new)) == (old, new)
    ]
    return min(there, key=lambda fault: abs(fault.line - line), default=None)
