"""``pyfa explain``: which backend runs a problem, and why the others do not."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import planned, problem, usage
from .console import print_json, print_text

if TYPE_CHECKING:
    from ..dispatch import Explanation


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "explain",
        "say which backend runs a problem, and why the others do not",
        "Say which backend runs a problem, with which plan, and why the others do not. No "
        "kernel runs. --device may name a GPU that this machine does not have.",
        "pyfa explain --seqlen 8192 --heads 32,8 --head-dim 128 --causal",
        "pyfa explain --seqlen 1,32768 --heads 64,8 --features paged --device MI300X",
        "pyfa explain --dtype float8_e4m3fn --device H200 -v",
        "pyfa explain --model llama-3.1-8b --device MI300X",
    )
    problem.add_flags(parser)
    problem.add_device(parser)
    parser.add_argument(
        "--model",
        metavar="CONFIG|NAME",
        help="show a table of a model's layers instead; takes a config.json, or a name such as "
        "llama-3.1-8b; uses --batch, --seqlen and --dtype (default: none)",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the model")
    planned.add_flag(parser)
    usage.add_json(parser)
    parser.set_defaults(run=run, seqlen=None)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 0 even if no backend can run the problem, because that is an
    answer."""
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
        show(answer, options.verbose)
        if answer.chosen is None:
            print("no backend can run this attention")
    return 0


def show(answer: Explanation, verbose: bool) -> None:
    """Print the answers, with ``*`` before the chosen one; with ``verbose`` also the plans'
    constants."""
    print_text(answer.problem.described, "  ")
    width = max(len(one.backend) for one in answer.answers)
    for one in answer.answers:
        mark = "*" if one.backend == answer.chosen else " "
        texts = list(one.reasons)
        if one.plan is not None:
            texts = [f"plan: {one.plan.kernel}", *one.plan.notes]
            if verbose and one.plan.constants:
                texts.insert(1, planned.text(dict(one.plan.constants)))
        for number, text in enumerate(texts):
            head = f"{mark} {one.backend:<{width}}" if number == 0 else " " * (width + 2)
            print_text(f"{head}  {text}", " " * (width + 4))
