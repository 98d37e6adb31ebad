"""The messages that the guide explains are those of the code, and none that matters is left out."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@functools.cache
def strings() -> tuple[str, ...]:
    """Every string of the package, with … for what is put into it."""
    found = []
    for path in (ROOT / "pyfa").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[sdf]", "…", node.value))
    return tuple(found)


def explained() -> list[str]:
    """The messages that stand as headings in the page on troubleshooting."""
    text = (DOCS / "troubleshooting.md").read_text()
    return [each.strip() for each in re.findall(r"^### `+(.+?)`+$", text, re.M)]


# Put together by the code from parts, "name: expected this; got that".
_WRONG = re.compile(r"^.*?: expected (.*); got …$")


@pytest.mark.parametrize("message", explained())
def test_messages_are_those_of_the_code(message: str) -> None:
    whole = re.sub(r"from 1 to \d+$", "…", _WRONG.sub(r"\1", message))
    parts = [part.strip(" ,:;(") for part in whole.split("…")]
    for part in (part for part in parts if len(part) > 3):
        assert any(part in string for string in strings()), part


def said_when_not_ready() -> Iterator[str]:
    """What functions named ``why_…`` and ``_why_…`` of backends return, and all warnings."""
    for path in (ROOT / "pyfa").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and re.match(r"_?why_(not|unavailable)$|_open$", node.name)
                and "backends" in path.parts
            ):
                for each in ast.walk(node):
                    if isinstance(each, ast.Return) and each.value is not None:
                        yield from _texts(each.value)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "_log.warning",
                "warnings.warn",
            ):
                yield from _texts(node.args[0])


def _texts(node: ast.expr) -> Iterator[str]:
    """The strings of an expression, with … for what is put into them."""
    inside: set[int] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(each)} - {id(each)}
            if id(each) not in inside:
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in each.values
                )
        elif (
            isinstance(each, ast.Constant)
            and isinstance(each.value, str)
            and id(each) not in inside
        ):
            yield each.value


def test_what_keeps_a_backend_from_running_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    missing = []
    for message in said_when_not_ready():
        parts = re.split(r"…|%(?:\.\d+)?[sdf]", message)
        longest = max((part.strip(" ,:;(") for part in parts), key=len)
        # A sentence, not one word of it; a sentence may begin in the page's words.
        if len(longest.split()) >= 3 and longest[:40].rsplit(" ", 1)[0] not in page:
            missing.append(message)
    assert missing == []
