"""What the commands share: where a report goes, how progress shows, how sizes read."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1  # of every --json report: raised when a field changes its meaning or goes
Progress = Callable[[int, int, str], None]

_PIPED_COLUMNS = 160  # a pipe has no width of its own, and a report cut at 80 loses its reasons
_PLAIN_SECONDS = 10.0  # between two lines of progress where nothing can be redrawn


def stdout() -> Console:
    """A rich console on stdout: plain, and wide enough not to wrap, where it is a pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """One report as JSON, under its schema number."""
    print(json.dumps({"schema": SCHEMA, "command": command, **data}, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """An aligned table without lines; the first column on the left, numbers wherever they are."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = stdout()
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A function to call with (done, total, what): a bar on a terminal's stderr, else lines."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


def _plain(title: str) -> Progress:
    last = time.monotonic()

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_SECONDS:
            last = time.monotonic()
            print(f"{title}: {done}/{total} {what}".rstrip(), file=sys.stderr)

    return show


def size(count: float) -> str:
    """``count`` bytes for people."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
