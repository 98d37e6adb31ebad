"""Sphinx's settings of the guide. A page's line ``<!-- generated: NAME -->`` becomes what
``generated.py`` returns for it; pages load nothing from the network."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import generated  # noqa: E402
import matrix  # noqa: E402
import patterns  # noqa: E402

project, author = "pyfa", "The pyfa authors"
version = release = generated.version()
html_title = f"pyfa {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["pictures/*", "style/*"]
html_theme = "furo"
html_static_path = ["style"]
html_css_files = ["extra.css"]
html_js_files = ["extra.js"]
html_copy_source = html_show_sphinx = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
# The default muted colors have a contrast below 4.5:1.
html_theme_options = {
    "light_css_variables": {"color-foreground-muted": "#5c6670", "color-api-overall": "#5c6670"},
    "dark_css_variables": {"color-foreground-muted": "#97a1ab", "color-api-overall": "#97a1ab"},
}
copybutton_exclude = ".linenos, .gp, .go"
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
suppress_warnings = ["myst.header"]  # what generates commands nests them deeper than one level

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["transformers", "diffusers"]
python_maximum_signature_line_length = 88
# Aliases stay names, which the API page explains.
autodoc_type_aliases = {
    name: f"pyfa.{name}" for name in ("Window", "Descale", "Result", "Backends")
}
napoleon_google_docstring = napoleon_use_param = False

PARTS = {**generated.PARTS, **matrix.PARTS, **patterns.PARTS}
_MARKER = re.compile(r"^<!-- generated: (.+?) -->$", re.M)
# How a block of code is introduced; the rest of a fence's words are for the tests.
_CAPTIONS = {"output": ("text", "prints"), "python gpu": ("python", "needs a GPU")}


def prepared(text: str) -> str:
    """Return a page's text with each marker replaced by its generated text, in MyST's syntax."""

    def part(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[1])
        return PARTS[name](*arguments)

    def fence(match: re.Match[str]) -> str:
        if match[1] not in _CAPTIONS:
            return f"```{match[1].split()[0]}"
        language, caption = _CAPTIONS[match[1]]
        return f"```{{code-block}} {language}\n:caption: {caption}"

    return re.sub(r"^```([a-z]+(?: [a-z]+)*)$", fence, _MARKER.sub(part, text), flags=re.M)


def _prepare(_app: Any, _page: str, source: list[str]) -> None:
    source[0] = prepared(source[0])


def _as_written(*given: Any) -> tuple[str | None, str | None]:
    """Return a signature without ``**unknown``, which exists only for hints, and with the aliases'
    names."""
    signature, returned = (each or "" for each in given[-2:])
    signature = signature.replace(", **unknown: object", "")
    written = [re.sub(r"TypeAliasForwardRef\('(.+?)'\)", r"\1", x) for x in (signature, returned)]
    return written[0] or None, written[1] or None


def _with_code(*given: Any) -> None:
    """Mark a docstring's indented lines after an empty line as code, as in Markdown."""
    lines: list[str] = given[-1]
    for at in range(len(lines) - 1, 1, -1):
        if lines[at].startswith("    ") and not lines[at - 1] and not lines[at - 2].startswith(" "):
            lines[at:at] = ["::", ""]


def _accessible(*given: Any) -> None:
    """Fix what axe finds in the theme: headings without a level, and signatures' parameters as
    terms without a definition list."""
    context: dict[str, Any] = given[3]
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    parameters = re.compile(r"<dl>\s*(<dd><em class=\"sig-param\".*?)</dl>", re.S)
    context["body"] = parameters.sub(
        lambda found: re.sub(r"(</?)dd\b", r"\1span", found[1]), context.get("body", "")
    )


def setup(app: Any) -> None:
    app.connect("html-page-context", _accessible, priority=900)  # after the theme
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _with_code, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _as_written)
