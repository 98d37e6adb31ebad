"""README says what the code does: its examples run, its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyfa import cli, env
from pyfa.backends import AUTOMATIC, BACKENDS, NAMES
from pyfa.problem import FEATURES

ROOT = Path(__file__).parent.parent
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


def settings_table() -> list[str]:
    """What belongs under "Settings"."""
    return [
        f"| `{variable.name}` | {variable.form} | {variable.meaning} |".replace("\n", " ")
        for variable in env.VARIABLES.values()
    ]


def in_this_release(name: str) -> str:
    """What the table of backends says of one."""
    lacking = [one.phrase for key, one in FEATURES.items() if key not in BACKENDS[name].FEATURES]
    if not lacking:
        return "all features"
    if len(lacking) < len(FEATURES) / 2:
        return f"all features but {', '.join(lacking)}"
    return ", ".join(FEATURES[key].phrase for key in FEATURES if key in BACKENDS[name].FEATURES)


def test_it_opens_with_the_two_commands() -> None:
    commands = [line.split()[0] for line in README.splitlines() if line.startswith("    ci/")][:2]
    assert commands == ["ci/demo", "ci/test"]
    assert README.index("    ci/demo") < 20
    for command in (*commands, "ci/conformance", ".ci/run"):
        assert (ROOT / command).stat().st_mode & 0o111


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page, in one namespace, as a reader would."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) >= 6
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "page_table" in printed
    # The error is shown as it is printed.
    shown = "\n".join(line.strip() for line in section("Errors").splitlines())
    for line in printed[printed.index("no backend") :].splitlines():
        assert line.strip() in shown


def test_settings_are_those_of_the_code() -> None:
    lines = [line for line in section("Settings").splitlines() if line.startswith("| `")]
    expected = settings_table()
    assert lines == expected, "README's table under Settings should be:\n" + "\n".join(expected)


def test_backends_are_those_of_the_code() -> None:
    found = {row[0].strip("`"): row[2] for row in rows("Backends")}
    assert list(found) == list(NAMES)
    assert found == {name: in_this_release(name) for name in NAMES}
    text = section("Backends")
    for vendor, on in (("amd", "on AMD"), ("nvidia", "on NVIDIA"), ("cpu", "on a CPU")):
        assert f"{on} {', '.join(AUTOMATIC[vendor])}" in text


def test_commands_are_those_of_the_code() -> None:
    said = {row[0].strip("`").split()[1] for row in rows("Command line")}
    (commands,) = (
        action.choices for action in cli.parser()._actions if isinstance(action.choices, dict)
    )
    assert said == set(commands)


def test_flags_are_those_of_the_code() -> None:
    text = section("Command line")
    for command in ("explain", "plan", "conformance", "bench"):
        (commands,) = (
            action.choices for action in cli.parser()._actions if isinstance(action.choices, dict)
        )
        flags = commands[command]._option_string_actions
        for flag in set(flags) - {"-h", "--help", "--json"}:
            assert flag in text, flag


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_files_named_in_contributing_exist() -> None:
    """Paths in CONTRIBUTING.md, but those with a placeholder in capitals or angle brackets."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:pyfa|tests|benchmarks|ci|kernels)/[\w./]+)`", text)
    assert len(named) > 10
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
