"""The results of a run: status, errors and digests of each case. They can be written as JSON, as
JUnit XML and as a table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from ..problem import FEATURES
from .tolerances import Check

SCHEMA = 1
PASSED, FAILED, REFUSED, CRASHED = STATUSES = ("passed", "failed", "refused", "crashed")


@dataclass(frozen=True)
class CaseResult:
    """The result of one case: its status, the errors and bounds of every check, digests, and the
    reasons for a refusal or a traceback.

    ``digests``: the SHA-256 of the inputs ("inputs"), of the dropout bits ("dropout") and of the
    positions of −inf in the LSE ("lse").
    """

    name: str
    dtype: str
    features: tuple[str, ...]
    status: str
    checks: tuple[Check, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return max((check.ratio for check in self.checks), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["checks"] = [asdict(check) | {"ratio": check.ratio} for check in self.checks]
        return data


@dataclass(frozen=True)
class Report:
    """All results of one backend at one level, and the environment.

    ``coverage`` (emulator only): for each kernel, the number of code objects that ran, the number
    of their instructions, and how many of these were executed.
    """

    backend: str
    level: str
    selected: tuple[str, ...]
    environment: Mapping[str, Any]
    results: tuple[CaseResult, ...]
    coverage: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether at least one case passed and none failed or crashed."""
        counts = self.counts()
        return counts[PASSED] > 0 and counts[FAILED] == counts[CRASHED] == 0

    def counts(self) -> Counter[str]:
        return Counter(result.status for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON. The number ``schema`` increases when a field changes
        its meaning."""
        counts = self.counts()
        data = {
            "schema": SCHEMA,
            "kind": "pyfa conformance report",
            "backend": self.backend,
            "level": self.level,
            "features": list(self.selected),
            "environment": dict(self.environment),
            "ok": self.ok,
            "counts": {status: counts[status] for status in STATUSES},
            "coverage": {kernel: dict(counts) for kernel, counts in self.coverage.items()},
            "cases": [result.as_dict() for result in self.results],
        }
        return {name: _strict(value) for name, value in data.items()}

    def save_json(self, path: str | Path) -> None:
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def save_junit(self, path: str | Path) -> None:
        """Write JUnit XML. Refused cases become skipped tests, wrong results become failures, and
        crashes become errors."""
        ElementTree.ElementTree(self._junit()).write(path, encoding="utf-8", xml_declaration=True)

    def _junit(self) -> ElementTree.Element:
        counts = self.counts()
        suite = ElementTree.Element(
            "testsuite",
            name=f"pyfa conformance {self.backend} {self.level}",
            tests=str(len(self.results)),
            failures=str(counts[FAILED]),
            errors=str(counts[CRASHED]),
            skipped=str(counts[REFUSED]),
            time=f"{sum(result.seconds for result in self.results):.3f}",
        )
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in self.environment.items():
            ElementTree.SubElement(properties, "property", name=name, value=_printable(str(value)))
        tags = {FAILED: "failure", REFUSED: "skipped", CRASHED: "error"}
        for result in self.results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"pyfa.conformance.{self.backend}",
                name=result.name,
                time=f"{result.seconds:.3f}",
            )
            if result.status in tags:
                lines = [_printable(line) for line in (*result.messages, *result.reasons)]
                first = lines[0].splitlines()[0] if lines and lines[0] else ""
                detail = ElementTree.SubElement(case, tags[result.status], message=first)
                detail.text = "\n".join(lines)
        return suite

    def print(self, console: Console | None = None, failures: int = 20) -> None:
        """Print a row per feature. Then print the first ``failures`` cases that failed, and why
        they failed."""
        console = console or Console()
        console.print(self._table())
        if self.coverage:
            console.print(self._covered())
        bad = [r for r in self.results if r.status in (FAILED, CRASHED)]
        for result in bad[:failures]:
            console.print(f"{result.status}: {result.name}", style="bold red", soft_wrap=True)
            for line in result.messages:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if len(bad) > failures:
            console.print(f"… and {len(bad) - failures} more; the JSON report has them all")

    def _table(self) -> Table:
        device = self.environment.get("device", "")
        table = Table(title=f"{self.backend} on {device}, level {self.level}")
        table.add_column("feature")
        for heading in ("passed", "failed", "refused", "worst error / allowed"):
            table.add_column(heading, justify="right")
        rows: list[tuple[str, list[CaseResult]]] = [
            (name, [r for r in self.results if name in r.features]) for name in FEATURES
        ]
        rows.insert(0, ("none", [r for r in self.results if not r.features]))
        dtypes = sorted({r.dtype for r in self.results})
        rows += [(dtype, [r for r in self.results if r.dtype == dtype]) for dtype in dtypes]
        for index, (name, results) in enumerate(rows):
            if results:
                last = index in (len(rows) - len(dtypes) - 1, len(rows) - 1)
                table.add_row(*_summary(name, results), end_section=last)
        table.add_row(*_summary("all", self.results), style="bold")
        return table

    def _covered(self) -> Table:
        table = Table(title="instructions of the code objects that ran")
        table.add_column("kernel")
        for heading in ("objects", "instructions", "executed", "share"):
            table.add_column(heading, justify="right")
        totals = [0, 0, 0]
        for index, (kernel, counts) in enumerate(self.coverage.items()):
            numbers = [counts[name] for name in ("objects", "instructions", "executed")]
            totals = [a + b for a, b in zip(totals, numbers, strict=True)]
            last = index == len(self.coverage) - 1
            table.add_row(kernel, *_shares(numbers), end_section=last)
        table.add_row("all", *_shares(totals), style="bold")
        return table


def _shares(numbers: list[int]) -> tuple[str, ...]:
    objects, static, executed = numbers
    return str(objects), str(static), str(executed), f"{executed / max(static, 1):.1%}"


def _summary(name: str, results: Iterable[CaseResult]) -> tuple[str, ...]:
    results = list(results)
    counts = Counter(result.status for result in results)
    bad = counts[FAILED] + counts[CRASHED]
    worst = max((result.ratio for result in results if result.checks), default=None)
    return (
        name,
        str(counts[PASSED]),
        f"[red]{bad}[/red]" if bad else "0",
        str(counts[REFUSED]),
        "–" if worst is None else f"{worst:.2f}",
    )


def load(path: str | Path) -> Report:
    """Read a file that ``save_json`` wrote. Raises ``ValueError`` for other files and for other
    schema versions."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a conformance report ({error})") from None
    if not isinstance(data, dict) or data.get("kind") != "pyfa conformance report":
        raise ValueError(f"{path}: not a conformance report")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {data.get('schema')}, this pyfa reads schema {SCHEMA}")
    try:
        return Report(
            data["backend"],
            data["level"],
            tuple(data["features"]),
            data["environment"],
            tuple(_result(item) for item in data["cases"]),
            data.get("coverage", {}),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a damaged conformance report ({error!r})") from None


def _result(item: Mapping[str, Any]) -> CaseResult:
    names = Check.__dataclass_fields__
    numbers = ("max_error", "max_bound", "mean_error", "mean_bound")
    checks = []
    for check in item["checks"]:
        kept = {name: check[name] for name in names}
        checks.append(Check(**kept | {name: float(kept[name]) for name in numbers}))
    return CaseResult(
        item["name"],
        item["dtype"],
        tuple(item["features"]),
        item["status"],
        tuple(checks),
        item["digests"],
        tuple(item["reasons"]),
        tuple(item["messages"]),
        item["seconds"],
    )


def _strict(value: Any) -> Any:
    """Return ``value`` for strict JSON, which has no NaN and no infinity: those become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _printable(text: str) -> str:
    """Return ``text`` without the control characters that XML forbids."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\ufffd" for c in text)
