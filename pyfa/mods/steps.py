"""Rewrites a function for a lane's scores of a tile, which lie at constant distances.

A float that is linear in q and kv, as ALiBi's distance times a slope is, becomes its value at the
lane's first score plus a constant: one addition, often fused, instead of an integer subtraction
and a conversion to float, which takes a GPU four times as long as an addition. The two differ by
an ulp where integers exceed 2^24, and where a factor is infinite.
"""

from __future__ import annotations

from typing import NamedTuple

from .ir import Builder, Function, Op
from .ranges import Range, is_bounded, ranges_of

_BASES = {"q": "q_base", "kv": "kv_base"}


class _Rates(NamedTuple):
    """How fast a value changes with q and with kv: the numbers of two floats."""

    q: int
    kv: int


def with_steps(function: Function) -> Function:
    """Return ``function`` with the further inputs ``q_base`` and ``kv_base``, the indices of the
    lane's first score, and ``q_step`` and ``kv_step``, floats: how far q and kv are from them."""
    return _Steps(function).rewritten()


class _Steps:
    def __init__(self, function: Function) -> None:
        self.function, self.make = function, Builder()
        self.ranges: list[Range] = ranges_of(function)
        zero, one = (self.make.constant(x, "f") for x in (0.0, 1.0))
        self.still = _Rates(zero, zero)
        self.of_input = {"q": _Rates(one, zero), "kv": _Rates(zero, one), "score": None}
        # Of each operation: its result, its result at the bases, and its rates if it is linear.
        self.here: list[int] = []
        self.based: list[int] = []
        self.rates: list[_Rates | None] = []

    def rewritten(self) -> Function:
        for number, op in enumerate(self.function.ops):
            rates = self._rates(number, op)
            self.rates.append(rates)
            self.based.append(self._again(op, self.based, _BASES))
            self.here.append(self._result(op, rates))
        return self.make.function(*(self.here[x] for x in self.function.results))

    def _again(self, op: Op, results: list[int], names: dict[str, str]) -> int:
        if op.name == "input":
            return self.make.input(names.get(str(op.value), str(op.value)))
        return self.make.again(op, tuple(results[x] for x in op.args))

    def _result(self, op: Op, rates: _Rates | None) -> int:
        make = self.make
        if op.type == "f" and rates is not None and rates != self.still:
            return self._stepped(self.based[-1], rates)
        source = self.function.ops[op.args[0]] if op.name == "cast" and op.type == "f" else None
        if source is not None and source.name == "abs":
            inside = source.args[0]
            of_inside = self.rates[inside]
            if of_inside is not None and of_inside != self.still:
                return make.make(
                    "abs", self._stepped(make.cast(self.based[inside], "f"), of_inside)
                )
        return self._again(op, self.here, {})

    def _stepped(self, base: int, rates: _Rates) -> int:
        make = self.make
        if rates.kv != self.still.kv and rates.q == self._negative(rates.kv):
            distance = make.make("sub", make.input("kv_step"), make.input("q_step"))
            return make.make("add", base, make.make("mul", rates.kv, distance))
        for rate, step in zip(rates, ("q_step", "kv_step"), strict=True):
            if rate != self.still.q:
                base = make.make("add", base, make.make("mul", rate, make.input(step)))
        return base

    def _rates(self, number: int, op: Op) -> _Rates | None:
        """Return the rates of operation ``number``; None if it is not linear in q and kv."""
        if op.name == "input":
            return self.of_input.get(str(op.value), self.still)
        found = [self.rates[x] for x in op.args]
        if all(rates == self.still for rates in found):
            return self.still
        if any(rates is None for rates in found):
            return None
        if op.type == "b":
            return None
        if op.type != "f" and not is_bounded(self.ranges[number], op.type):
            return None  # it may wrap around
        given = [rates for rates in found if rates is not None]
        if op.name == "cast":
            return given[0]
        if op.name in ("add", "sub"):
            return _Rates(*(self._sum(op.name, x, y) for x, y in zip(*given, strict=True)))
        if op.name == "neg":
            return _Rates(*(self._negative(x) for x in given[0]))
        if op.name == "mul" and self.still in given:
            moving = given.index(self.still) ^ 1
            factor = self.make.cast(self.here[op.args[moving ^ 1]], "f")
            return _Rates(*(self._product(x, factor) for x in given[moving]))
        return None

    def _sum(self, name: str, x: int, y: int) -> int:
        if y == self.still.q:
            return x
        if x == self.still.q:
            return y if name == "add" else self._negative(y)
        return self.make.make(name, x, y)

    def _negative(self, x: int) -> int:
        return x if x == self.still.q else self.make.make("neg", x)

    def _product(self, x: int, factor: int) -> int:
        if self.make.value(x) == -1.0:
            return self._negative(factor)
        return x if x == self.still.q else self.make.make("mul", x, factor)
