"""The ranges of a function's integers, so that emitted code can omit checks that are not needed."""

from __future__ import annotations

from .ir import Function, Op

# No sequence is longer than this: its keys would take 128 GB.
_MOST = (1 << 30) - 1
_LIMITS = {"i": (-(1 << 31), (1 << 31) - 1), "l": (-(1 << 63), (1 << 63) - 1)}

Range = tuple[int, int]


def is_bounded(found: Range, type: str) -> bool:
    """Return whether it is known that an integer with this range has not wrapped around."""
    return found != _LIMITS[type]


def ranges_of(function: Function) -> list[Range]:
    """Return the least and the largest value of each operation. Floats have no range; truth values
    have their range as integers."""
    found: list[Range] = []
    for op in function.ops:
        found.append(_range_of(op, function, found))
    return found


def _range_of(op: Op, function: Function, found: list[Range]) -> Range:
    if op.type == "b":
        return 0, 1
    if op.type == "f":
        return _LIMITS["l"]
    limits = _LIMITS[op.type]
    low, high = _unchecked(op, function, [found[x] for x in op.args]) or limits
    return (low, high) if limits[0] <= low and high <= limits[1] else limits


def _unchecked(op: Op, function: Function, x: list[Range]) -> Range | None:
    """Return the range as if nothing overflowed; None if unknown."""
    name = op.name
    if name == "const":
        return int(op.value or 0), int(op.value or 0)
    if name == "input":
        return 0, _MOST
    if name == "cast":
        return None if function.ops[op.args[0]].type == "f" else x[0]
    if name == "add":
        return x[0][0] + x[1][0], x[0][1] + x[1][1]
    if name == "sub":
        return x[0][0] - x[1][1], x[0][1] - x[1][0]
    if name == "neg":
        return -x[0][1], -x[0][0]
    if name == "mul":
        products = [a * b for a in x[0] for b in x[1]]
        return min(products), max(products)
    if name == "abs":
        return (0 if x[0][0] < 0 < x[0][1] else min(map(abs, x[0]))), max(map(abs, x[0]))
    if name in ("min", "max"):
        pick = min if name == "min" else max
        return pick(x[0][0], x[1][0]), pick(x[0][1], x[1][1])
    if name == "mod" and x[1][0] > 0:
        return 0, x[1][1] - 1
    if name in ("floordiv", "truncdiv") and x[0][0] >= 0 and x[1][0] > 0:
        return x[0][0] // x[1][1], x[0][1] // x[1][0]
    if name == "and" and max(x[0][0], x[1][0]) >= 0:
        return 0, min(high for low, high in x if low >= 0)
    if name == "shr" and x[0][0] >= 0:
        return 0, x[0][1]
    if name == "where":
        return _of_where(op, function, x)
    return None


def _of_where(op: Op, function: Function, x: list[Range]) -> Range:
    _, (low, high), (other_low, other_high) = x
    condition = function.ops[op.args[0]]
    # where(y < end, end, y) and the like: clamp.
    if condition.name in ("lt", "gt") and condition.args == (op.args[2], op.args[1]):
        if condition.name == "lt":
            other_low = max(other_low, low)
        else:
            other_high = min(other_high, high)
        if other_low > other_high:
            return low, high
    return min(low, other_low), max(high, other_high)
