"""Rewrites a function for the scores of a tile that one lane computes. Their positions have
constant distances.

A float that is a whole number, linear in q and kv, as ALiBi's distance is, becomes its value at the
lane's first score plus a constant: one addition instead of an integer subtraction and a conversion
to float, which takes a GPU four times as long as an addition. The sum is exact below 2^24. Beyond,
it may differ from the conversion's result by an ulp.

Whatever the mod computes from that float stays as it is written. The step does not contain a
captured slope. Including the slope would save nothing, because a product and a sum are one
instruction. It would also turn ∞ · d into ∞ · d0 + ∞ · 0, which is NaN, and would round where
distances cancel.
"""

from __future__ import annotations

from typing import NamedTuple

from .ir import Builder, Function, Op
from .ranges import Range, is_bounded, ranges_of

_BASES = {"q": "q_base", "kv": "kv_base"}
# A lane's scores lie within 2^8 rows and keys: what a step adds is below 2^24.
_MOST_RATE = 1 << 15
_MOST_WHOLE = 1 << 24


class _Rates(NamedTuple):
    """The changes of a whole number per step of q and per step of kv."""

    q: int
    kv: int


_STILL = _Rates(0, 0)
_OF_INPUT = {"q": _Rates(1, 0), "kv": _Rates(0, 1), "b": _STILL, "h": _STILL}


def with_steps(function: Function) -> Function:
    """Return ``function`` with four more inputs: ``q_base`` and ``kv_base``, the indices of the
    lane's first score, and ``q_step`` and ``kv_step``, the distances of q and kv from these
    indices, as floats."""
    return _Steps(function).rewritten()


class _Steps:
    def __init__(self, function: Function) -> None:
        self.function, self.make = function, Builder()
        self.ranges: list[Range] = ranges_of(function)
        # For each operation: its result, its result at the bases, and its rates if it is a whole
        # number that is linear in q and kv.
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
        if op.type == "f" and rates:
            return self._stepped(self.based[-1], rates)
        source = self.function.ops[op.args[0]] if op.name == "cast" and op.type == "f" else None
        if source is not None and source.name == "abs" and (inside := self.rates[source.args[0]]):
            base = make.cast(self.based[source.args[0]], "f")
            return make.make("abs", self._stepped(base, inside))
        return self._again(op, self.here, {})

    def _stepped(self, base: int, rates: _Rates) -> int:
        """Return ``base`` and the step. It is added at once: in unrolled loops it is a constant."""
        make = self.make
        if rates == _STILL:
            return base
        q, kv = make.input("q_step"), make.input("kv_step")
        if rates.q and rates.q == -rates.kv:
            step = self._times(rates.kv, make.make("sub", kv, q))
        else:
            parts = [self._times(rate, x) for rate, x in zip(rates, (q, kv), strict=True) if rate]
            step = parts[0] if len(parts) == 1 else make.make("add", *parts)
        return make.make("add", base, step)

    def _times(self, rate: int, step: int) -> int:
        return self.make.make("mul", self.make.constant(rate, "f"), step)

    def _rates(self, number: int, op: Op) -> _Rates | None:
        """Return the rates of operation ``number``; None if it is not a whole number, or not linear
        in q and kv."""
        if op.name == "input":
            return _OF_INPUT.get(str(op.value))
        found = [self.rates[x] for x in op.args]
        if op.type == "f":
            if op.name == "const":
                value = float(op.value or 0)
                return _STILL if value.is_integer() and abs(value) <= _MOST_WHOLE else None
        elif all(rates == _STILL for rates in found):
            return _STILL
        elif op.type == "b" or not is_bounded(self.ranges[number], op.type):
            return None  # the latter may wrap around
        rates = self._of_sum_or_product(op, [rates for rates in found if rates is not None])
        return rates if rates and max(map(abs, rates)) <= _MOST_RATE else None

    def _of_sum_or_product(self, op: Op, x: list[_Rates]) -> _Rates | None:
        if not x or len(x) < len(op.args):
            return None
        if op.name == "cast":
            return x[0]
        if op.name in ("add", "sub"):
            sign = 1 if op.name == "add" else -1
            return _Rates(x[0].q + sign * x[1].q, x[0].kv + sign * x[1].kv)
        if op.name == "neg":
            return _Rates(-x[0].q, -x[0].kv)
        if op.name == "mul":
            for factor, moving in zip(op.args, reversed(x), strict=True):
                value = self.function.ops[factor].value
                if self.function.ops[factor].name == "const" and value is not None:
                    return _Rates(int(value) * moving.q, int(value) * moving.kv)
        return None
