"""Emits the bounds of a mask_mod as C++ source for ``kernels/ranges.h``.

The function computes, for a tile, the least and the largest value of each operation from the
tile's first and last rows and keys. If both bounds of the result agree, the mask_mod has that value
at every point of the tile. Nothing is known of floats.
"""

from __future__ import annotations

import torch

from . import Mods
from .ir import COMPARISONS, Op

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
_INPUTS = "const Captured *captured, Range b, Range h, Range q, Range kv"
_UNKNOWN = "anything<{0}>()"


def source(mods: Mods) -> str:
    """Return the function ``mask_range``, if there is a mask_mod."""
    function = mods.mask
    if function is None:
        return "\n"
    lines = [f"DEVICE Range mask_range({_INPUTS}) {{"]
    for number, op in enumerate(function.ops):
        if op.type == "f" or op.name == "input":
            continue
        args = [_name(function.ops, x) for x in op.args]
        lines.append(f"  Range t{number} = {_text(mods, op, function.ops, args)};")
    lines += [f"  return {_name(function.ops, function.results[0])};", "}"]
    return "\n".join(lines) + "\n"


def _name(ops: tuple[Op, ...], number: int) -> str:
    op = ops[number]
    return str(op.value) if op.name == "input" else f"t{number}"


def _text(mods: Mods, op: Op, ops: tuple[Op, ...], args: list[str]) -> str:
    type = _TYPES[op.type]
    if op.name == "const":
        value = int(op.value or 0)
        # The least integer of 64 bits is no literal.
        number = f"{value}ll" if value > -(1 << 63) else "kLongLeast"
        return f"Range{{{number}, {number}}}"
    if op.name == "load":
        kind = _LOADS[mods.kinds[int(op.value or 0)][0]]
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
