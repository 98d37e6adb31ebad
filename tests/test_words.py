"""Phrases that a fluent reader stumbles over are gone from what users read, and stay gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Written elsewhere, or quoting the phrases.
APART = {"how.md", "mi300x.md", "CONTRIBUTING.md"}
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name not in APART
]
STUMBLES = (
    r"(row|part)s? (that|which) sees? nothing", r"where to read on", r"no result of it is there",
    r"work one by one and not together", r"belong to a backward", r"kernel of its own for few",
    r"each is asked for", r"the widening is what", r"take a prepared way",
    r"figures that are told", r"beside (the|its) peers", r"heads of (64|96|128|192|256)\b",
    r"hands? on pyfa", r"what is here", r"is no multiple of", r"has code for",
    r"docstrings have every", r"what is raised, as", r"comes? again",
)  # fmt: skip


def texts(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Of the modules that users import, and of their public functions and classes."""
    files = [ROOT / "pyfa" / f"{name}.py" for name in ("api", "quantize", "errors", "merging")]
    for folder in ("compat", "integrations", "distributed", "cli"):
        files += sorted((ROOT / "pyfa" / folder).glob("*.py"))
    for path in files:
        tree = ast.parse(path.read_text())
        for node in (tree, *tree.body):
            name = getattr(node, "name", path.stem)
            documented = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
            if documented and not (node is not tree and name.startswith("_")):
                yield f"{path.stem}.{name}", ast.get_docstring(node) or ""  # type: ignore[arg-type]


@pytest.mark.parametrize("phrase", STUMBLES)
def test_phrases_that_readers_stumble_over_are_gone(phrase: str) -> None:
    pattern = re.compile(phrase.replace(" ", r"\s+"), re.I)
    found = [path.name for path in PAGES if pattern.search(texts(path))]
    found += [name for name, text in public_docstrings() if pattern.search(text)]
    assert found == []
