"""Text that fits a width: paragraphs and tables, in which no word is ever broken.

A table that is too wide wraps its cells between words. If it is still too wide, it is transposed,
or each of its rows becomes a block. A word that is longer than the width (a path, a digest) gets
its own line, which is then too long.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_GAP = "  "
_NARROWEST = 24  # a sentence in a narrower column is no longer read as one


def paragraph(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap ``text`` in lines of at most ``width``, later ones after ``indent``."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table, its header first."""
    whole = [list(columns), *(list(row) for row in rows)]
    widths = _widths(whole, width)
    if widths is not None:
        return [line for row in whole for line in _row(row, widths)]
    turned = [list(row) for row in zip(*whole, strict=True)]
    widths = _widths(turned, width)
    if widths is not None:
        return [line for row in turned for line in _row(row, widths)]
    return [line for row in rows for line in _block(columns, row, width)]


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _widths(rows: list[list[str]], width: int) -> list[int] | None:
    """Return the width of each column; wide ones share what is left. None if they do not fit."""
    wanted = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [
        max(max(map(_longest_word, column)), min(want, _NARROWEST))
        for want, column in zip(wanted, zip(*rows, strict=True), strict=True)
    ]
    room = width - len(_GAP) * (len(wanted) - 1)
    if sum(least) > room:
        return None
    widths = list(least)
    # Narrow columns first: what they need is theirs, the widest take the rest.
    for index in sorted(range(len(widths)), key=lambda i: wanted[i]):
        spare = room - sum(widths)
        widths[index] += min(spare, wanted[index] - widths[index])
    return widths


def _row(cells: list[str], widths: list[int]) -> list[str]:
    wrapped = [
        paragraph(cell, max(1, width)) or [""] for cell, width in zip(cells, widths, strict=True)
    ]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [
            (cell[number] if number < len(cell) else "").ljust(width)
            for cell, width in zip(wrapped, widths, strict=True)
        ]
        lines.append(_GAP.join(parts).rstrip())
    return lines


def _block(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return one row as a block: its first cell, then a line for each other that is not empty."""
    lines = [row[0]]
    label = max(map(len, columns[1:]), default=0)
    for name, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            head = f"  {name:<{label}}  " if label else "  "
            lines += paragraph(f"{head}{cell}", width, " " * len(head)) or [head + cell]
    return lines
