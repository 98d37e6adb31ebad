"""Phrases that a fluent reader stumbles over are gone from what users read, and stay gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# All but CONTRIBUTING.md, which quotes the phrases.
PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "kernels").rglob("*.md")),
]  # fmt: skip
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


# The first word of a docstring that says what a function is, and not what it does.
NOT_A_VERB = re.compile(
    r"(A|All|As|By|Each|Every|For|From|How|Of|One|Sees?|Tells|That|The|Their|Those|What|Where|"
    r"Whether|Which|Who|Whose|Why|With)$"
)


def openings() -> Iterator[tuple[str, str]]:
    """The first word of each docstring of a function of the package, and where it is."""
    for path in sorted((ROOT / "pyfa").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text.split()[0], f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def test_docstrings_of_functions_open_with_a_verb() -> None:
    assert [where for word, where in openings() if NOT_A_VERB.match(word)] == []
