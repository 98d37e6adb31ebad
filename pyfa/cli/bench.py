"""``pyfa bench``: attention compared with other libraries, and with an earlier result."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from . import usage
from .console import print_json, print_table, print_text, progress

# Not imported from pyfa.bench, which would load torch before a wrong name is refused.
_SUITES = (
    "forward", "backward", "decode", "small", "varlen", "window", "gqa", "layers", "wide",
    "fp8", "fp8_decode", "quantize", "host", "model", "mi300x",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "bench",
        "time pyfa and the other installed libraries",
        "Time pyfa and the other installed libraries, which take turns in each round. Without "
        "SUITE, all suites run except mi300x, which compares the timing model with an MI300X and "
        "names the constant of the model that best explains the difference.",
        "pyfa bench forward --peers flash,cudnn --out now.json",
        "pyfa bench forward --against before.json",
        "pyfa bench mi300x --out mi300x.json",
        "pyfa bench --report out --from benchmarks/results",
    )
    parser.add_argument(
        "suite", nargs="?", metavar="SUITE", help=f"one of {', '.join(_SUITES)} (default: all)"
    )
    parser.add_argument(
        "--peers",
        metavar="a,b,…",
        help="other libraries, such as flash, cudnn, flex, naive, or pyfa:BACKEND (default: all "
        "that are installed)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="compare with an earlier result of this machine; exit status 1 if pyfa became slower",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the results as JSON; FILE is rewritten after each case, so an interrupted run "
        "keeps its measurements",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="finish the case that is running when SECONDS have passed, then stop, and name the "
        "cases that were not measured (default: no limit)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write DIR/index.html with charts and tables, and the charts as DIR/pictures/*.svg",
    )
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --report: use these result files or folders instead of measuring",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="with --report: also use older files of each suite (default: only the newest)",
    )
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command. Return status 1 if pyfa is slower in a case than in the result
    ``--against``, by more than the spread of the times; else 0."""
    if options.suite is not None and options.suite not in _SUITES:
        raise ValueError(f"SUITE: expected one of {', '.join(_SUITES)}; got {options.suite!r}")
    from .. import bench

    if options.report is not None:
        from ..bench import report

        report.require()
    if options.sources is not None:
        return _report(options)
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"{options.out}: there is no folder {options.out.absolute().parent}")
    earlier = None if options.against is None else bench.load(options.against)
    wanted = None
    if options.peers is not None:
        wanted = [part.strip() for part in options.peers.split(",") if part.strip()]
    suites = None if options.suite is None else [options.suite]

    def on_cell(rows: list[dict[str, Any]], so_far: dict[str, Any]) -> None:
        print(f"bench: {_line(rows)}", file=sys.stderr, flush=True)
        if options.out is not None:
            bench.write(options.out, so_far)

    with progress("bench") as show:
        results = bench.run(suites, wanted, on_progress=show, on_cell=on_cell, limit=options.limit)
    if options.out is not None:
        bench.write(options.out, results)
    if options.report is not None:
        data = {"environment": bench.environment(), **results}
        _wrote(report.write(options.report, [report.checked("this run", data)]))
    comparison = None if earlier is None else bench.compare(earlier, results)
    if options.json:
        data = {"environment": bench.environment(), **results}
        if comparison is not None:
            data["against"] = comparison.as_dict()
        print_json("bench", data)
    else:
        _print(results)
        if comparison is not None:
            _print_comparison(comparison)
    return 1 if comparison is not None and comparison.slower else 0


def _report(options: argparse.Namespace) -> int:
    """Write the report of existing results."""
    from ..bench import report

    given = (options.suite, options.peers, options.against, options.out, options.limit)
    if options.report is None or any(one is not None for one in given):
        raise ValueError("--from: expected --report and no SUITE, because nothing is measured")
    _wrote(report.write(options.report, report.read(options.sources), options.older))
    return 0


def _wrote(path: Path) -> None:
    print(f"pyfa: wrote {path}", file=sys.stderr)


def _line(rows: list[dict[str, Any]]) -> str:
    """Return the results of one case as a line."""
    unit = next((row["unit"] for row in rows if "unit" in row), "")
    values = (f"{row['peer']} {row['value']:.4g}" if "value" in row else f"{row['peer']} –"
              for row in rows)  # fmt: skip
    return f"{rows[0]['suite']} {rows[0]['cell']}: {', '.join(values)} {unit}"


def _print(results: dict[str, Any]) -> None:
    """Print one table per suite: a row for each case, a column for each library, and a last row
    with the geometric means of the ratios."""
    peers = list(results["peers"])
    for name, why in results["absent"].items():
        print_text(f"without {name}: {why}", "  ")
    for suite in results["suites"]:
        rows = [row for row in results["rows"] if row["suite"] == suite]
        unit = next((row["unit"] for row in rows if "unit" in row), "")
        if suite == "mi300x" or not rows:
            continue
        print(f"\n{suite}, {unit}")
        cells: dict[str, dict[str, dict[str, Any]]] = {}
        for row in rows:
            cells.setdefault(row["cell"], {})[row["peer"]] = row
        table = [
            [cell, *(f"{by_peer[p]['value']:.4g}" if "value" in by_peer[p] else "–" for p in peers)]
            for cell, by_peer in cells.items()
        ]
        table.append(["pyfa's speed / theirs, mean", *(_mean(cells, peer) for peer in peers)])
        print_table(["cell", *peers], table)
        if spread := _spread(rows):
            print_text(f"pyfa's rounds differ by {spread} (median, largest)")
        for why, names in _reasons(rows).items():
            print_text(f"–: {why} ({', '.join(names)})", "   ")
    if "mi300x" in results:
        _print_model(results)
    if "missing" in results:
        print_text(f"stopped by --limit, {len(results['missing'])} cases are missing:")
        for name in results["missing"]:
            print(f"  {name}")


def _print_model(results: dict[str, Any]) -> None:
    """Print the timing model's figures next to the measured ones, and the constant that best
    explains the difference."""
    from ..bench import mi300x

    words = results["mi300x"]["what"]
    print(f"\nMI300X: measured, and by the timing model ({words})")
    print_table(list(mi300x.HEAD), mi300x.table(results["rows"]))
    print_text(results["mi300x"]["left_out"])
    print_text(results["mi300x"]["sentence"])


def _mean(cells: dict[str, dict[str, dict[str, Any]]], peer: str) -> str:
    ratios = [
        by_peer[peer]["seconds"]["median"] / by_peer["pyfa"]["seconds"]["median"]
        for by_peer in cells.values()
        if "seconds" in by_peer.get(peer, {}) and "seconds" in by_peer.get("pyfa", {})
    ]
    if not ratios:
        return "–"
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ×"


def _spread(rows: list[dict[str, Any]]) -> str:
    """Return how far the medians of pyfa's rounds differ, in a typical cell and in the worst."""
    apart = []
    for row in rows:
        medians = row.get("round_medians", [])
        if row["peer"] == "pyfa" and len(medians) > 1:
            apart.append((max(medians) - min(medians)) / statistics.median(medians))
    return f"{statistics.median(apart):.1%}, {max(apart):.1%}" if apart else ""


def _reasons(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return why peers have no value, each reason once, with its peers."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "why_not" in row and row["peer"] not in found.setdefault(row["why_not"], []):
            found[row["why_not"]].append(row["peer"])
    return found


def _print_comparison(comparison: Any) -> None:
    rows = [
        [
            change.suite,
            change.cell,
            change.peer,
            f"{change.before * 1e6:.1f} us",
            f"{change.now * 1e6:.1f} us",
            f"{change.ratio:.2f}",
            "SLOWER" if change.slower else "",
        ]
        for change in comparison.changes
    ]
    print()
    print_table(["suite", "cell", "peer", "before", "now", "now/before", ""], rows)
    for name in comparison.missing:
        print(f"not measured now: {name}")
    print(f"{len(comparison.slower)} of {len(comparison.changes)} cases are slower")
