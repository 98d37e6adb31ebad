"""Computes a ``Function`` with PyTorch on tensors that broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .ir import Function

_INTEGERS = {"b": torch.bool, "i": torch.int32, "l": torch.int64}


def evaluate(
    function: Function, inputs: Mapping[str, torch.Tensor], captured: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the results of ``function``. ``inputs`` are ``score``, whose dtype is that of all
    floats, and int32 ``b``, ``h``, ``q`` and ``kv``; ``captured`` are the tensors of its loads, by
    slot.

    The results are differentiable by autograd with respect to the score.
    """
    dtypes = {**_INTEGERS, "f": inputs["score"].dtype}
    device = inputs["score"].device
    found: list[torch.Tensor] = []
    for op in function.ops:
        x = [found[number] for number in op.args]
        if op.name == "const":
            y = torch.full((), _number(op.value), dtype=dtypes[op.type], device=device)
        elif op.name == "input":
            y = inputs[str(op.value)]
        elif op.name == "load":
            y = _load(captured[int(op.value or 0)], x).to(dtypes[op.type])
        elif op.name == "cast":
            y = x[0].to(dtypes[op.type])
        else:
            y = _DO[op.name](*x)
        found.append(y)
    return [found[number] for number in function.results]


def _number(value: object) -> int | float:
    """Return the value of a constant."""
    assert isinstance(value, (bool, int, float))
    return value


def _load(table: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    if not indices:
        return table
    return table[tuple(inside(x, size) for x, size in zip(indices, table.shape, strict=True))]


def inside(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``index`` as an index into ``size`` elements. A negative index counts from the end,
    and an index beyond either end is clamped."""
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def _minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.minimum(x, y)


_DO: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "abs": torch.abs, "min": _minimum, "max": torch.maximum, "where": torch.where,
    "floordiv": lambda x, y: torch.div(x, torch.where(y == 0, 1, y), rounding_mode="floor"),
    "truncdiv": lambda x, y: torch.div(x, torch.where(y == 0, 1, y), rounding_mode="trunc"),
    "mod": lambda x, y: torch.remainder(x, torch.where(y == 0, 1, y)),
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sin": torch.sin,
    "cos": torch.cos, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "round": torch.round,
}  # fmt: skip
