"""Finds writes of a mod to objects outside of it. A mod runs only once, while it is traced."""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Callable
from typing import Any

_WRITES = {
    "STORE_GLOBAL": "assigns to a global", "DELETE_GLOBAL": "deletes a global",
    "STORE_ATTR": "assigns to an attribute", "DELETE_ATTR": "deletes an attribute",
    "STORE_SUBSCR": "writes into a container", "DELETE_SUBSCR": "deletes from a container",
}  # fmt: skip


def write_in(mod: Callable[..., Any]) -> str:
    """Return the place and kind of the first write to an object outside of ``mod``; "" if there is
    none. Such a write would happen only once, during tracing."""
    code = getattr(mod, "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        started: Any = each.starts_line
        if isinstance(started, bool):  # from Python 3.13 on
            started = getattr(each, "line_number", None) if started else None
        line = started or line
        what = _WRITES.get(each.opname)
        if each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in code.co_freevars:
            what = f"assigns to {each.argval}, a variable of the function around it"
        if what:
            return f"{code.co_name}, {code.co_filename}:{line}: {what}"
    return ""


def containers(mod: Callable[..., Any]) -> list[object]:
    """Return the contents of the lists, dicts and sets outside of a function that it can access."""
    found: list[object] = []
    code = getattr(mod, "__code__", None)
    if code is None:
        return found
    values = []
    for cell in getattr(mod, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    known = getattr(mod, "__globals__", {})
    values += [known[name] for name in code.co_names if name in known]
    for value in values:
        if isinstance(value, (list, set)):
            found.append([id(x) for x in value])
        elif isinstance(value, dict):
            found.append([(key, id(x)) for key, x in value.items()])
    return found
