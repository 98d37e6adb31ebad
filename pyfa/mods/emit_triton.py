"""Emits a score_mod and a mask_mod as Triton functions. Their arguments and results are blocks of
the shape of a tile of scores, or values that broadcast to this shape."""

from __future__ import annotations

import math

import torch

from . import MOST_CAPTURED, Mods
from .ir import COMPARISONS, Function, Op
from .ranges import Range, ranges_of

_TYPES = {"b": "tl.int1", "i": "tl.int32", "l": "tl.int64", "f": "tl.float32"}
_SIGNS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "add": "+", "sub": "-",
    "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
# Operations with another name in Triton, or made by ``backends/triton/modifiers.py``.
_CALLS = {
    "abs": "tl.abs", "exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log", "log2": "tl.log2",
    "sqrt": "tl.sqrt", "sin": "tl.sin", "cos": "tl.cos", "floor": "tl.floor", "ceil": "tl.ceil",
}  # fmt: skip
# The Triton type of a pointer to such elements.
POINTERS = {
    torch.bool: "*u8", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
# The entries of one captured tensor in the table of sizes and strides.
INFO = 8
_MORE = ", ".join(("INFO", *(f"C{slot}" for slot in range(MOST_CAPTURED))))


def source(mods: Mods) -> str:
    """Return the source of the Triton functions ``score_mod`` and ``mask_mod``, if ``mods`` has
    them. ``score_mod`` returns score and slope."""
    parts = []
    if mods.slope is not None:
        parts.append(_function(mods, mods.slope, f"score_mod(x, b, h, q, kv, {_MORE})"))
    if mods.mask is not None:
        parts.append(_function(mods, mods.mask, f"mask_mod(b, h, q, kv, {_MORE})"))
    return "\n\n\n".join(parts) + "\n"


def _function(mods: Mods, function: Function, head: str) -> str:
    ranges = ranges_of(function)
    lines = ["@triton.jit", f"def {head}:"]
    for number, op in enumerate(function.ops):
        if op.name == "input" or _is_literal(op):
            continue
        args = [_operand(function, x) for x in op.args]
        of_args = [ranges[x] for x in op.args]
        text = _load(mods, op, args, of_args) if op.name == "load" else _text(op, args, of_args)
        lines.append(f"    t{number} = {text}")
    results = ", ".join(_operand(function, x) for x in function.results)
    return "\n".join([*lines, f"    return {results}"])


def _is_literal(op: Op) -> bool:
    """Return whether the constant is written as a literal, whose type Triton takes from the other
    operand. An int64 is created explicitly; two literals would be computed as int32."""
    return op.name == "const" and op.type in ("f", "i")


def _operand(function: Function, number: int) -> str:
    op = function.ops[number]
    if op.name == "input":
        return "x" if op.value == "score" else str(op.value)
    if not _is_literal(op):
        return f"t{number}"
    if op.type == "i":
        return f"({op.value})"
    value = float(op.value or 0.0)
    return f"({value!r})" if math.isfinite(value) else f'float("{value}")'


def _load(mods: Mods, op: Op, args: list[str], ranges: list[Range]) -> str:
    slot = int(op.value or 0)
    place = "".join(
        f" + mod_index({index}, INFO + {slot * INFO + dim}, {low < 0})"
        for dim, (index, (low, _)) in enumerate(zip(args, ranges, strict=True))
    )
    found = f"tl.load(C{slot}{place})"
    if mods.kinds[slot][0] is torch.bool:
        return f"({found} != 0)"
    return f"{found}.to({_TYPES[op.type]})"


def _text(op: Op, args: list[str], ranges: list[Range]) -> str:
    name, type = op.name, op.type
    if name == "const":
        return f"tl.full([], {int(op.value or 0)}, {_TYPES[type]})"
    if name == "where":
        # With two literals Triton would have to guess the type.
        return f"tl.where({', '.join(args)}).to({_TYPES[type]})"
    if name == "cast":
        return f"{args[0]}.to({_TYPES[type]})"
    if name == "not":
        return f"({args[0]} == 0)" if type == "b" else f"({args[0]} ^ -1)"
    if name == "neg":
        return f"-{args[0]}"
    if name in ("floordiv", "truncdiv", "mod"):
        if ranges[0][0] >= 0 and ranges[1][0] > 0:
            return f"{args[0]} {'%' if name == 'mod' else '//'} {args[1]}"
        return f"mod_{name}({args[0]}, {args[1]})"
    if name in _SIGNS:
        sign = "!=" if name == "xor" and type == "b" else _SIGNS[name]
        # Two literals are Python's numbers, and their sum too: comparisons have been folded.
        return f"({args[0]} {sign} {args[1]})"
    assert name not in COMPARISONS
    return f"{_CALLS.get(name, f'mod_{name}')}({', '.join(args)})"
