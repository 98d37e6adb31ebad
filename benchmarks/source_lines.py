"""The source line of each instruction of a gfx942 code object.

A kernel's code objects have no line tables. The same source is compiled once more with them, to
assembly: its instructions are those of the code object, one by one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pyfa.backends.hip import code, compiler
from pyfa.backends.native.plans import name_of, source_of
from pyfa.emulator import Program
from pyfa.plan import Plan

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


class Place(NamedTuple):
    """``text``: the instruction; ``lines``: the text of its source line, and of those from which
    inlined functions are called, innermost first. No line where the compiler names none."""

    text: str
    lines: tuple[str, ...]


def places(plan: Plan, arch: str, program: Program) -> list[Place]:
    """Return the place of each instruction of the code object of ``plan``, which is ``program``."""
    # Without #line a line's number is that in the flat text.
    source = re.sub(r"^#line .*$", "", source_of(plan), flags=re.MULTILINE)
    name = name_of(plan)
    text = compiler.assembly(source, arch=arch, options=code.OPTIONS)
    found = _read(text, name, source.split("\n"))
    names = [_ENCODING.sub("", each.text.split()[0]) for each in found]
    if names != list(program.kernel(name).code.names):
        raise ValueError(f"{plan}: with line tables the compiler makes other code")
    return found


def _read(assembly: str, name: str, source: list[str]) -> list[Place]:
    body = assembly.split(f"\n{name}:", 1)[1].split("\n.Lfunc_end", 1)[0]
    found, lines = list[Place](), tuple[str, ...]()
    for row in body.splitlines()[1:]:
        text, _, comment = row.partition(";")
        text = text.strip()
        if text.startswith(".loc"):
            numbers = map(int, re.findall(r":(\d+):\d+", comment))
            lines = tuple(source[number - 1].strip() for number in numbers if number)
        elif text and not text.startswith(".") and not text.endswith(":"):
            found.append(Place(text, lines))
    return found
