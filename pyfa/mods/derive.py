"""The derivatives of a score_mod with respect to the score and to what it loads, as additional
operations."""

from __future__ import annotations

from collections.abc import Callable

from .ir import Builder, Function


def with_slope(score: Function) -> Function:
    """Return the score_mod ``score`` with a second result: the derivative of the first result with
    respect to the score that it is given. Where there is no derivative, the value is the one that
    PyTorch chooses.

    Computed in forward mode (dual numbers): the derivative of each operation that depends on the
    score follows from the derivatives of its operands. Integers and booleans have no derivative.
    """
    make = Builder()
    numbers = make.include(score)
    source = next((n for n, op in enumerate(score.ops) if op.value == "score"), None)
    slope = _slope(make, score, numbers, source)
    return make.function(numbers[score.results[0]], slope)


def of_loads(score: Function, slots: frozenset[int]) -> tuple[tuple[int, Function], ...]:
    """Return, for each load of a captured tensor in ``slots``, its slot and a function. The
    function returns the derivative of the result with respect to the loaded value, followed by the
    indices of the load."""
    found = []
    for place, op in enumerate(score.ops):
        if op.name == "load" and op.type == "f" and op.value in slots:
            make = Builder()
            numbers = make.include(score)
            slope = _slope(make, score, numbers, place)
            indices = (numbers[x] for x in op.args)
            found.append((int(op.value), make.function(slope, *indices)))
    return tuple(found)


def _slope(make: Builder, score: Function, numbers: list[int], source: int | None) -> int:
    """Return d result / d ``source``, an operation of the score. ``numbers`` are its operations'
    numbers in ``make``."""
    zero, one = make.constant(0.0, "f"), make.constant(1.0, "f")
    slopes: dict[int, int] = {}
    for place, (op, number) in enumerate(zip(score.ops, numbers, strict=True)):
        if op.type != "f":
            continue
        if place == source:
            slopes[number] = one
            continue
        args = [numbers[x] for x in op.args]
        rule = _RULES.get(op.name)
        if rule is None or not any(x in slopes for x in args):
            continue
        slope = rule(make, number, args, [slopes.get(x, zero) for x in args])
        if make.value(slope) != 0.0:
            slopes[number] = slope
    return slopes.get(numbers[score.results[0]], zero)


def _times(make: Builder, x: int, slope: int) -> int:
    """Multiply; return 0 if the slope is the constant 0, which means that nothing depends on it (0
    · ∞ is then 0)."""
    return slope if make.value(slope) == 0.0 else make.make("mul", x, slope)


def _plus(make: Builder, x: int, y: int) -> int:
    if make.value(x) == 0.0:
        return y
    return x if make.value(y) == 0.0 else make.make("add", x, y)


def _minus(make: Builder, x: int, y: int) -> int:
    if make.value(y) == 0.0:
        return x
    return make.make("neg", y) if make.value(x) == 0.0 else make.make("sub", x, y)


Rule = Callable[[Builder, int, list[int], list[int]], int]


def _mul(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    return _plus(make, _times(make, x[1], d[0]), _times(make, x[0], d[1]))


def _div(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    # d(a / b) = (da - (a / b) db) / b
    return make.make("div", _minus(make, d[0], _times(make, y, d[1])), x[1])


def _extremum(better: str) -> Rule:
    """Return the derivative of min or max: as in PyTorch, it is halved at ties and follows NaN."""

    def rule(make: Builder, y: int, x: list[int], d: list[int]) -> int:
        half = make.constant(0.5, "f")
        both = _plus(make, _times(make, half, d[0]), _times(make, half, d[1]))
        other = make.where(make.make(better, x[1], x[0]), d[1], both)
        return make.where(make.make(better, x[0], x[1]), d[0], other)

    return rule


def _abs(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    zero = make.constant(0.0, "f")
    negative = make.where(make.make("lt", x[0], zero), make.make("neg", d[0]), zero)
    return make.where(make.make("gt", x[0], zero), d[0], negative)


def _where(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    return make.where(x[0], d[1], d[2])


def _tanh(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    square = make.make("mul", y, y)
    return _times(make, make.make("sub", make.constant(1.0, "f"), square), d[0])


def _scaled(factor: float, name: str) -> Rule:
    """Return d = factor · (y, or 1 / x) · dx."""

    def rule(make: Builder, y: int, x: list[int], d: list[int]) -> int:
        constant = make.constant(factor, "f")
        if name == "y":
            return _times(make, make.make("mul", constant, y), d[0])
        return make.make("div", _times(make, constant, d[0]), x[0])

    return rule


def _sqrt(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    return make.make("div", _times(make, make.constant(0.5, "f"), d[0]), y)


def _rsqrt(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    cube = make.make("mul", y, make.make("mul", y, y))
    return _times(make, make.make("mul", make.constant(-0.5, "f"), cube), d[0])


def _sin(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    return _times(make, make.make("cos", x[0]), d[0])


def _cos(make: Builder, y: int, x: list[int], d: list[int]) -> int:
    return _times(make, make.make("neg", make.make("sin", x[0])), d[0])


_LN2 = 0.6931471805599453
# Derivatives of integers, and of floor, ceil, trunc and round, are 0.
_RULES: dict[str, Rule] = {
    "add": lambda make, y, x, d: _plus(make, d[0], d[1]),
    "sub": lambda make, y, x, d: _minus(make, d[0], d[1]),
    "neg": lambda make, y, x, d: make.make("neg", d[0]),
    "mul": _mul,
    "div": _div,
    "min": _extremum("lt"),
    "max": _extremum("gt"),
    "abs": _abs,
    "where": _where,
    "tanh": _tanh,
    "exp": _scaled(1.0, "y"),
    "exp2": _scaled(_LN2, "y"),
    "log": _scaled(1.0, "1/x"),
    "log2": _scaled(1.0 / _LN2, "1/x"),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "sin": _sin,
    "cos": _cos,
}
