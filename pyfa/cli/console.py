"""Output functions that the commands share: reports, progress, formatted sizes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import layout

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1  # of every --json report: raised when a field changes its meaning or goes
Progress = Callable[[int, int, str], None]

_PIPED_COLUMNS = 160  # a pipe has no width of its own, and a report cut at 80 loses its reasons
_TEXT_COLUMNS = 100
_PLAIN_SECONDS = 10.0  # between two lines of progress where nothing can be redrawn


def columns() -> int:
    """Return the width of a report: ``COLUMNS``, else the terminal's, else that of a pipe."""
    try:
        chosen = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        chosen = 0
    if chosen > 0:
        return chosen
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_COLUMNS


def stdout() -> Console:
    """Return a rich console on stdout with the width ``columns``."""
    from rich.console import Console

    return Console(file=sys.stdout, width=columns(), highlight=False, markup=False, emoji=False)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """Print one report as JSON, with its schema number."""
    print(json.dumps({"schema": SCHEMA, "command": command, **data}, indent=2, default=str))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an aligned table without lines, which fits the width and breaks no word."""
    for line in layout.table(head, rows, columns()):
        print(line)


def print_text(text: str, indent: str = "") -> None:
    """Print a paragraph, at most 100 columns wide: longer lines are hard to read."""
    for line in layout.paragraph(text, min(columns(), _TEXT_COLUMNS), indent):
        print(line)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Return a function that takes (done, total, what): it draws a bar on a terminal's stderr, else
    lines."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


def _plain(title: str) -> Progress:
    begin = last = time.monotonic()

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_SECONDS:
            last = now
            rest = f"about {_minutes((now - begin) / done * (total - done))} left" if done else ""
            line = " ".join(part for part in (f"{done}/{total}", rest, what) if part)
            print(f"{title}: {line}", file=sys.stderr)

    return show


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def size(count: float) -> str:
    """Format ``count`` bytes for people."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
