"""``pyfa hub export DIR``: a folder that Hugging Face's ``kernels`` library loads."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from . import usage
from .console import print_json

# The pattern by which transformers recognizes a kernel of the hub.
_REPOSITORY = re.compile(r"[^/:=@\s]+/[^/:=@\s]+")


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "hub",
        "write a kernel for Hugging Face's kernels library",
        "Write a kernel for Hugging Face's kernels library to a folder, and print the line "
        "LOCAL_KERNELS=…. Set this environment variable, and unchanged programs use the kernel in "
        "place of the repositories that --name lists.",
        "pyfa hub export pyfa-kernel",
        "pyfa hub export pyfa-kernel --name kernels-community/flash-attn2",
    )
    # argparse puts options first, and --name would then take the action and the folder.
    parser.usage = "%(prog)s export DIR [--name OWNER/NAME ...] [--json]"
    parser.add_argument("action", choices=("export",), help="export: write the folder")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--name",
        nargs="+",
        default=(),
        metavar="OWNER/NAME",
        help="the repositories to replace (default: pyfa/attention, and those that transformers "
        "uses if flash-attention is not installed)",
    )
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; the line alone goes to stdout, so that a shell can take it."""
    from ..compat import hub

    for name in options.name:
        if not _REPOSITORY.fullmatch(name):
            raise ValueError(f"--name: expected OWNER/NAME, got {name}")
    names = tuple(options.name) or hub.fallback_names()
    folder = hub.export(options.folder)
    line = hub.variable(folder, names)
    if options.json:
        print_json("hub", {"directory": str(folder), "names": list(names), "variable": line})
    else:
        print(line)
    return 0
