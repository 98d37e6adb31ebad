"""The parts that every command's ``--help`` has: examples, and the default of each option."""

from __future__ import annotations

import argparse
from typing import Any, cast

from . import layout


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds defaults, wraps descriptions, and keeps the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in layout.paragraph(text, width))

    def _split_lines(self, text: str, width: int) -> list[str]:
        # argparse's own breaks words at hyphens.
        return layout.paragraph(text, width)

    def _get_help_string(self, action: argparse.Action) -> str:
        said, default = action.help or "", action.default
        if not action.option_strings or action.nargs == 0 or "default" in said:
            return said
        if default in (None, (), argparse.SUPPRESS) or isinstance(default, bool):
            return said
        if isinstance(default, tuple):
            default = ",".join(str(part) for part in dict.fromkeys(default))
        return f"{said} (default: {default})"


def command(
    commands: Any, name: str, help: str, description: str, *examples: str
) -> argparse.ArgumentParser:
    """Return the parser of a command or of an action below one; each example is a whole command
    line."""
    made = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=Formatter,
    )
    return cast(argparse.ArgumentParser, made)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every report has."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
