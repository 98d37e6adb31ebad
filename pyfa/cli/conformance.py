"""``pyfa conformance``: the suite on one backend, and the comparison of two reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .console import print_json, progress, stdout


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "conformance",
        help="check a backend against the float64 reference, or compare two reports",
        description="Runs the conformance suite on one backend. "
        "`pyfa conformance compare A B` compares two reports, case by case.",
    )
    parser.add_argument("--backend", metavar="B", help="by default the one chosen on this machine")
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--features", metavar="a,b,…", help="only the cases of these features")
    parser.add_argument("--max-seqlen", type=int, metavar="N", help="only cases this short")
    parser.add_argument(
        "--orders",
        type=int,
        default=1,
        metavar="N",
        help="orders of float atomics in which cases that have them run (emulator)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write it as JUnit XML")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(metavar="compare")
    compare = actions.add_parser(
        "compare", help="two reports, case by case", description="Compares two reports."
    )
    compare.add_argument("first", type=Path, metavar="A")
    compare.add_argument("second", type=Path, metavar="B")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run=run_compare)


def run(options: argparse.Namespace) -> int:
    """Status 1 where a case fails."""
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
    """Status 1 where the reports differ."""
    from .. import conformance

    comparison = conformance.compare(
        conformance.load(options.first), conformance.load(options.second)
    )
    if options.json:
        print_json("conformance compare", comparison.as_dict())
    else:
        comparison.print(stdout())
    return 0 if comparison.same else 1
