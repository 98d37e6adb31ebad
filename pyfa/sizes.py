"""Sizes as expressions of the totals of packed rows.

In packed training the totals differ at each step. A program holds such expressions for everything
that depends on the totals: shapes, grids, offsets, and a few members of ``Params``. To run a bound
program with other totals, only about 10 numbers are patched; to bind the program again took 190 µs
on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .problem import Call

Totals = tuple[int, int]
"""The packed rows of q and of k; of a tensor that is not packed, its first dimension."""


class Size:
    """An expression of ``q`` and ``k``, the totals, which are not 0.

    A ``Size`` has no value and no order, so that no decision can depend on the totals for which it
    was made. Code that compares a ``Size``, or packs it as a number, fails.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __add__(self, other: Extent) -> Size:
        return Size(f"({self} + {other})")

    def __mul__(self, other: Extent) -> Size:
        return Size(f"({self} * {other})")

    def __floordiv__(self, other: Extent) -> Size:
        return Size(f"({self} // {other})")

    def at_most(self, most: int) -> Size:
        return Size(f"min({self}, {most})")

    def __neg__(self) -> Size:
        return Size(f"(-{self})")

    __radd__, __rmul__ = __add__, __mul__


Extent = int | Size
Shape = tuple[Extent, ...]


def function_of(sizes: tuple[Any, ...]) -> Callable[[int, int], Any]:
    """Return ``sizes``, nested tuples of integers, sizes and dtypes, as a function of the totals.
    The function is compiled, and evaluates 20 sizes in 1 µs."""
    found: Callable[[int, int], Any] = eval(f"lambda q, k: {sizes!r}", {"torch": torch})
    return found


def value_at(x: Any, totals: Totals | None) -> Any:
    """Return a number unchanged, and the value of a ``Size`` for ``totals``."""
    if not isinstance(x, Size):
        return x
    assert totals is not None
    return function_of((x,))(*totals)[0]


_TOTALS = {"q": Size("q"), "k": Size("k"), "v": Size("k")}


def shape_of(call: Call, name: str) -> Shape:
    """Return the shape of a call's q, k or v. A total of packed rows is a ``Size``, except 0, which
    has separate programs."""
    offsets = call.cu_seqlens_q if name == "q" else call.cu_seqlens_k
    rows, *rest = getattr(call, name).shape
    return (_TOTALS[name] if offsets is not None and rows else rows, *rest)


def out_shape(call: Call) -> Shape:
    """Return ``Call.out_shape`` with totals as in ``shape_of``."""
    return (*shape_of(call, "q")[:-1], call.v.shape[-1])


def lse_shape(call: Call) -> Shape:
    """Return ``Call.lse_shape`` with totals as in ``shape_of``."""
    if call.cu_seqlens_q is None:
        return call.lse_shape()
    return (call.q.shape[1], shape_of(call, "q")[0])
