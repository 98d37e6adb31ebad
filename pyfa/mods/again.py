"""Recognizes a mod that is passed again: the same function with the same dependencies.

Comparing these objects takes a fifth of the time that ``captured.Dependencies`` takes, which a new
function with the same code needs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .captured import is_unchanging, names_of

_MISSING = object()
_MOST = 512


class Unsure(Exception):
    """The mod has dependencies that cannot be compared, so it must be traced again."""


class Snapshot:
    """A mod's function and the objects that it depends on. Tensors are referenced weakly."""

    def __init__(self, mod: Any) -> None:
        if type(mod) is not types.FunctionType or mod.__defaults__ or mod.__kwdefaults__:
            raise Unsure
        self._mod: Callable[[], Any] = weakref.ref(mod)
        self._code = mod.__code__
        self._globals = mod.__globals__
        self._cells = [(cell, _known(cell.cell_contents)) for cell in mod.__closure__ or ()]
        self._names = [
            (name, _known(self._globals.get(name, _MISSING))) for name in names_of(mod.__code__)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors; all of them are there after ``fits``."""
        known = [x for _, x in (*self._cells, *self._names)]
        return [x.ref() for x in known if type(x) is _Tensor]

    def fits(self, mod: Any) -> bool:
        """Return whether ``mod`` is the same function, with the same dependencies."""
        if self._mod() is not mod:
            return False
        if mod.__code__ is not self._code or mod.__defaults__ or mod.__kwdefaults__:
            return False
        for cell, known in self._cells:
            content = cell.cell_contents
            if content is not known and not (type(known) is _Tensor and known.fits(content)):
                return False
        for name, known in self._names:
            content = self._globals.get(name, _MISSING)
            if content is not known and not (type(known) is _Tensor and known.fits(content)):
                return False
        return True


class _Tensor:
    """What a trace depends on of a tensor. ``Module.half()`` and ``.to()`` change the dtype and the
    device of a parameter, which stays the same object."""

    __slots__ = ("device", "dtype", "grad", "ref", "shape")

    def __init__(self, x: torch.Tensor) -> None:
        self.ref: Callable[[], Any] = weakref.ref(x)
        self.shape, self.grad = x.shape, x.requires_grad
        self.dtype, self.device = x.dtype, x.device

    def fits(self, x: Any) -> bool:
        if x is None or self.ref() is not x:
            return False
        same: bool = (
            x.shape == self.shape
            and x.requires_grad is self.grad
            and x.dtype is self.dtype
            and x.device == self.device
        )
        return same


def _known(x: object) -> object:
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return _Tensor(x)  # type: ignore[arg-type]
    if x is _MISSING or type(x) in (int, float, bool, str, type(None), torch.dtype):
        return x
    if isinstance(x, types.ModuleType) and is_unchanging(x.__name__):
        return x
    if isinstance(x, (types.BuiltinFunctionType, type)) and is_unchanging(x.__module__):
        return x
    raise Unsure


class Recent:
    """What ``resolve`` returned for pairs of mods that came twice."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def find(
        self, key: Hashable, pair: Sequence[Any]
    ) -> tuple[str, tuple[torch.Tensor, ...]] | None:
        """Return what was kept under ``key``, if this ``pair`` of mods still is what it was."""
        found = self._found.get(key)
        if type(found) is not tuple:
            return None
        digest, snapshots, places = found
        try:
            for mod, snapshot in zip(pair, snapshots, strict=True):
                if snapshot is not None and not snapshot.fits(mod):
                    return None
        except ValueError:  # an empty cell
            return None
        tensors = [x for snapshot in snapshots if snapshot is not None for x in snapshot.tensors()]
        return digest, tuple(tensors[place] for place in places)

    def keep(
        self, key: Hashable, pair: Sequence[Any], digest: str, captured: Sequence[torch.Tensor]
    ) -> None:
        """Keep a result, from the second time on: a function that is made for each call is never
        passed again."""
        mods = tuple(weakref.ref(mod) for mod in pair if type(mod) is types.FunctionType)
        if self._found.get(key) != list(mods):
            if len(self._found) >= _MOST:
                self._found.clear()
            self._found[key] = list(mods)
            return
        try:
            snapshots = tuple(None if mod is None else Snapshot(mod) for mod in pair)
        except (Unsure, ValueError):
            return
        tensors = [x for snapshot in snapshots if snapshot is not None for x in snapshot.tensors()]
        numbers = {id(x): number for number, x in enumerate(tensors)}
        if all(id(x) in numbers for x in captured):
            places = tuple(numbers[id(x)] for x in captured)
            self._found[key] = digest, snapshots, places
