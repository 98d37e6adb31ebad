"""``pyfa explain``: who would run a problem, and why the others would not."""

from __future__ import annotations

import argparse
from typing import Any

from . import problem
from .console import print_json


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "explain",
        help="who would run a problem, and why not the others",
        description="Who would run a problem, with which plan, and why not the others. "
        "Nothing is computed, and --device names a GPU that need not be here.",
    )
    problem.add_flags(parser)
    parser.add_argument("--device", metavar="D", help="a GPU by name: MI300X, H200, RTX4090, …")
    parser.add_argument(
        "--model", metavar="CONFIG|NAME",
        help="a table of a model's layers instead, from its config.json or by a name such as "
        "llama-3.1-8b; of the problem's flags --batch, --seqlen and --dtype count",
    )  # fmt: skip
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share its heads")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run, seqlen=None)


def run(options: argparse.Namespace) -> int:
    """Status 0 also where nobody can run it: that is an answer, not a failed check."""
    if options.model is not None:
        from . import explain_model

        return explain_model.run(options)
    if options.tp != 1:
        raise ValueError("--tp: only with --model")
    options.seqlen = options.seqlen or problem.SEQLEN
    answer = problem.explain(options, options.device)
    if options.json:
        print_json("explain", answer.as_dict())
    else:
        print(answer)
        if answer.chosen is None:
            print("no backend can run this attention")
    return 0
