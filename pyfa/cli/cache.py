"""``pyfa cache list|prune|clear``: the folder of compiled kernels."""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from . import planned, usage
from .console import print_json, print_table, size

if TYPE_CHECKING:
    from ..cache import EntryInfo

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _bytes(text: str) -> float:
    digits = text.strip().removesuffix("B").strip()
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    for name, factor in _UNITS.items():
        if name.lower() == unit.lower():
            number = float(digits.removesuffix(unit))
            if number >= 0:
                return number * factor
    raise argparse.ArgumentTypeError(f"expected a size as 500M or 2GB; got {text!r}")


def _days(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more days; got {text!r}")
    return number


_days.__name__ = "number of days"


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "cache",
        "list or remove compiled kernels",
        "List or remove compiled kernels.",
        "pyfa cache list",
        "pyfa cache prune --max-age 30 --max-size 2GB",
        "pyfa cache clear",
    )
    actions = parser.add_subparsers(metavar="list|prune|clear", required=True, dest="action")
    for name, meaning, example in (
        ("list", "list entries with their plans, oldest first", "pyfa cache list -v"),
        ("prune", "remove entries by age or total size", "pyfa cache prune --max-size 500M"),
        ("clear", "remove every entry", "pyfa cache clear"),
    ):
        action = usage.command(actions, name, meaning, meaning.capitalize() + ".", example)
        if name == "prune":
            action.add_argument(
                "--max-age", type=_days, metavar="DAYS", help="remove older entries (default: none)"
            )
            action.add_argument(
                "--max-size",
                type=_bytes,
                metavar="SIZE",
                help="then remove the oldest entries until the rest is no larger than SIZE, such "
                "as 500M or 2GB (default: no limit)",
            )
        planned.add_flag(action)
        usage.add_json(action)
        action.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 1 if the folder cannot be used."""
    from .. import cache

    home = cache.directory()
    unusable = cache.why_unusable(home)
    if options.action == "list":
        entries = cache.entries()
    elif options.action == "clear":
        entries = cache.clear()
    else:
        if options.max_age is None and options.max_size is None:
            raise ValueError("cache prune: expected --max-age or --max-size")
        entries = cache.prune(
            max_age_days=math.inf if options.max_age is None else options.max_age,
            max_bytes=math.inf if options.max_size is None else options.max_size,
        )
    if options.json:
        data = {
            "action": options.action,
            "directory": str(home),
            "unusable": unusable,
            "entries": [_as_dict(entry) for entry in entries],
        }
        print_json("cache", data)
    else:
        _print(options.action, str(home), entries, options.verbose)
        if unusable:
            print(f"pyfa: {unusable}", file=sys.stderr)
    return 1 if unusable else 0


def _as_dict(entry: EntryInfo) -> dict[str, object]:
    return {
        "name": entry.name,
        "key": entry.key,
        "bytes": entry.size,
        "created": entry.created,
        "arch": entry.arch,
        "plan": entry.plan,
        "intact": entry.intact,
    }


def _print(action: str, home: str, entries: list[EntryInfo], verbose: bool) -> None:
    total = size(sum(entry.size for entry in entries))
    verb = "" if action == "list" else "removed "
    print(f"{home}: {verb}{len(entries)} entries, {total}")
    if not entries:
        return
    rows = []
    for entry in entries:
        constants = planned.of_text(entry.plan)
        told = planned.text(constants) if verbose else planned.words(constants)
        day = time.strftime("%Y-%m-%d", time.localtime(entry.created))
        plan = told if entry.intact else "damaged: never used"
        rows.append([entry.name, entry.key[:8], entry.arch, size(entry.size), day, plan])
    print_table(["kernel", "key", "arch", "size", "created", "plan"], rows)
