"""Compare two results: find the cells that became slower by more than the spread of their times.

A *cell* is one problem of a suite and a way to time it (``suites.Cell``); the guide calls it a
case. A *peer* is what is timed: pyfa, pyfa with a named backend, or another library.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# One kernel's medians in two processes, each on an H200, were up to 4 % apart, with quartiles that
# did not touch.
_LEAST = 0.05


@dataclass(frozen=True)
class Change:
    """pyfa's time at one cell in both results. ``before``: seconds in the earlier result, corrected
    by how the times of the other peers changed. ``now``: seconds in the new result. ``slower``:
    whether pyfa became slower by more than the spread."""

    suite: str
    cell: str
    peer: str
    before: float
    now: float
    machine: float
    slower: bool

    @property
    def ratio(self) -> float:
        return self.now / self.before


@dataclass(frozen=True)
class Comparison:
    """The comparison of two results. ``changes``: the cells that both results have. ``missing``:
    the cells that only the earlier result has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.slower)

    def as_dict(self) -> dict[str, Any]:
        changes = [asdict(change) | {"ratio": change.ratio} for change in self.changes]
        return {"changes": changes, "missing": list(self.missing)}


_Key = tuple[str, str, str]


def _timed(results: Mapping[str, Any]) -> dict[_Key, Mapping[str, Any]]:
    rows = results.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("--against: the file has no rows of pyfa bench")
    return {
        (row["suite"], row["cell"], row["peer"]): row["seconds"]
        for row in rows
        if row.keys() >= {"suite", "cell", "peer", "seconds"}
    }


def compare(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    """Compare pyfa's times in the result ``now`` with those in the result ``earlier``, for the
    suites that ``now`` contains.

    The earlier times are first multiplied by the median factor by which the cell's other peers
    changed. A cell is slower if the lower quartile of its times exceeds the earlier upper quartile
    and its median is more than 5 % higher. Raises ``ValueError`` if the two results have no cell in
    common.
    """
    old, new = _timed(earlier), _timed(now)
    changes = []
    for key, seconds in new.items():
        suite, cell, peer = key
        if key not in old or not peer.startswith("pyfa"):
            continue
        others = [
            new[other]["median"] / old[other]["median"]
            for other in new
            if other[:2] == (suite, cell) and other in old and not other[2].startswith("pyfa")
        ]
        drift = statistics.median(others) if others else 1.0
        before = old[key]["median"] * drift
        apart = seconds["quartiles"][0] > old[key]["quartiles"][1] * drift
        slower = apart and seconds["median"] > before * (1.0 + _LEAST)
        changes.append(Change(suite, cell, peer, before, seconds["median"], drift, slower))
    if not changes:
        raise ValueError("--against: the file has no cell of pyfa in common with this run")
    ran = set(now.get("suites", ()))
    missing = tuple(
        f"{suite} {cell} {peer}"
        for suite, cell, peer in old
        if suite in ran and peer.startswith("pyfa") and (suite, cell, peer) not in new
    )
    return Comparison(tuple(changes), missing)
