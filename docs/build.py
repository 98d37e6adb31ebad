"""Builds the guide: ``python docs/build.py [--out build/docs]``. Open ``index.html`` there.

Markdown with the parts that ``generated.py`` writes becomes static pages: no network, no server, no
script is needed to read them. A link that leads nowhere ends the build with status 1.
"""

from __future__ import annotations

import argparse
import html
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import generated
import jinja2
import pygments
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# The order of the pages, in sections. The last section is the project's own files.
NAVIGATION = {
    "Guide": ("index.md", "start.md", "features.md", "migrating.md", "serving.md", "latent.md",
              "training.md", "fp8.md", "context_parallel.md", "integrations.md"),
    "Running it": ("mi300x.md", "ci.md", "troubleshooting.md"),
    "Background": ("how.md", "speed.md"),
    "Reference": ("api.md", "compat.md", "cli.md", "settings.md"),
    "Project": ("../kernels/README.md", "../CONTRIBUTING.md", "../CHANGELOG.md"),
}  # fmt: skip
_MARKER = re.compile(r"^<!-- generated: (.+?) -->$", re.M)
# How a block of code is introduced; the rest of a fence's words are for the tests.
_LABELS = {"output": "prints", "python gpu": "needs a GPU"}


class BrokenLinks(Exception):
    """Links that lead nowhere, one a line."""


@dataclass
class Page:
    """One page: its file, relative to the checkout, and what became of it."""

    source: str
    output: str
    title: str = ""
    html: str = ""
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


def pages() -> dict[str, Page]:
    """Every page by its path in the checkout, in the order of the navigation."""
    found = {}
    for names in NAVIGATION.values():
        for name in names:
            path = (DOCS / name).resolve().relative_to(ROOT)
            stem = path.stem if path.parent.name == "docs" else "-".join(path.with_suffix("").parts)
            output = f"{stem.lower().replace('-readme', '')}.html"
            found[str(path)] = Page(str(path), output)
    return found


def expand(text: str) -> str:
    """``text`` with each marker replaced by what the code says."""

    def part(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[1])
        return generated.PARTS[name](*arguments)

    return _MARKER.sub(part, text)


def slug(text: str) -> str:
    """What a heading is linked to by: letters and digits, as GitHub does it, near enough."""
    return re.sub(r"\W+", "-", re.sub(r"['’`]", "", text.lower())).strip("-")


class Renderer:
    """Markdown to HTML, with headings that can be linked to and links into the built pages."""

    def __init__(self, every: dict[str, Page]) -> None:
        self.pages = every
        self.files: set[str] = set()
        self.broken: list[str] = []
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        rules: Any = self.markdown.renderer.rules
        rules["fence"] = self._fence
        rules["code_block"] = self._fence
        rules["code_inline"] = self._code
        rules["table_open"] = lambda *_: '<div class="table"><table>\n'
        rules["table_close"] = lambda *_: "</table></div>\n"

    def render(self, page: Page) -> None:
        text = expand((ROOT / page.source).read_text())
        tokens = self.markdown.parse(text)
        seen: dict[str, int] = {}
        for token, inline in itertools.pairwise(tokens):
            if token.type != "heading_open":
                continue
            said = "".join(child.content for child in inline.children or [])
            name = slug(said)
            seen[name] = seen.get(name, 0) + 1
            name += f"-{seen[name]}" if seen[name] > 1 else ""
            token.attrSet("id", name)
            page.headings.append((int(token.tag[1]), name, said))
            if token.tag == "h1" and not page.title:
                page.title = said
        for token in tokens:
            for child in token.children or []:
                attribute = {"link_open": "href", "image": "src"}.get(child.type)
                if attribute:
                    child.attrSet(attribute, self._link(page, str(child.attrGet(attribute))))
        page.html = self.markdown.renderer.render(tokens, self.markdown.options, {})

    def _link(self, page: Page, target: str) -> str:
        if re.match(r"[a-z]+:", target):
            return target
        path, _, anchor = target.partition("#")
        where = page.source
        if path:
            where = _normal(PurePosixPath(page.source).parent / path)
        if where in self.pages:
            page.links.append(f"{self.pages[where].output}#{anchor}")
            return f"{self.pages[where].output}{'#' + anchor if anchor else ''}"
        if not (ROOT / where).is_file():
            self.broken.append(f"{page.source}: {target}")
        self.files.add(where)
        return f"files/{where}"

    @staticmethod
    def _code(tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Short code stays on one line: browsers break it at every hyphen."""
        text = tokens[index].content
        short = ' class="short"' if len(text) <= 26 else ""
        return f"<code{short}>{html.escape(text)}</code>"

    def _fence(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        token = tokens[index]
        info = token.info.strip()
        language = {"output": "text", "": "text", "shell": "bash"}.get(info, info.split(" ")[0])
        lexer = get_lexer_by_name(language)
        code = pygments.highlight(token.content, lexer, HtmlFormatter(nowrap=True))
        label = _LABELS.get(info, "")
        said = f'<span class="label">{label}</span>' if label else ""
        return f'<div class="code {language}">{said}<pre tabindex="0">{code}</pre></div>\n'


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def build(out: Path) -> list[Page]:
    """Write every page, the style sheet and the files that pages link to into ``out``.

    Raises ``BrokenLinks``; pages are written all the same.
    """
    every = pages()
    renderer = Renderer(every)
    for page in every.values():
        renderer.render(page)
    known = {page.output: {name for _, name, _ in page.headings} for page in every.values()}
    for page in every.values():
        for link in page.links:
            output, _, anchor = link.partition("#")
            if anchor and anchor not in known[output]:
                renderer.broken.append(f"{page.source}: {link}")
    loader = jinja2.FileSystemLoader(DOCS)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("template.html")
    sections = {
        title: [every[str((DOCS / name).resolve().relative_to(ROOT))] for name in names]
        for title, names in NAVIGATION.items()
    }
    order = list(every.values())
    out.mkdir(parents=True, exist_ok=True)
    for index, page in enumerate(order):
        text = template.render(
            page=page,
            sections=sections,
            version=generated.version(),
            before=order[index - 1] if index else None,
            after=order[index + 1] if index + 1 < len(order) else None,
        )
        (out / page.output).write_text(text)
    (out / "style.css").write_text(style())
    for name in sorted(renderer.files):
        if (ROOT / name).is_file():
            (out / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, out / "files" / name)
    if renderer.broken:
        raise BrokenLinks("\n".join(renderer.broken))
    return order


def style() -> str:
    """The style sheet with the colours of code, light and dark."""

    def colours(name: str, prefix: str) -> str:
        lines = HtmlFormatter(style=name).get_style_defs(f"{prefix} pre").splitlines()
        # The page says what is behind the code, and how far its lines are apart.
        return "\n".join(
            line for line in lines if "background" not in line and "linenos" not in line
        )

    dark = colours("github-dark", ":root[data-theme=dark]")
    return "\n".join(
        [
            (DOCS / "style.css").read_text(),
            colours("friendly", ""),
            dark,
            "@media (prefers-color-scheme: dark) {",
            colours("github-dark", ":root:not([data-theme=light])"),
            "}",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the guide as static pages.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        built = build(options.out)
    except BrokenLinks as error:
        print(f"these links lead nowhere:\n{error}", file=sys.stderr)
        return 1
    print(f"{len(built)} pages: {options.out / 'index.html'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
