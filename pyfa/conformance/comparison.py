"""Compares two reports case by case, and says why cases differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from .report import CRASHED, FAILED, PASSED, REFUSED, SCHEMA, CaseResult, Report

_DIGESTS = {
    "inputs": "the inputs differ",
    "dropout": "the dropout bits differ",
    "lse": "the positions of -inf in the LSE differ",
}


@dataclass(frozen=True)
class Comparison:
    """``same``: both reports have the same cases, and each case has the same result in both.

    ``differences`` maps a case to the reasons why it is not the same. ``only_a`` and ``only_b`` are
    the cases in only one report. ``notes`` are differences that concern the whole reports.
    ``left_out`` counts the cases that were not compared, by reason.
    """

    a: str
    b: str
    compared: int
    differences: dict[str, tuple[str, ...]]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return bool(self.compared) and not (self.differences or self.only_a or self.only_b)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "pyfa conformance comparison",
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "compared": self.compared,
            "differences": {name: list(why) for name, why in self.differences.items()},
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "notes": list(self.notes),
            "left_out": self.left_out,
        }

    def print(self, console: Console | None = None, most: int = 50) -> None:
        console = console or Console()
        plain = {"markup": False, "highlight": False, "soft_wrap": True}
        console.print(f"a: {self.a}", **plain)  # type: ignore[arg-type]
        console.print(f"b: {self.b}", **plain)  # type: ignore[arg-type]
        lines = list(self.notes)
        lines += [f"left out: {count} cases {why}" for why, count in self.left_out.items()]
        for label, names in (("a", self.only_a), ("b", self.only_b)):
            if names:
                lines.append(f"{len(names)} cases are only in {label}, first {names[0]}")
        lines += [f"{name}: {'; '.join(why)}" for name, why in self.differences.items()]
        for line in lines[:most]:
            console.print(line, **plain)  # type: ignore[arg-type]
        if len(lines) > most:
            console.print(f"… and {len(lines) - most} more")
        equal = self.compared - len(self.differences)
        verdict = "same" if self.same else "different"
        console.print(f"{verdict}: {equal} of {self.compared} cases in both are the same")


def compare(a: Report, b: Report, *, common: bool = False) -> Comparison:
    """Compare report ``a`` with report ``b``.

    A case is the same if both backends refused it, or if both results are within the bounds and
    have equal dropout bits and equal positions of −inf in the LSE. The wording of refusals is not
    compared. With ``common``, only cases that both backends ran are compared, and the others are
    only counted. A case that failed or crashed counts as run.
    """
    of_a = {result.name: result for result in a.results}
    of_b = {result.name: result for result in b.results}
    both = [name for name in of_a if name in of_b]
    only_a = tuple(name for name in of_a if name not in of_b)
    only_b = tuple(name for name in of_b if name not in of_a)
    left_out: dict[str, int] = {}
    if common:
        ran = [name for name in both if REFUSED not in (of_a[name].status, of_b[name].status)]
        left_out = {
            "that only a has": len(only_a),
            "that only b has": len(only_b),
            "that a backend refused": len(both) - len(ran),
        }
        both, only_a, only_b = ran, (), ()
    differences = {name: _why_not_same(of_a[name], of_b[name]) for name in both}
    notes = [
        f"{what}: {left!r} in a, {right!r} in b"
        for what, left, right in (
            ("level", a.level, b.level),
            ("selected features", ",".join(a.selected), ",".join(b.selected)),
            ("pyfa", a.environment.get("pyfa"), b.environment.get("pyfa")),
        )
        if left != right
    ]
    return Comparison(
        _title(a),
        _title(b),
        len(both),
        {name: why for name, why in differences.items() if why},
        only_a,
        only_b,
        tuple(notes),
        {why: count for why, count in left_out.items() if count},
    )


def _title(report: Report) -> str:
    where = report.environment
    return f"{report.backend} on {where.get('device')} ({where.get('arch')})"


def _why_not_same(a: CaseResult, b: CaseResult) -> tuple[str, ...]:
    reasons: list[str] = []
    if a.status != b.status:
        reasons.append(f"{a.status} in a, {b.status} in b")
    elif a.status in (FAILED, CRASHED):
        reasons.append(f"{a.status} in both")
    for digest, sentence in _DIGESTS.items():
        known: Sequence[str | None] = (a.digests.get(digest), b.digests.get(digest))
        # A refused case has no bits; its status has been compared.
        computed = a.status == b.status == PASSED or None not in known
        if computed and known[0] != known[1]:
            reasons.append(sentence)
    return tuple(reasons)
