"""The typed expressions to which mods are traced: a tuple of operations, each on earlier results.

Types: ``b`` a truth value, ``i`` int32, ``l`` int64, ``f`` a float (float32 in kernels, float64 in
the reference). A ``Builder`` makes operations. It folds constants, simplifies, and reuses existing
operations, so that equal expressions are one operation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

Value = int | float | bool | str | None

MOST_OPERATIONS = 512
"""Beyond this a mod is refused: kernels inline it for every score that a lane holds."""

INPUTS = {"score": "f", "b": "i", "h": "i", "q": "i", "kv": "i"}
# The inputs that ``steps`` adds.
_STEPS = {"q_base": "i", "kv_base": "i", "q_step": "f", "kv_step": "f"}
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_COMMUTATIVE = frozenset({"add", "mul", "min", "max", "eq", "ne", "and", "or", "xor"})
_BITS = {"i": 32, "l": 64}


class Op(NamedTuple):
    """One operation. ``type`` is its result's type and ``args`` are the indices of its operands.
    ``value`` is a constant's value, an input's name, or the index of the captured tensor that a
    load reads."""

    name: str
    type: str
    args: tuple[int, ...] = ()
    value: Value = None


class TooLarge(Exception):
    """The function has more than ``MOST_OPERATIONS`` operations."""


class Function(NamedTuple):
    """``ops`` in an order in which operands come first; ``results`` are indices of operations."""

    ops: tuple[Op, ...]
    results: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Return the digest of what the function computes. It is the same in every process."""
        return hashlib.sha256(repr(tuple(map(tuple, self.ops)) + self.results).encode()).hexdigest()


class Builder:
    """Builds a list of operations. Methods take and return operations as indices into the list."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def _add(self, op: Op) -> int:
        # repr: 0.0 and -0.0, 1 and True are equal and not alike; NaN is not equal to itself.
        key = (*op[:3], repr(op.value))
        found = self._numbers.get(key)
        if found is None:
            if len(self.ops) >= 4 * MOST_OPERATIONS:
                raise TooLarge
            found = self._numbers[key] = len(self.ops)
            self.ops.append(op)
        return found

    def type(self, x: int) -> str:
        return self.ops[x].type

    def constant(self, value: Value, type: str) -> int:
        if type == "f":
            value = float(value)  # type: ignore[arg-type]
        elif type == "b":
            value = bool(value)
        else:
            value = wrapped(int(value), type)  # type: ignore[arg-type]
        return self._add(Op("const", type, (), value))

    def input(self, name: str) -> int:
        return self._add(Op("input", {**INPUTS, **_STEPS}[name], (), name))

    def load(self, slot: int, type: str, indices: tuple[int, ...]) -> int:
        """Load the element of captured tensor ``slot`` at these indices. Negative indices count
        from its end; indices outside are clamped."""
        return self._add(Op("load", type, indices, slot))

    def value(self, x: int) -> Value:
        """Return a constant's value; None for anything else."""
        op = self.ops[x]
        return op.value if op.name == "const" else None

    def cast(self, x: int, type: str) -> int:
        op = self.ops[x]
        if op.type == type:
            return x
        if op.name == "const":
            value = op.value
            if type == "b":
                return self.constant(value != 0, "b")
            if type != "f" and isinstance(value, float):
                if not math.isfinite(value):
                    return self._add(Op("cast", type, (x,)))
                value = int(value)
            return self.constant(value, type)
        if type == "b":
            return self.make("ne", x, self.constant(0, op.type))
        return self._add(Op("cast", type, (x,)))

    def where(self, condition: int, x: int, y: int) -> int:
        chosen = self.value(condition)
        if chosen is not None:
            return x if chosen else y
        if x == y:
            return x
        if self.type(x) == "b":
            if self.value(x) is True and self.value(y) is False:
                return condition
            yes = self.make("and", condition, x)
            return self.make("or", yes, self.make("and", self.make("not", condition), y))
        return self._add(Op("where", self.type(x), (condition, x, y)))

    def make(self, name: str, *args: int) -> int:
        """Make any other operation, on operands of one type."""
        type = self.type(args[0])
        assert all(self.type(x) == type for x in args), (name, args)
        values = [self.value(x) for x in args]
        if all(value is not None for value in values):
            folded = _folded(name, type, values)
            if folded is not None:
                return self.constant(folded, "b" if name in COMPARISONS else type)
        if name in _COMMUTATIVE and args[0] > args[1]:
            args, values = args[::-1], values[::-1]
        simple = self._simpler(name, type, args, values)
        if simple is not None:
            return simple
        return self._add(Op(name, "b" if name in COMPARISONS else type, args))

    def _simpler(
        self, name: str, type: str, args: tuple[int, ...], values: list[Value]
    ) -> int | None:
        """Return a simpler expression for ``name`` of ``args`` that has the same result for every
        value, including NaN, infinity and -0.0."""
        if len(args) == 1:
            op = self.ops[args[0]]
            return op.args[0] if name in ("not", "neg") and op.name == name else None
        if len(args) != 2:
            return None
        (x, y), (a, b) = args, values
        integer = type in ("i", "l")
        if type == "b" and name in ("and", "or"):
            for value, other in ((a, y), (b, x)):
                if value is not None:
                    stays = value is (name == "and")
                    return other if stays else self.constant(name == "or", "b")
            return x if x == y else None
        if name in ("eq", "ne") and type == "b":
            for value, other in ((a, y), (b, x)):
                if value is not None:
                    return other if value is (name == "eq") else self.make("not", other)
        if name in ("min", "max") and x == y:
            return x
        if name == "mul":
            for value, other in ((a, y), (b, x)):
                if value == 1 and value is not None:
                    return other
                if integer and value == 0 and value is not None:
                    return self.constant(0, type)
        if name == "add" and integer:
            for value, other in ((a, y), (b, x)):
                if value == 0 and value is not None:
                    return other
        # x - 0.0 is x for every x, x + 0.0 is not where x is -0.0.
        if name == "sub" and b is not None and b == 0 and math.copysign(1.0, b) > 0:
            return x
        if name == "div" and b == 1:
            return x
        if name == "floordiv" and integer and b == 1:
            return x
        return None

    def function(self, *results: int) -> Function:
        """Return the operations that these results need."""
        needed: set[int] = set()
        pending = list(results)
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                pending += self.ops[number].args
        places = {old: new for new, old in enumerate(sorted(needed))}
        ops = tuple(
            op._replace(args=tuple(places[x] for x in op.args))
            for op in (self.ops[old] for old in sorted(needed))
        )
        if len(ops) > MOST_OPERATIONS:
            raise TooLarge
        return Function(ops, tuple(places[x] for x in results))

    def include(self, function: Function) -> list[int]:
        """Add the operations of ``function``; return the new index of each."""
        numbers: list[int] = []
        for op in function.ops:
            numbers.append(self.again(op, tuple(numbers[x] for x in op.args)))
        return numbers

    def again(self, op: Op, args: tuple[int, ...]) -> int:
        """Add an operation of another function, on ``args``."""
        return self._add(op._replace(args=args))


def loads_by(function: Function, *inputs: str) -> int:
    """Return how many elements of captured tensors ``function`` reads at an index that depends on
    one of these inputs."""
    depends: list[bool] = []
    for op in function.ops:
        depends.append(op.value in inputs or any(depends[x] for x in op.args))
    return sum(op.name == "load" and depends[n] for n, op in enumerate(function.ops))


def wrapped(value: int, type: str) -> int:
    """Return ``value`` wrapped to this many bits in two's complement."""
    bits = _BITS[type]
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _folded(name: str, type: str, values: list[Value]) -> Value:
    """Return the result for constants; None if it must be computed at run time."""
    try:
        return _FOLD[name](type, *values) if name in _FOLD else None
    except (ZeroDivisionError, OverflowError, ValueError):
        return None


def _whole_only(f: Callable[[int, int], int]) -> Callable[..., Value]:
    return lambda type, x, y: None if type == "f" else f(int(x), int(y))


def _no_nan(f: Callable[..., Value]) -> Callable[..., Value]:
    return lambda type, x, y: None if x != x or y != y else f(x, y)


_FOLD: dict[str, Callable[..., Value]] = {
    "add": lambda type, x, y: x + y,
    "sub": lambda type, x, y: x - y,
    "mul": lambda type, x, y: x * y,
    "div": lambda type, x, y: x / y,
    "neg": lambda type, x: -x,
    "abs": lambda type, x: abs(x),
    "not": lambda type, x: not x if type == "b" else ~x,
    "min": _no_nan(min),
    "max": _no_nan(max),
    "floordiv": _whole_only(lambda x, y: x // y),
    "mod": _whole_only(lambda x, y: x % y),
    "and": lambda type, x, y: x & y,
    "or": lambda type, x, y: x | y,
    "xor": lambda type, x, y: x ^ y,
    "shl": lambda type, x, y: x << y if 0 <= y < _BITS[type] else None,
    "shr": lambda type, x, y: x >> y if 0 <= y < _BITS[type] else None,
    "lt": lambda type, x, y: x < y,
    "le": lambda type, x, y: x <= y,
    "gt": lambda type, x, y: x > y,
    "ge": lambda type, x, y: x >= y,
    "eq": lambda type, x, y: x == y,
    "ne": lambda type, x, y: x != y,
    "exp": lambda type, x: math.exp(x),
    "log": lambda type, x: math.log(x),
    "log2": lambda type, x: math.log2(x),
    "sqrt": lambda type, x: math.sqrt(x),
    "tanh": lambda type, x: math.tanh(x),
}
