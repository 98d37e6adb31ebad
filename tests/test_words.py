"""Phrases that a fluent reader stumbles over are gone from what users read, and stay gone."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# All but CONTRIBUTING.md, which quotes the phrases.
PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "kernels").rglob("*.md")),
]  # fmt: skip
STUMBLES = (
    r"(row|part)s? (that|which) sees? nothing", r"where to read on", r"no result of it is there",
    r"work one by one and not together", r"belong to a backward", r"kernel of its own for few",
    r"each is asked for", r"the widening is what", r"take a prepared way",
    r"figures that are told", r"beside (the|its) peers", r"heads of (64|96|128|192|256)\b",
    r"hands? on pyfa", r"what is here", r"is no multiple of", r"has code for",
    r"docstrings have every", r"what is raised, as", r"comes? again", r"nobody has tried",
    r"comes? on top", r"takes? part in the sum", r"cause and cure", r"told so",
    r"for another group than", r"other positions than", r"but for",
    r"only the forward exists", r"is proven to", r"right to 1 ulp",
    r"what of (it|them)", r"by its own\b", r"that which", r"of people('s)?",
    r"in which they take turns", r"of (an)?other \w+ than", r"is not told of", r"deals? out",
    r"is said by", r"as the cache has", r"rounded to it too", r"in other places",
    r"went both ways", r"nothing is left that", r"not through these", r"in its order",
    r"fails? an added case", r"baseline of its own", r"sum over the parts costs",
    r"one behind the other", r"requires another \w+ than", r"since that run", r"a tile's worth",
    r"independently rounded", r"that a backend decides on", r"at the (low|high) end of the model",
)  # fmt: skip


def texts(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


def strings() -> Iterator[tuple[str, str]]:
    """Every string of the package: docstrings, messages, help."""
    for path in sorted((ROOT / "pyfa").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def test_phrases_that_readers_stumble_over_are_gone() -> None:
    patterns = [re.compile(phrase.replace(" ", r"\s+"), re.I) for phrase in STUMBLES]
    prose = [(path.name, texts(path)) for path in PAGES]
    found = [
        f"{name}: {one[0]}"
        for name, text in [*prose, *strings()]
        for pattern in patterns
        if (one := pattern.search(text))
    ]
    assert found == []


def uneven(text: str) -> list[str]:
    """The rows of tables that have more or fewer cells than the head of their table."""
    found, cells = [], 0
    for line in text.splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        here = len(re.findall(r"(?<!\\)\|", line))
        cells = cells or here
        if here != cells:
            found.append(line)
    return found


def test_no_merge_left_its_markers() -> None:
    """In a docstring or a page, no other test would see them."""
    marker = re.compile(r"^(<{7} |>{7} |={7}$)", re.M)
    files = [*PAGES, *(ROOT / "pyfa").rglob("*.py"), *(ROOT / "kernels").rglob("*.*")]
    assert [str(path) for path in files if marker.search(path.read_text())] == []


def test_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    assert uneven("| a | b |\n| --- | --- |\n| 1 | 2 | | 3 | 4 |") == ["| 1 | 2 | | 3 | 4 |"]
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
    assert {path.name: found for path in pages if (found := uneven(texts(path)))} == {}


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


def parameters(text: str) -> list[str]:
    """The lines of a docstring's list of parameters that Sphinx takes for names."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+$|\Z)", text, re.M | re.S)
    return [line for line in section[1].splitlines() if line[:1].strip()] if section else []


def test_text_after_a_list_of_parameters_has_a_heading() -> None:
    """Without one, the guide shows each of its lines as a parameter."""
    texts = {where: text for where, text in strings() if "Parameters\n" in text}
    lines = {where: parameters(inspect.cleandoc(text)) for where, text in texts.items()}
    assert len(lines) >= 6
    assert all(lines.values())
    names = re.compile(r"\w+(, \w+)*$")
    found = [(where, line) for where in lines for line in lines[where] if not names.match(line)]
    assert found == []


# The project spells as America does, as its interfaces do (quantize, synchronize).
BRITISH = re.compile(
    r"\b\w*(behaviour|neighbour|colour|honour|favour|centre[ds]?\b|modell(ed|ing)|labell(ed|ing)|"
    r"(normal|util|initial|recogn|vector|special|quant|optim|minim|maxim|synchron|serial|general|"
    r"organ|parallel|summar|real|character|visual)is(e[ds]?|ing|ations?)\b|analys(e[ds]?|ing)\b|"
    r"\bgrey\b|\blicence|artefact|\btowards\b|misspelt|learnt)\w*",
    re.I,
)
# One word for what a backend does with a call that it cannot run: it refuses it. The key "declined"
# of stored results stays.
OTHER_WORDS = re.compile(r"(?<![\"\w])declin(e[ds]?|ing)\b", re.I)


def everything() -> Iterator[tuple[str, str]]:
    """Pages, and the package with its comments and names."""
    for path in [
        *PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.py")),
        *sorted((ROOT / "pyfa").rglob("*.py")), *sorted((ROOT / "pyfa").rglob("*.[ch]")),
    ]:  # fmt: skip
        yield path.relative_to(ROOT).as_posix(), path.read_text()


@pytest.mark.parametrize("words", [BRITISH, OTHER_WORDS], ids=["spelling", "refuse"])
def test_one_spelling_and_one_word(words: re.Pattern[str]) -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, one.start()) + 1} {one[0]}"
        for name, text in everything()
        for one in words.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("Normalised neighbours", 2), ("normalized neighbors, promise, otherwise, analysis", 0)],
)
def test_the_spellings_are_told_apart(text: str, found: int) -> None:
    assert len(BRITISH.findall(text)) == found
