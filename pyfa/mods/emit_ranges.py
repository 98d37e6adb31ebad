"""Emits the bounds of a mask_mod as C++ source for ``kernels/ranges.h``.

The function ``mask_range`` computes, for a tile, the least and the largest value of each operation
from the tile's first and last rows and keys. If both bounds of the result agree, the mask_mod has
that value at every point of the tile. Floats have no bounds.

A load whose index depends on the row alone, or on the key alone, reads the same values in all tiles
with these rows or keys. ``bounds_of_rows`` and ``bounds_of_keys`` compute the bounds of such loads,
once for each tile of rows and of keys. ``mask_range`` looks these bounds up in a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from . import Mods
from .ir import COMPARISONS, Function, Op

_TYPES = {"b": "bool", "i": "int", "l": "long long"}
# How an element of a captured tensor lies in memory, and whether it is a truth value.
_LOADS = {
    torch.bool: "unsigned char, true",
    torch.uint8: "unsigned char, false",
    torch.int8: "signed char, false",
    torch.int16: "short, false",
    torch.int32: "int, false",
    torch.int64: "long long, false",
}
_INPUTS = "const Captured *captured, Range b, Range h"
_TABLES = "Table of_rows, Table of_keys"
_UNKNOWN = "anything<{0}>()"
_SIDES = {"q": "rows", "kv": "keys"}


def tabled(function: Function) -> dict[str, list[int]]:
    """Return the integer loads that depend only on the row ("q") and only on the key ("kv"), as
    indices into ``function.ops``. A load has the same place in its list as in the table of
    bounds."""
    inputs: list[frozenset[str]] = []
    for op in function.ops:
        own = {str(op.value)} if op.name == "input" else set()
        inputs.append(frozenset(own.union(*(inputs[x] for x in op.args))))
    return {
        side: [
            number
            for number, op in enumerate(function.ops)
            if op.name == "load" and op.type != "f" and inputs[number] & {"q", "kv"} == {side}
        ]
        for side in _SIDES
    }


def most_tabled(mods: Mods) -> int:
    """Return how many bounds a tile has in the table, 0 if there is no table."""
    return 0 if mods.mask is None else max(map(len, tabled(mods.mask).values()))


def source(mods: Mods) -> str:
    """Return the function ``mask_range`` and those for the table, if there is a mask_mod."""
    function = mods.mask
    if function is None:
        return "\n"
    found = tabled(function)
    lines = [f"constexpr int kTabled = {most_tabled(mods)};"]
    for side, loads in found.items():
        lines.append(
            f"DEVICE void bounds_of_{_SIDES[side]}({_INPUTS}, Range {side}, Range *found) {{"
        )
        lines += _body(mods, function, {}, _needed(function, loads), together=True)
        lines += [f"  found[{place}] = t{number};" for place, number in enumerate(loads)]
        lines.append("}")
    tables = {
        number: f"tabled(of_{_SIDES[side]}, {place})"
        for side, loads in found.items()
        for place, number in enumerate(loads)
    }
    lines.append(f"DEVICE Range mask_range({_INPUTS}, Range q, Range kv, {_TABLES}) {{")
    lines += _body(mods, function, tables, _needed(function, function.results[:1], tables))
    lines += [f"  return {_name(function.ops, function.results[0])};", "}"]
    return "\n".join(lines) + "\n"


def _needed(function: Function, results: Iterable[int], known: Collection[int] = ()) -> set[int]:
    """Return the operations that these results need, except those that are ``known``."""
    needed: set[int] = set()
    pending = list(results)
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            if number not in known and function.ops[number].type != "f":
                pending += function.ops[number].args
    return needed


def _body(
    mods: Mods, function: Function, known: dict[int, str], needed: set[int], together: bool = False
) -> list[str]:
    """Return the lines that compute the bounds of the operations in ``needed``. If the lanes of a
    wavefront are ``together``, they share the elements of each load."""
    lines = []
    for number, op in enumerate(function.ops):
        if number not in needed or op.type == "f" or op.name == "input":
            continue
        args = [_name(function.ops, x) for x in op.args]
        text = known.get(number) or _text(mods, op, function.ops, args, together)
        lines.append(f"  Range t{number} = {text};")
    return lines


def _name(ops: tuple[Op, ...], number: int) -> str:
    op = ops[number]
    return str(op.value) if op.name == "input" else f"t{number}"


def _text(mods: Mods, op: Op, ops: tuple[Op, ...], args: list[str], together: bool) -> str:
    type = _TYPES[op.type]
    if op.name == "const":
        value = int(op.value or 0)
        # The least integer of 64 bits is no literal.
        number = f"{value}ll" if value > -(1 << 63) else "kLongLeast"
        return f"Range{{{number}, {number}}}"
    if op.name == "load":
        kind = f"{_LOADS[mods.kinds[int(op.value or 0)][0]]}, {'true' if together else 'false'}"
        return f"range_load<{kind}>({', '.join((f'captured[{op.value}]', *args))})"
    if any(ops[x].type == "f" for x in op.args):
        return _UNKNOWN.format(type)
    if op.name == "cast":
        return args[0] if op.type == "l" else f"fitted<{type}>({args[0]})"
    if op.name == "where":
        return f"range_where({', '.join(args)})"
    if op.name in COMPARISONS:
        return f"range_{op.name}({', '.join(args)})"
    return f"range_{op.name}<{type}>({', '.join(args)})"
