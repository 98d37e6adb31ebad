"""``pyfa bench``: attention beside its peers, and against an earlier result."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from .console import print_json, print_table, progress

# Not imported from pyfa.bench, which would load torch before a wrong name is refused.
_SUITES = (
    "forward", "backward", "decode", "small", "varlen", "window", "gqa", "fp8", "fp8_decode",
    "quantize", "host", "model", "mi300x",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "bench",
        help="the benchmarks, beside the peers found here",
        description="Times attention beside the peers found in the environment, in rounds that "
        "take turns: all suites, or one; mi300x only by name: it holds the timing model to an "
        "MI300X and says which of its constants was wrong.",
    )
    parser.add_argument("suite", nargs="?", metavar="SUITE", help=", ".join(_SUITES))
    parser.add_argument(
        "--peers", metavar="a,b,…", help="flash, cudnn, flex, …, pyfa:BACKEND; pyfa always runs"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="status 1 where pyfa became slower than there"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write DIR/index.html: charts, tables, how; the charts also as DIR/pictures/*.svg",
    )
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --report: result files, or folders of them, in place of measuring",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Status 1 where a cell is slower than in ``--against``, beyond the spread."""
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
    with progress("bench") as show:
        results = bench.run(suites, wanted, on_progress=show)
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
    """The report of results that are there."""
    from ..bench import report

    given = (options.suite, options.peers, options.against, options.out)
    if options.report is None or any(one is not None for one in given):
        raise ValueError("--from: goes with --report alone, since nothing is measured")
    _wrote(report.write(options.report, report.read(options.sources)))
    return 0


def _wrote(path: Path) -> None:
    print(f"pyfa: wrote {path}", file=sys.stderr)


def _print(results: dict[str, Any]) -> None:
    """A table a suite: cells down, peers across, and what pyfa is to each on geometric average."""
    peers = list(results["peers"])
    for name, why in results["absent"].items():
        print(f"without {name}: {why}")
    for suite in results["suites"]:
        rows = [row for row in results["rows"] if row["suite"] == suite]
        unit = next((row["unit"] for row in rows if "unit" in row), "")
        if suite == "mi300x":
            continue
        print(f"\n{suite}, {unit}")
        cells: dict[str, dict[str, dict[str, Any]]] = {}
        for row in rows:
            cells.setdefault(row["cell"], {})[row["peer"]] = row
        table = [
            [cell, *(f"{by_peer[p]['value']:.4g}" if "value" in by_peer[p] else "–" for p in peers)]
            for cell, by_peer in cells.items()
        ]
        table.append(["pyfa's speed is, of theirs", *(_mean(cells, peer) for peer in peers)])
        print_table(["", *peers], table)
        for why, names in _reasons(rows).items():
            print(f"–: {why} ({', '.join(names)})")
    if "mi300x" in results:
        _print_model(results)


def _print_model(results: dict[str, Any]) -> None:
    """What the timing model says beside what was measured, and which constant of it was wrong."""
    from ..bench import mi300x

    words = results["mi300x"]["what"]
    print(f"\nMI300X: measured, and by the timing model ({words})")
    print_table(list(mi300x.HEAD), mi300x.table(results["rows"]))
    print(results["mi300x"]["left_out"])
    print(results["mi300x"]["sentence"])


def _mean(cells: dict[str, dict[str, dict[str, Any]]], peer: str) -> str:
    ratios = [
        by_peer[peer]["seconds"]["median"] / by_peer["pyfa"]["seconds"]["median"]
        for by_peer in cells.values()
        if "seconds" in by_peer.get(peer, {}) and "seconds" in by_peer.get("pyfa", {})
    ]
    if not ratios:
        return "–"
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ×"


def _reasons(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Why peers have no value, each reason once, with the peers that gave it."""
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
    print_table(["", "", "", "before", "now", "now/before", ""], rows)
    for name in comparison.missing:
        print(f"not measured now: {name}")
    print(f"{len(comparison.slower)} of {len(comparison.changes)} cells are slower")
