"""Signatures and docstrings as Markdown, read from the source: some of it imports what need not be
here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def api(path: str, *names: str) -> str:
    """Signatures and docstrings of ``names`` in a file, in that order; by default its __all__."""
    tree = ast.parse((ROOT / path).read_text())
    nodes = {
        node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    parts = []
    for name in names or tuple(each for each in _exported(tree) if each in nodes):
        parts += _described(name, nodes[name])
    return "\n\n".join(parts)


def module(path: str) -> str:
    """A module's docstring."""
    return _prose(ast.get_docstring(ast.parse((ROOT / path).read_text())) or "")


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError("no __all__")


def _described(name: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        signature = f"class {name}({bases})"
    else:
        signature = _signature(name, node)
    prose = _prose(ast.get_docstring(node) or "")
    return [f"### {name}", f"```py\n{signature}\n```", prose]


def _signature(name: str, node: ast.FunctionDef) -> str:
    """One argument a line where it does not fit on one; ``**unknown`` is only for hints."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    parts = []
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        parts.append(_argument(argument, default))
        if given.posonlyargs and index + 1 == len(given.posonlyargs):
            parts.append("/")
    if given.vararg:
        parts.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        parts.append("*")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parts += [_argument(argument, default) for argument, default in pairs]
    if given.kwarg and given.kwarg.arg != "unknown":
        parts.append(f"**{_argument(given.kwarg, None)}")
    ends = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(parts)}){ends}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){ends}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        text += f" = {ast.unparse(default)}" if argument.annotation else f"={ast.unparse(default)}"
    return text


def _prose(docstring: str) -> str:
    """A docstring as Markdown: code in single backticks, a list of parameters, examples."""
    text = docstring.replace("``", "`")
    text = re.sub(r"^(>>> .*(?:\n(?:>>>|\.\.\.) .*)*)", r"```pycon\n\1\n```", text, flags=re.M)
    head, found, rest = text.partition("\nParameters\n----------\n")
    if not found:
        return text
    lines, listed = rest.split("\n"), []
    while lines and (lines[0].startswith("    ") or re.fullmatch(r"[\w, ]+", lines[0])):
        line = lines.pop(0)
        if line.startswith("    "):
            listed[-1] += f" {line.strip()}"
        else:
            names = ", ".join(f"`{name.strip()}`" for name in line.split(","))
            listed.append(f"- {names}:")
    return "\n".join([head, *listed, *lines])
