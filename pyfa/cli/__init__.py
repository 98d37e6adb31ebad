"""The command line: one module per command. This module turns errors into a line of text.

A command returns its exit status: 0 success; 1 a check failed, reports differ, a kernel does not
compile or the cache is unusable; 2 a usage error, or the command cannot run here; 130 interrupted.
Only the report goes to stdout; progress and errors go to stderr.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import (
    bench,
    cache,
    compat,
    compile,
    conformance,
    demo,
    explain,
    hub,
    info,
    inspect,
    plan,
    usage,
)

_COMMANDS = (info, demo, explain, plan, compile, inspect, conformance, bench, cache, compat, hub)
_USAGE = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command's function is its ``run``."""
    top = _Parser(
        prog="pyfa",
        description="Exact attention on AMD, NVIDIA and CPUs.",
        epilog="examples:\n  pyfa info\n"
        "  pyfa explain --seqlen 8192 --heads 32,8 --head-dim 128 --causal\n\n"
        "`pyfa COMMAND --help` describes one command.",
        formatter_class=usage.Formatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for command in _COMMANDS:
        command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    if sys.stdout is None:  # closed by who started this, so that a report has nowhere to go
        print("pyfa: error: standard output is closed", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        # A character that the encoding lacks is escaped instead of ending the report.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    top = parser()
    options = top.parse_args(arguments)
    if options.version:
        from .. import __version__

        print(f"pyfa {__version__}")
        return 0
    run: Callable[[argparse.Namespace], int] | None = getattr(options, "run", None)
    if run is None:
        top.error("expected a command")
    from ..errors import CompileError, PerformanceWarning

    try:
        return run(options)
    except BrokenPipeError:
        # Whoever read the report has gone; what is left of it has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, NotImplementedError, OSError, CompileError, PerformanceWarning) as error:
        print(f"pyfa: error: {error}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print("pyfa: interrupted", file=sys.stderr)
        return _INTERRUPTED
