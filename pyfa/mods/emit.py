"""Emits a score_mod and a mask_mod as C++ source for ``kernels/mods.h``, the same for HIP and
CUDA."""

from __future__ import annotations

import math
import struct

import torch

from . import Mods
from .accuracy import weights_of
from .ir import COMPARISONS, Function, Op, loads_by
from .ranges import Range, ranges_of
from .steps import with_steps

_TYPES = {"b": "bool", "i": "int", "l": "long long", "f": "float"}
_UNSIGNED = {"i": "unsigned", "l": "unsigned long long"}
_SIGNS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "add": "+", "sub": "-",
    "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
# How an element of a captured tensor lies in memory, and what makes a number of it.
_LOADS = {
    torch.bool: ("unsigned char", "({0} != 0)"),
    torch.uint8: ("unsigned char", "(int){0}"),
    torch.int8: ("signed char", "(int){0}"),
    torch.int16: ("short", "(int){0}"),
    torch.int32: ("int", "{0}"),
    torch.int64: ("long long", "{0}"),
    torch.float16: ("unsigned short", "float_of_half({0})"),
    torch.bfloat16: ("unsigned short", "mod_bfloat16({0})"),
    torch.float32: ("float", "{0}"),
    torch.float64: ("double", "(float){0}"),
}
# A lane's scores of a tile: q and kv of the first one, and how far another is from there.
_OF_SCORE = (
    "const Captured *captured, float x, int b, int h, int q_base, int kv_base, int dq, int dk"
)
_OF_MASK = "const Captured *captured, int b, int h, int q, int kv"
_STEPS = [
    "  int q = q_base + dq, kv = kv_base + dk;",
    "  float q_step = (float)dq, kv_step = (float)dk;",
]
# A result may be wrong by this many times the 2^-22 of ``mod_tanh_near``; a slope by fewer.
_MOST_WEIGHT, _OF_SLOPE = 512.0, 128.0


def source(mods: Mods) -> str:
    """Return the functions ``mod_score``, ``mod_slope`` and ``mod_mask``, for the mods that
    exist."""
    lines = []
    if mods.score is not None and mods.slope is not None:
        lines += ["#define HAS_SCORE_MOD 1"]
        lines += [f"#define SCORE_OPERATIONS {len(mods.score.ops)}"]
        lines += [f"#define SCORE_LOADS {loads_by(mods.score, 'q', 'kv')}"]
        score, slope = with_steps(mods.score), with_steps(mods.slope)
        lines += [f"DEVICE float mod_score({_OF_SCORE}) {{", *_STEPS, *_body(mods, score)]
        lines += [f"  return {_name(score, 0)};", "}"]
        lines += [f"DEVICE float mod_slope({_OF_SCORE}, float &slope) {{", *_STEPS]
        lines += [*_body(mods, slope), f"  slope = {_name(slope, 1)};"]
        lines += [f"  return {_name(slope, 0)};", "}"]
    if mods.mask is not None:
        lines += [f"#define MASK_LOADS {int(loads_by(mods.mask, 'kv') > 0)}"]
        lines += ["#define HAS_MASK_MOD 1", f"DEVICE bool mod_mask({_OF_MASK}) {{"]
        lines += _body(mods, mods.mask)
        lines += [f"  return {_name(mods.mask, 0)};", "}"]
    return "\n".join(lines) + "\n"


def _name(function: Function, result: int) -> str:
    return _operand(function, function.results[result])


def _operand(function: Function, number: int) -> str:
    op = function.ops[number]
    if op.name == "input":
        return "x" if op.value == "score" else str(op.value)
    return _constant(op) if op.name == "const" else f"t{number}"


def _body(mods: Mods, function: Function) -> list[str]:
    ranges = ranges_of(function)
    weights = weights_of(function, (1.0, _OF_SLOPE)[: len(function.results)])
    lines = []
    for number, op in enumerate(function.ops):
        if op.name in ("input", "const"):
            continue
        args = [_operand(function, x) for x in op.args]
        if op.name == "load":
            text = _load(mods, op, args, [ranges[x] for x in op.args])
        elif function is not mods.mask and (factor := _reciprocal(function, op)):
            text = f"{args[0]} * {factor}"
        elif op.name == "tanh" and function is not mods.mask and weights[number] <= _MOST_WEIGHT:
            text = _near_tanh(function, op)
        else:
            given = function.ops[op.args[0]].type
            text = _expression(op, given, args, [ranges[x] for x in op.args])
        lines.append(f"  {_TYPES[op.type]} t{number} = {text};")
    return lines


def _constant(op: Op) -> str:
    value = op.value
    if op.type == "b":
        return "true" if value else "false"
    if op.type == "f":
        return _float(float(value))  # type: ignore[arg-type]
    end = "ll" if op.type == "l" else ""
    number = int(value or 0)
    # The least integer is no literal.
    return f"({number + 1}{end} - 1)" if number < 0 else f"{number}{end}"


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")'
    try:
        (value,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        value = math.copysign(math.inf, value)
    if math.isinf(value):
        return "INFINITY_F" if value > 0 else "-INFINITY_F"
    return f"({value.hex()}f)"


def _reciprocal(function: Function, op: Op) -> str:
    """Return the factor that the division of floats ``op`` becomes, "" if it stays a division.

    The product is within 1.5 ulp. A division takes 8 instructions, and a branch to further ones:
    with divisions, a softcap as a score_mod took 3.1 ms on an H200, and the built-in softcap,
    without divisions, took 1.8. A mask_mod keeps its divisions, because a difference of an ulp may
    mask another key.
    """
    value = function.ops[op.args[1]].value if op.name == "div" and op.type == "f" else None
    if value is None or not 2.0**-126 <= abs(float(value)) <= 2.0**126:
        return ""
    return _float(1.0 / float(value))


def _near_tanh(function: Function, op: Op) -> str:
    """Return the tanh whose error is small compared with 1, but not compared with the result. A
    factor of its argument is merged with that of its exponential."""
    inner, factor = op.args[0], 1.0
    source = function.ops[inner]
    if source.name in ("mul", "div") and len(source.args) == 2:
        for place in (0, 1) if source.name == "mul" else (1,):
            value = function.ops[source.args[place]].value
            if function.ops[source.args[place]].name == "const" and value:
                factor = float(value) if source.name == "mul" else 1.0 / float(value)
                inner = source.args[1 - place]
                break
    return f"mod_tanh_near({_operand(function, inner)}, {_float(factor * 2.0 / math.log(2.0))})"


def _load(mods: Mods, op: Op, args: list[str], ranges: list[Range]) -> str:
    """Load the element, with clamped indices."""
    slot = int(op.value or 0)
    memory, convert = _LOADS[mods.kinds[slot][0]]
    place = " + ".join(
        f"mod_index<{'true' if low < 0 else 'false'}>(captured[{slot}], {index}, {dim})"
        for dim, (index, (low, _)) in enumerate(zip(args, ranges, strict=True))
    )
    return convert.format(f"mod_load<{memory}>(captured[{slot}], {place or '0u'})")


def _expression(op: Op, given: str, args: list[str], ranges: list[Range]) -> str:
    name, type = op.name, op.type
    if name == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if name == "cast":
        return f"({_TYPES[type]}){args[0]}"
    if name in COMPARISONS or (name in ("and", "or", "xor") and type != "f"):
        sign = "!=" if name == "xor" and type == "b" else _SIGNS[name]
        return f"{args[0]} {sign} {args[1]}"
    if name == "not":
        return f"!{args[0]}" if type == "b" else f"~{args[0]}"
    if type == "f":
        if name in _SIGNS:
            return f"{args[0]} {_SIGNS[name]} {args[1]}"
        return f"-{args[0]}" if name == "neg" else f"mod_{name}({', '.join(args)})"
    unsigned = _UNSIGNED[type]
    if name in ("add", "sub", "mul"):  # which wrap around
        return f"({_TYPES[type]})(({unsigned}){args[0]} {_SIGNS[name]} ({unsigned}){args[1]})"
    if name == "neg":
        return f"({_TYPES[type]})(0 - ({unsigned}){args[0]})"
    if name in ("floordiv", "truncdiv", "mod") and ranges[0][0] >= 0 and ranges[1][0] > 0:
        sign = "%" if name == "mod" else "/"
        return f"({_TYPES[type]})(({unsigned}){args[0]} {sign} ({unsigned}){args[1]})"
    return f"mod_{name}({', '.join(args)})"
