"""``pyfa compat [install|remove]``: drop-in packages for flash-attention 2, 3 and 4."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import usage
from .console import print_json, print_table

_MEANING = {
    "absent": "not installed: `pyfa compat install` writes it",
    "installed": "written by pyfa",
    "outdated": "by another version of pyfa, or incomplete: `pyfa compat install` updates it",
    "changed": "written by pyfa, then changed: neither updated nor removed",
    "foreign": "another package: never touched",
}


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "compat",
        "write drop-in packages for flash-attention 2, 3 and 4",
        "Write or remove packages whose modules flash_attn, flash_attn_interface and "
        "flash_attn.cute call pyfa, for programs that import these names. Existing packages are "
        "never overwritten. Without an action, show the state of each package.",
        "pyfa compat",
        "pyfa compat install",
        "pyfa compat remove --target vendored",
    )
    # argparse puts options first, and --only would then take the action as a version.
    parser.usage = "%(prog)s [install|remove] [--only VERSION ...] [--target DIR] [--json]"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("install", "remove"),
        help="install or remove (default: show the state)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        choices=("fa2", "fa3", "fa4"),
        metavar="VERSION",
        help="only fa2 (flash_attn), fa3 (flash_attn_interface) or fa4 (flash_attn.cute) "
        "(default: all)",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="write to this folder (default: the environment's site-packages)",
    )
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 1 if another package is in the way or the shim's files were
    changed."""
    from ..compat import shim

    before = shim.status(options.target, options.only)
    error = None
    try:
        if options.action == "install":
            shim.install(options.target, options.only)
        elif options.action == "remove":
            shim.remove(options.target, options.only)
    except shim.ShimError as problem:
        error = str(problem)
    after = shim.status(options.target, options.only)
    folder = str(options.target or shim.purelib())
    if options.json:
        data = {
            "action": options.action or "status",
            "directory": folder,
            "error": error,
            "packages": [each._asdict() for each in after],
        }
        print_json("compat", data)
    else:
        rows = [
            [now.name, now.version or "", now.state, _sentence(then, now)]
            for then, now in zip(before, after, strict=True)
        ]
        print(folder)
        print_table(["package", "version", "state", ""], rows)
    if error:
        print(f"pyfa: {error}", file=sys.stderr)
    return 1 if error else 0


def _sentence(then: Any, now: Any) -> str:
    if then.state != now.state:
        return "removed" if now.state == "absent" else "written"
    return f"{_MEANING[now.state]} ({now.where})" if now.state == "foreign" else _MEANING[now.state]
