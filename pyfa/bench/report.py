"""``pyfa bench --report``: one self-contained HTML file from result files, and its pictures.

The file loads nothing: pictures are inline SVG. Each picture is also written as a separate file,
for use in other pages. Every section says what it shows, and how and where the figures were
measured. A result without a description of its environment is refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import charts, machine, report_mi300x, report_speed, report_static
from .report_parts import QUESTIONS, Section

TITLE = "pyfa: what was measured, and what was computed"
_INTRO = (
    "Speeds are medians. A ratio above 1 means that pyfa is faster. Figures that are computed "
    "and not measured say so. Click a line to open it."
)
_NEEDED = ("date", "torch", "pyfa", "commit")
_TEMPLATE = Path(__file__).with_name("report.html.j2")


class Result(NamedTuple):
    """The name of a result file and its content, which includes ``environment``."""

    name: str
    data: Mapping[str, Any]


# The builder of each section, by a key that only its files have.
_MAKERS: dict[str, Callable[[str, Mapping[str, Any]], list[Section]]] = {
    "peers": report_speed.sections,
    "lengths": report_speed.lengths,
    "traffic": report_speed.traffic,
    "plans": report_static.hip,
    "counts": report_static.conformance,
    "problems": report_mi300x.own,
}


def require() -> None:
    """Raise ``ValueError`` if a package that a report needs is missing."""
    charts.require("--report")
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError(
            "--report needs jinja2, which the extra bench has: pip install 'pyfa-attention[bench]'"
        )


def checked(name: str, data: Mapping[str, Any]) -> Result:
    """Return a result. Raise ``ValueError`` if it does not contain the environment in which it was
    measured."""
    environment = data.get("environment")
    lacking = [key for key in _NEEDED if not (environment or {}).get(key)]
    if lacking:
        raise ValueError(f"{name}: expected an environment with {', '.join(_NEEDED)}; "
                         f"it lacks {', '.join(lacking)}")  # fmt: skip
    return Result(name, data)


def newest(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """Return the newest file of each suite, backend and GPU, and the names of the files that are
    left out.

    Among files of one day, the one with the most rows counts as the newest. Files that compare pyfa
    only with itself are kept apart from files that compare it with others.
    """
    best: dict[object, Result] = {}
    for result in results:
        data = result.data
        gpu = data["environment"].get("gpu")
        if "suites" in data:
            alone = all(peer.split(":")[0] == "pyfa" for peer in data["peers"])
            key: object = (tuple(data["suites"]), gpu, alone)
        elif "counts" in data:
            key = (data["backend"], gpu, data.get("note"), data.get("sms"))
        else:
            key = result.name
        there = best.setdefault(key, result)
        if _age(there) < _age(result):
            best[key] = result
    kept = [result for result in results if result in best.values()]
    return kept, [result.name for result in results if result not in kept]


def _age(result: Result) -> tuple[str, int]:
    # Only in files of `pyfa bench` does "rows" have this meaning.
    rows = result.data["rows"] if "suites" in result.data else ()
    return str(result.data["environment"]["date"]), sum("value" in row for row in rows)


def read(paths: Sequence[Path]) -> list[Result]:
    """Read the given result files and those in the given folders, in the order of their names."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError("--from: there is no result file")
    return [checked(path.name, machine.load(path)) for path in files]


def write(folder: Path, results: Sequence[Result], older: bool = False) -> Path:
    """Write ``index.html`` and ``pictures/*.svg`` into ``folder``, which is created if missing.

    If ``older`` is true, the report shows all files of a suite, not only the newest.
    """
    import jinja2

    results, left_out = (list(results), []) if older else newest(results)

    sections: list[Section] = []
    unread = []
    for result in results:
        make = _maker(result.data)
        if make is None:
            unread.append(result.name)
        else:
            sections += make(result.name, result.data)
    sections.sort(key=lambda section: section.order)
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    speeds = [section for section in sections if section.means]
    page = engine.from_string(_TEMPLATE.read_text()).render(
        title=TITLE, intro=_INTRO, questions=QUESTIONS, sections=sections, unread=unread,
        left_out=left_out, speeds=speeds, fastest=_against_fastest(speeds),
        peers=list(dict.fromkeys(peer for section in speeds for peer in section.means)),
    )  # fmt: skip
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for picture in section.figures:
            (pictures / picture.file).write_text(charts.standing_alone(picture.svg) + "\n")
    path = folder / "index.html"
    path.write_text(page)
    return path


def _against_fastest(speeds: Sequence[Section]) -> str:
    """Return, over every suite, pyfa's mean speed divided by that of the best peer there."""
    ratios = {
        each.suite: min(each.means.values())
        for each in speeds
        if not all(peer.startswith("pyfa") for peer in each.means)
    }
    told = ", ".join(f"{suite} {ratio:.2f}" for suite, ratio in ratios.items())
    return f"Geometric mean over the best other library: {told}" if told else ""


def _maker(data: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], list[Section]] | None:
    return next((make for key, make in _MAKERS.items() if key in data), None)
