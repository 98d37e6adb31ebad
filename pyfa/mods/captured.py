"""The dependencies of a mod besides its code, so that another function with the same code can be
recognized.

A mod is often created for every batch, as a closure over that batch's document map. It has the same
trace as any other function with the same code, the same numbers and tensors of the same kinds.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

_UNCHANGING = frozenset({"torch", "math", "numpy", "operator", "builtins", "_operator", "pyfa"})


class Unknown(Exception):
    """The mod depends on an object whose attributes may change, so it has no key."""


class Dependencies:
    """The dependencies of a mod. Mods with equal ``key`` have the same trace. ``tensors``: the
    tensors that may be captured, in an order that depends only on the code."""

    def __init__(self, mod: Callable[..., Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._functions: dict[int, int] = {}
        self.key: Hashable = self._of(mod)

    def _of(self, value: object) -> Hashable:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            # The number says which captured tensors are the same object, because the trace has one
            # load for these.
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            device = value.device
            return ("tensor", number, value.dtype, value.dim(), device, value.requires_grad)
        if kind in (int, bool, str, bytes, type(None), torch.dtype, torch.device):
            return (kind, value)
        if kind is float:
            return (float, value.hex())  # type: ignore[attr-defined]  # 0.0 is not -0.0
        if kind in (tuple, list) or (isinstance(value, tuple) and is_unchanging(kind.__module__)):
            return (kind, *(self._of(x) for x in value))  # type: ignore[attr-defined]
        if kind is dict:
            items = value.items()  # type: ignore[attr-defined]
            return (dict, *((self._of(k), self._of(x)) for k, x in items))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, functools.partial):
            parts = value.func, value.args, dict(value.keywords)
            return (functools.partial, *(self._of(x) for x in parts))
        if isinstance(value, types.ModuleType):
            if is_unchanging(value.__name__):
                return (types.ModuleType, value.__name__)
            raise Unknown
        named = isinstance(value, (types.BuiltinFunctionType, type))
        # A class of the user's may hold what changes.
        if named and is_unchanging(value.__module__):
            return (kind, value)
        raise Unknown

    def _of_function(self, f: types.FunctionType) -> Hashable:
        number = self._functions.get(id(f))
        if number is not None:  # it calls itself, or comes twice
            return ("again", number)  # not by its code, which functions share
        self._functions[id(f)] = len(self._functions)
        parts: list[Hashable] = [f.__code__]
        for cell in f.__closure__ or ():
            try:
                parts.append(self._of(cell.cell_contents))
            except ValueError:  # still empty
                parts.append("empty")
        parts += [self._of(f.__defaults__), self._of(f.__kwdefaults__)]
        for name in names_of(f.__code__):
            if name in f.__globals__:
                parts.append((name, self._of(f.__globals__[name])))
        return tuple(parts)


def is_unchanging(module: object) -> bool:
    """Return whether nothing in the module of this name, or in its classes, changes."""
    return str(module).split(".")[0] in _UNCHANGING


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that the code, and functions inside it, look up: globals and attributes
    alike."""
    found = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found.update(dict.fromkeys(names_of(each)))
    return tuple(found)


def dependencies_of(mod: Callable[..., Any]) -> Dependencies | None:
    """Return the dependencies, or None if they are unknown: such a mod is traced at every call."""
    with contextlib.suppress(Unknown, RecursionError):
        return Dependencies(mod)
    return None
