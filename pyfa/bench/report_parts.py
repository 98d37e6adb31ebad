"""The elements of a section of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A picture in a report. ``svg`` is an ``<svg>`` element, ``caption`` says what the picture
    shows, and ``name`` is unique in the report."""

    svg: str
    caption: str
    name: str

    @property
    def file(self) -> str:
        """Return the picture's file name."""
        words = re.sub(r"[^\w]+", "-", self.name.replace(".json", ""))
        return f"{words.strip('-')}.svg"


def drawn(made: Figure, name: str, caption: str) -> Picture:
    return Picture(charts.svg(made, name, caption), caption, name)


class Cell(NamedTuple):
    """A cell of a table. ``kind`` is ``best``, ``bad`` or empty, and decides how the cell is
    highlighted."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """A table in a report. ``text``: whether cells contain sentences, which may wrap."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    text: bool = False


CORRECT, SPEED, MEMORY, MI300X = "correct", "speed", "memory", "mi300x"
QUESTIONS = {
    CORRECT: "Is it correct?",
    SPEED: "How fast is it, compared with other libraries?",
    MEMORY: "How much memory, and how many bytes?",
    MI300X: "What was computed for MI300X?",
}


class Section(NamedTuple):
    """A section of a report. ``shows`` says in a sentence or two what the section shows, ``how``
    how this was measured, and ``where`` in which environment. ``answer`` answers ``question`` in
    one line. ``means`` has, for each peer, the geometric mean of pyfa's speed over the peer's, in
    ``suite`` on ``ran_on``."""

    question: str
    order: int
    title: str
    shows: str
    how: str
    where: str
    figures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    answer: str = ""
    suite: str = ""
    ran_on: str = ""
    means: Mapping[str, float] = {}


def gpu(data: Mapping[str, Any]) -> str:
    """Return the device on which a result was measured: a GPU's name, or the CPU."""
    return str(data["environment"].get("gpu") or "CPU")


def where(name: str, data: Mapping[str, Any]) -> str:
    """Return a description of the environment in one line, with the clocks if they were
    recorded."""
    found = data["environment"]
    machine = found.get("gpu") or f"{found.get('cpu')}, {found.get('cores')} cores"
    parts = [f"{name}: {machine}"]
    if found.get("driver"):
        parts.append(f"driver {found['driver']}")
    parts += [f"Python {found.get('python')}", f"torch {found['torch']}"]
    if found.get("triton"):
        parts.append(f"Triton {found['triton']}")
    parts += [f"pyfa {found['pyfa']} ({found['commit']})", str(found["date"])]
    before, after = ((data.get("clocks") or {}).get(time) or {} for time in ("before", "after"))
    if before and after:
        parts.append(
            f"SM clock {before['clocks.sm']} MHz before and {after['clocks.sm']} after, "
            f"{after['power.draw']} W, {after['temperature.gpu']} °C"
        )
    return ", ".join(parts) + "."


def plain(rows: Sequence[Sequence[object]]) -> list[list[Cell]]:
    return [[Cell(str(text)) for text in row] for row in rows]
