"""``pyfa conformance``: runs the suite on one backend, or compares two reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import usage
from .console import print_json, progress, stdout


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "conformance",
        "check a backend against float64, or compare two reports",
        "Run the conformance suite on one backend. `pyfa conformance compare A B` compares two "
        "reports, case by case.",
        "pyfa conformance",
        "pyfa conformance --backend torch --level full --out cpu.json",
        "pyfa conformance --features dropout --max-seqlen 256",
        "pyfa conformance compare cpu.json gpu.json --common",
    )
    parser.add_argument(
        "--backend", metavar="B", help="the backend to test (default: the first that can run here)"
    )
    parser.add_argument(
        "--level",
        choices=("quick", "full"),
        default="quick",
        help="quick: a selection of cases; full: all",
    )
    parser.add_argument(
        "--features", metavar="a,b,…", help="only cases of these features (default: all)"
    )
    parser.add_argument(
        "--max-seqlen",
        type=int,
        metavar="N",
        help="shorten longer sequences to this length (default: full length)",
    )
    parser.add_argument(
        "--orders",
        type=int,
        default=1,
        metavar="N",
        help="how many orders of float atomics to try; emulator only",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit XML")
    usage.add_json(parser)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(metavar="compare")
    compare = usage.command(
        actions,
        "compare",
        "compare two reports, case by case",
        "Compare two reports, case by case. A case is the same if both backends passed it or both "
        "refused it, and if the inputs, the dropout bits and the positions of -inf in the LSE are "
        "equal.",
        "pyfa conformance compare cpu.json mi300x.json",
        "pyfa conformance compare cpu.json mi300x.json --common",
    )
    compare.add_argument("first", type=Path, metavar="A", help="a report written by --out")
    compare.add_argument("second", type=Path, metavar="B", help="another report")
    compare.add_argument(
        "--common",
        action="store_true",
        help="compare only cases that both backends ran; cases that are in only one report, or "
        "that one backend refused, are left out and counted",
    )
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run=run_compare)


def run(options: argparse.Namespace) -> int:
    """Run the suite; status 1 if a case fails."""
    from .. import conformance

    for path in (options.out, options.junit):
        # A suite that ran for minutes must not end at a folder that is missing.
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
    features = None
    if options.features is not None:
        features = [part.strip() for part in options.features.split(",") if part.strip()]
    try:
        with progress("conformance") as show:
            report = conformance.run(
                backend=options.backend,
                level=options.level,
                features=features,
                max_seqlen=options.max_seqlen,
                on_progress=show,
                orders=options.orders,
            )
    except RuntimeError as error:
        # A backend that cannot run here; what goes wrong in a case is in the report.
        raise ValueError(str(error)) from error
    if options.out is not None:
        report.save_json(options.out)
    if options.junit is not None:
        report.save_junit(options.junit)
    if options.json:
        print_json("conformance", report.as_dict())
    else:
        report.print(stdout())
    return 0 if report.ok else 1


def run_compare(options: argparse.Namespace) -> int:
    """Compare two reports; status 1 if they differ."""
    from .. import conformance

    comparison = conformance.compare(
        conformance.load(options.first), conformance.load(options.second), common=options.common
    )
    if options.json:
        print_json("conformance compare", comparison.as_dict())
    else:
        comparison.print(stdout())
    return 0 if comparison.same else 1
