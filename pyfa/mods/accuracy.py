"""How accurate the intermediate results of a function must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .ir import Function

_UNLIMITED = math.inf


def weights_of(function: Function, of_results: Sequence[float]) -> list[float]:
    """Return, for each operation, a bound on the change of the results if the operation's result
    has an absolute error of 1. The change of result i is weighted by ``of_results[i]``. If there is
    no bound, the value is infinity."""
    ops = function.ops
    largest = _largest(function)
    found = [0.0] * len(ops)
    for number, weight in zip(function.results, of_results, strict=True):
        found[number] += weight
    for number in reversed(range(len(ops))):
        op, weight = ops[number], found[number]
        if not weight:
            continue
        if op.name in ("add", "sub", "neg", "abs", "min", "max", "tanh"):
            factors = [1.0] * len(op.args)
        elif op.name == "mul":
            factors = [largest[x] for x in reversed(op.args)]
        elif op.name == "div" and ops[op.args[1]].value:
            factors = [1.0 / abs(float(ops[op.args[1]].value or 0)), _UNLIMITED]
        elif op.name == "where":
            factors = [_UNLIMITED, 1.0, 1.0]
        else:
            factors = [_UNLIMITED] * len(op.args)
        for arg, factor in zip(op.args, factors, strict=True):
            found[arg] += weight * factor if factor else 0.0
    return found


def _largest(function: Function) -> list[float]:
    """Return a bound of the magnitude of each float."""
    found: list[float] = []
    for op in function.ops:
        x = [found[number] for number in op.args]
        if op.name == "const":
            found.append(abs(float(op.value or 0)))
        elif op.name in ("tanh", "sin", "cos"):
            found.append(1.0)
        elif op.name in ("add", "sub"):
            found.append(x[0] + x[1])
        elif op.name in ("neg", "abs"):
            found.append(x[0])
        elif op.name == "mul":
            found.append(x[0] * x[1] if x[0] and x[1] else 0.0)
        else:
            found.append(_UNLIMITED)
    return found
