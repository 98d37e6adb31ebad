"""README says what the code does: its examples run, its tables are those of the code."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from pyfa import cli
from pyfa.backends import AUTOMATIC, BACKENDS, NAMES
from pyfa.problem import FEATURES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text under a second-level heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found is not None, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cut = re.compile(r"(?<!\\)\|")
    return [[cell.strip() for cell in cut.split(line.strip("|"))] for line in lines[2:]]


def in_this_release(name: str) -> str:
    """What the table of backends says of one."""
    able = BACKENDS[name].FEATURES
    lacking = [one.phrase for key, one in FEATURES.items() if key not in able]
    if not lacking:
        return "all features"
    if len(lacking) < len(FEATURES) / 2:
        comma = "," * (len(lacking) > 2)
        return "all features except " + f"{comma} and ".join(
            [", ".join(lacking[:-1]), lacking[-1]] if len(lacking) > 1 else lacking
        )
    return ", ".join(FEATURES[key].phrase for key in FEATURES if key in BACKENDS[name].FEATURES)


def test_it_opens_with_the_two_commands() -> None:
    commands = [line.split()[0] for line in README.splitlines() if line.startswith("    ci/")][:2]
    assert commands == ["ci/demo", "ci/test"]
    assert README.index("    ci/demo") < 120  # below one sentence, above everything else
    for command in (*commands, "ci/conformance", ".ci/run"):
        assert (ROOT / command).stat().st_mode & 0o111


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_examples_run() -> None:
    """In the order of the page, in one namespace, as a reader would. The first gives a result."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) >= 6
    code = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(code) <= 10
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
        assert "out" in namespace


def test_backends_are_those_of_the_code() -> None:
    found = {row[0].strip("`"): row[2] for row in rows("Backends")}
    assert list(found) == list(NAMES)
    assert found == {name: in_this_release(name) for name in NAMES}
    text = " ".join(section("Backends").split())  # wherever lines break
    for vendor, on in (("amd", "on AMD"), ("nvidia", "on NVIDIA"), ("cpu", "on a CPU")):
        assert f"{', '.join(AUTOMATIC[vendor])} {on}" in text


def test_commands_are_those_of_the_code() -> None:
    said = {row[0].strip("`").split()[1] for row in rows("Command line")}
    (commands,) = (
        action.choices for action in cli.parser()._actions if isinstance(action.choices, dict)
    )
    assert said == set(commands)


def speeds(name: str) -> list[float]:
    """pyfa's speed over the fastest other library's, in each cell of a result file."""
    cells: dict[str, dict[str, float]] = {}
    for row in json.loads((RESULTS / name).read_text())["rows"]:
        # The float8 suite also times 16-bit inputs; only its float8 cells are compared.
        compared = row["suite"] != "fp8" or row["problem"]["fp8"] == "inputs"
        if compared and "seconds" in row:
            cells.setdefault(row["cell"], {})[row["peer"]] = row["seconds"]["median"]
    return [
        min(seconds for peer, seconds in found.items() if peer != "pyfa") / found["pyfa"]
        for found in cells.values()
    ]


def test_every_figure_is_that_of_its_file() -> None:
    table = rows("Speed")
    assert len(table) >= 8
    for what, cells, mean, smallest, file in table:
        found = speeds(file.strip("`"))
        assert int(cells) == len(found), what
        assert mean == f"{statistics.geometric_mean(found):.3f}", what
        assert smallest == f"{min(found):.3f}", what


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    assert len(targets) > 10
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("folder", ["kernels", "kernels/cuda"])
def test_links_of_the_kernels_folders_lead_somewhere(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert len(targets) >= 9
    assert [target for target in targets if not (ROOT / folder / target).exists()] == []


def test_files_named_in_contributing_exist() -> None:
    """Paths in CONTRIBUTING.md, but those with a placeholder in capitals or angle brackets."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:pyfa|tests|benchmarks|ci|kernels)/[\w./]+)`", text)
    assert len(named) > 10
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
