"""Checks the arguments of the ready-made masks and scores.

A mod is made once and called often, so these checks need not be fast. Values of tensors are not
read. While torch.compile traces, numbers and sizes are not checked: they may be symbolic, and a
NumPy integer is an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from . import validate

INTEGERS = ("integers",)
NUMBERS = ("floats", "integers")
IDS = ("integers", "bool")
PER_TOKEN = {1: "(S,)", 2: "(B, S)"}
PER_HEAD = {1: "(H,)"}
_SCALAR = {0: "()"}
_SCALARS = {0: "()", 1: "(B,)"}


def functions(name: str, *given: object) -> None:
    """Raise ``TypeError`` unless all of ``given`` are functions."""
    for each in given:
        if not callable(each):
            raise TypeError(f"{name}: expected a function; got {type(each).__name__}")


def table(
    name: str,
    value: torch.Tensor,
    shapes: Mapping[int, str],
    kinds: tuple[str, ...] = NUMBERS,
) -> None:
    """Check that ``value`` is a tensor of one of ``kinds`` with as many dimensions as one of
    ``shapes``, which are described by their number of dimensions."""
    validate.a_tensor(name, value)
    if value.dim() not in shapes:
        validate.wrong(name, f"shape {' or '.join(shapes.values())}", value)
    kind(name, value, kinds)


def kind(name: str, value: torch.Tensor, kinds: tuple[str, ...]) -> None:
    """Check that ``value`` is a tensor with a dtype of one of ``kinds``."""
    validate.a_tensor(name, value)
    if _kind_of(value.dtype) not in kinds:
        validate.wrong(name, " or ".join(kinds), value)


def _kind_of(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float8" if dtype.itemsize == 1 else "floats"
    return "complex numbers" if dtype.is_complex else "integers"


def numbers(least: int | None = None, /, **given: object) -> None:
    """Check that each of ``given`` is an int, ``least`` or more, or a 0-dim tensor of integers."""
    for name, value in given.items():
        _number(name, value, least, _SCALAR)


def per_sequence(least: int | None = None, /, **given: object) -> None:
    """Check as ``numbers`` does, but accept tensors with one integer per sequence, too."""
    for name, value in given.items():
        _number(name, value, least, _SCALARS)


def _number(name: str, value: Any, least: int | None, shapes: Mapping[int, str]) -> None:
    if isinstance(value, torch.Tensor):
        table(name, value, shapes, INTEGERS)
    else:
        _integer(name, value, least, f"an int or a tensor of shape {' or '.join(shapes.values())}")


def whole(name: str, value: Any, least: int) -> int:
    """Return ``value``, an int that is ``least`` or more."""
    _integer(name, value, least, "an int")
    return int(value) if isinstance(value, np.integer) else value


def sizes(name: str, value: Iterable[int]) -> tuple[int, ...]:
    """Return ``value``, a sequence of one or more positive ints, as a tuple."""
    try:
        given = tuple(value)
    except TypeError:
        raise TypeError(f"{name}: expected ints; got {type(value).__name__}") from None
    found = tuple([whole(name, each, 1) for each in given])
    if not found:
        validate.wrong(name, "at least one size", found)
    return found


def real(name: str, value: Any, above: float) -> None:
    """Check that ``value`` is a number greater than ``above``, or a 0-dim tensor."""
    if isinstance(value, torch.Tensor):
        table(name, value, _SCALAR)
    elif is_known(value) and validate.number(name, value) <= above:
        validate.wrong(name, f"a number greater than {above}", value)


def _integer(name: str, value: Any, least: int | None, expected: str) -> None:
    if not is_known(value):
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected {expected}; got {type(value).__name__}")
    if least is not None and value < least:
        validate.wrong(name, f"{least} or more", value)
    if not -(2**63) <= int(value) < 2**63:
        validate.wrong(name, "an integer of 64 bits", value)


def is_known(value: object) -> bool:
    """Return whether ``value``, a number or a shape, can be compared: it is not symbolic."""
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat))
    return not symbolic and not torch.compiler.is_compiling()
