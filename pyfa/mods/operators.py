"""Translates each ATen operator to operations of ``ir``.

A rule maps the recorder, the type of the result, the operands' type after promotion by PyTorch, and
the operator's arguments to the index of an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any, str, str, Any, Any], int]

# They give back what they are given: a scalar has one place and one shape.
SHAPES = frozenset(
    {"clone", "detach", "alias", "view", "reshape", "expand", "squeeze", "contiguous",
     "lift_fresh", "lift_fresh_copy", "_unsafe_view", "permute"}
)  # fmt: skip
# Operators on small integers that cannot overflow.
EXACT = frozenset({"where", "masked_fill", "minimum", "maximum", "clamp", "clamp_min", "clamp_max",
                   "_to_copy", "bitwise_and", "bitwise_or", "bitwise_xor", "full_like",
                   "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"})  # fmt: skip
# Their rule gives the result's own type.
OWN_TYPE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def _binary(name: str) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        x, y = r.number_of(args[0], type), r.number_of(args[1], type)
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        if alpha != 1:
            y = r.make.make("mul", y, r.make.constant(alpha, type))
        if type == "b":  # True + True is True, and True * False is False
            name_of = {"add": "or", "mul": "and", "min": "and", "max": "or"}
            return int(r.make.make(name_of.get(name, name), x, y))
        return int(r.make.make(name, x, y))

    return rule


def _rsub(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return _binary("sub")(r, type, common, (args[1], args[0]), kwargs)


def _compare(name: str) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        x, y = (r.number_of(each, common) for each in args[:2])
        if common == "b" and name not in ("eq", "ne"):
            x, y = r.make.cast(x, "i"), r.make.cast(y, "i")
        return int(r.make.make(name, x, y))

    return rule


def _unary(name: str) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        return int(r.make.make(name, r.number_of(args[0], type)))

    return rule


def _rounding(name: str) -> Rule:
    """Round; integers stay as they are."""

    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        if kwargs.get("decimals"):
            raise r.error("rounds to decimals; scale before and after")
        x = r.number_of(args[0], type)
        return int(r.make.make(name, x)) if type == "f" else int(x)

    return rule


def _div(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    mode = kwargs.get("rounding_mode")
    x, y = (r.number_of(each, type) for each in args[:2])
    if type == "f":
        quotient = r.make.make("div", x, y)
        rounds = {None: None, "floor": "floor", "trunc": "trunc"}[mode]
        return int(quotient if rounds is None else r.make.make(rounds, quotient))
    return int(r.make.make("floordiv" if mode == "floor" else "truncdiv", x, y))


def _floor_divide(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return _div(r, type, common, args, {"rounding_mode": "floor"})


def _remainder(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    """Return the remainder with the divisor's sign."""
    x, y = (r.number_of(each, type) for each in args[:2])
    if type != "f":
        return int(r.make.make("mod", x, y))
    whole = r.make.make("floor", r.make.make("div", x, y))
    return int(r.make.make("sub", x, r.make.make("mul", whole, y)))


def _fmod(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    """Return the remainder with the dividend's sign."""
    x, y = (r.number_of(each, type) for each in args[:2])
    name = "trunc" if type == "f" else None
    whole = r.make.make("div" if name else "truncdiv", x, y)
    whole = r.make.make(name, whole) if name else whole
    return int(r.make.make("sub", x, r.make.make("mul", whole, y)))


def _where(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    condition = r.number_of(args[0], "b")
    return int(r.make.where(condition, *(r.number_of(each, type) for each in args[1:3])))


def _masked_fill(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return _where(r, type, common, (args[1], args[2], args[0]), kwargs)


def _clamp(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    """Clamp by comparisons, so that the slope is 1 at the ends, as in PyTorch, and NaN stays
    NaN."""
    ends = [*args[1:3], None, None][:2]
    low, high = (kwargs.get(name, end) for name, end in zip(("min", "max"), ends, strict=True))
    x = r.number_of(args[0], type)
    for name, end in (("lt", low), ("gt", high)):
        if end is not None:
            y = r.number_of(end, type)
            x = r.make.where(r.make.make(name, x, y), y, x)
    return int(x)


def _clamp_one(name: str) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        return _clamp(r, type, common, args[:1], {name: args[1]})

    return rule


def _relu(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x, zero = r.number_of(args[0], type), r.make.constant(0, type)
    return int(r.make.where(r.make.make("le", x, zero), zero, x))


def _bitwise_not(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return int(r.make.make("not", r.number_of(args[0], type)))


def _logical(name: str) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        return int(r.make.make(name, *(r.number_of(each, "b") for each in args)))

    return rule


def _sigmoid(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    # Computed with tanh, which is exact at both ends. With exp(-x), which can be infinite, the
    # derivative would be inf / inf.
    half, x = r.make.constant(0.5, "f"), r.number_of(args[0], "f")
    t = r.make.make("tanh", r.make.make("mul", half, x))
    return int(r.make.make("add", half, r.make.make("mul", half, t)))


def _silu(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return int(r.make.make("mul", r.number_of(args[0], "f"), _sigmoid(r, type, common, args, {})))


def _sign(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x, zero = r.number_of(args[0], type), r.make.constant(0, type)
    one, minus = r.make.constant(1, type), r.make.constant(-1, type)
    low = r.make.where(r.make.make("lt", x, zero), minus, zero)
    return int(r.make.where(r.make.make("gt", x, zero), one, low))


def _reciprocal(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return int(r.make.make("div", r.make.constant(1.0, "f"), r.number_of(args[0], "f")))


def _isnan(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x = r.number_of(args[0])
    return int(r.make.make("ne", x, x)) if r.make.type(x) == "f" else r.make.constant(False, "b")


def _isinf(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x = r.number_of(args[0])
    if r.make.type(x) != "f":
        return int(r.make.constant(False, "b"))
    return int(r.make.make("eq", r.make.make("abs", x), r.make.constant(math.inf, "f")))


def _pow(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x, y = (r.number_of(each, type) for each in args[:2])
    exponent = r.make.value(y)
    if exponent is not None and float(exponent).is_integer() and abs(exponent) <= 8:
        found = r.make.constant(1, type)
        for _ in range(int(abs(exponent))):
            found = r.make.make("mul", found, x)
        if exponent < 0:
            if type != "f":
                raise r.error("raises an integer to a negative power; convert it by .float()")
            found = r.make.make("div", r.make.constant(1.0, "f"), found)
        return int(found)
    if type != "f":
        base = r.make.value(x)
        if base == 2:
            return int(r.make.make("shl", r.make.constant(1, type), y))
        raise r.error("raises an integer to a power that is not a constant; convert it by .float()")
    if exponent == 0.5:
        return int(r.make.make("sqrt", x))
    base = r.make.value(x)
    if base is not None and base > 0:
        log = r.make.constant(math.log2(base), "f")
    else:
        log = r.make.make("log2", x)
    return int(r.make.make("exp2", r.make.make("mul", y, log)))


def _log1p(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    one = r.make.constant(1.0, "f")
    return int(r.make.make("log", r.make.make("add", one, r.number_of(args[0], "f"))))


def _tan(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    x = r.number_of(args[0], "f")
    return int(r.make.make("div", r.make.make("sin", x), r.make.make("cos", x)))


def _copy(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return int(r.number_of(args[0], type))


def _like(value: int | None) -> Rule:
    def rule(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
        return int(r.number_of(args[1] if value is None else value, type))

    return rule


def _new_full(r: Any, type: str, common: str, args: Any, kwargs: Any) -> int:
    return int(r.number_of(args[2], type))


TABLE: dict[str, Rule] = {
    "add": _binary("add"), "sub": _binary("sub"), "mul": _binary("mul"), "rsub": _rsub,
    "div": _div, "true_divide": _div, "floor_divide": _floor_divide, "remainder": _remainder,
    "fmod": _fmod, "minimum": _binary("min"), "maximum": _binary("max"),
    "lt": _compare("lt"), "le": _compare("le"), "gt": _compare("gt"), "ge": _compare("ge"),
    "eq": _compare("eq"), "ne": _compare("ne"),
    "where": _where, "masked_fill": _masked_fill, "clamp": _clamp, "clamp_min": _clamp_one("min"),
    "clamp_max": _clamp_one("max"), "relu": _relu,
    "bitwise_and": _binary("and"), "bitwise_or": _binary("or"), "bitwise_xor": _binary("xor"),
    "bitwise_not": _bitwise_not, "__and__": _binary("and"), "__or__": _binary("or"),
    "__xor__": _binary("xor"), "bitwise_left_shift": _binary("shl"),
    "bitwise_right_shift": _binary("shr"), "__lshift__": _binary("shl"),
    "__rshift__": _binary("shr"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "neg": _unary("neg"), "abs": _unary("abs"),
    "exp": _unary("exp"), "exp2": _unary("exp2"), "log": _unary("log"), "log2": _unary("log2"),
    "log1p": _log1p, "sqrt": _unary("sqrt"), "rsqrt": _unary("rsqrt"), "tanh": _unary("tanh"),
    "sin": _unary("sin"), "cos": _unary("cos"), "tan": _tan,
    "sigmoid": _sigmoid, "silu": _silu, "sign": _sign, "sgn": _sign, "reciprocal": _reciprocal,
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "trunc": _rounding("trunc"),
    "round": _rounding("round"), "isnan": _isnan, "isinf": _isinf, "pow": _pow,
    "_to_copy": _copy, "convert_element_type": _copy,
    "full_like": _like(None), "zeros_like": _like(0), "ones_like": _like(1),
    "new_full": _new_full, "new_zeros": _like(0), "new_ones": _like(1),
}  # fmt: skip
