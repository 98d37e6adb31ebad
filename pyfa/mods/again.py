"""Recognizes a mod by its code and dependencies. The tensors may be different ones, but of the same
kinds (dtype and number of dimensions).

This takes a fifth of the time of ``captured.Dependencies``, because it does not look into
containers and other functions.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .captured import is_unchanging, names_of

_MISSING = object()
_ONE = [0]
_MOST, _MOST_ALIKE = 512, 4  # of one code, with other numbers or shapes


class Unsure(Exception):
    """The mod has dependencies that cannot be compared, so it must be traced again."""


class Snapshot:
    """A mod's code and the objects that it depends on. For a tensor, only its kind is kept."""

    def __init__(self, mod: Any) -> None:
        if type(mod) is not types.FunctionType or mod.__defaults__ or mod.__kwdefaults__:
            raise Unsure
        self._code, self._globals = mod.__code__, mod.__globals__
        self._names = names_of(mod.__code__)
        self._known = [_known(x) for x in self._contents(mod)]

    def _contents(self, mod: Any) -> list[Any]:
        found = [cell.cell_contents for cell in mod.__closure__ or ()]
        if self._names:
            found += [self._globals.get(name, _MISSING) for name in self._names]
        return found

    def tensors_of(self, mod: Any) -> list[torch.Tensor] | None:
        """Return the tensors that ``mod`` depends on; None if ``mod`` differs from the snapshot in
        anything else."""
        if (
            type(mod) is not types.FunctionType
            or mod.__code__ is not self._code
            or mod.__globals__ is not self._globals
            or mod.__defaults__
            or mod.__kwdefaults__
        ):
            return None
        tensors = []
        for known, x in zip(self._known, self._contents(mod), strict=True):
            if type(known) is _Kind:
                if not known.fits(x):
                    return None
                tensors.append(x)
            elif x is not known and not _are_equal(x, known):
                return None
        return tensors


class _Kind:
    """The properties of a tensor that a trace depends on. ``Module.half()`` and ``.to()`` change
    the dtype and the device of a parameter, which stays the same object."""

    __slots__ = ("device", "dtype", "grad", "shape", "type")

    def __init__(self, x: torch.Tensor) -> None:
        self.type, self.shape, self.grad = type(x), x.shape, x.requires_grad
        self.dtype, self.device = x.dtype, x.device

    def fits(self, x: Any) -> bool:
        same: bool = (
            type(x) is self.type
            and x.shape == self.shape
            and x.requires_grad is self.grad
            and x.dtype is self.dtype
            and x.device == self.device
        )
        return same


def _are_equal(x: Any, known: object) -> bool:
    """Return whether both are the same number or text; 0.0 is not -0.0."""
    return type(x) is type(known) and type(x) in (int, float, str) and repr(x) == repr(known)


def _known(x: object) -> object:
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return _Kind(x)  # type: ignore[arg-type]
    if x is _MISSING or type(x) in (int, float, bool, str, type(None), torch.dtype):
        return x
    if isinstance(x, types.ModuleType) and is_unchanging(x.__name__):
        return x
    if isinstance(x, (types.BuiltinFunctionType, type)) and is_unchanging(x.__module__):
        return x
    raise Unsure


def _first_of_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return which tensors are one: a trace has one load of them."""
    if len(tensors) == 1:
        return _ONE
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(x), number) for number, x in enumerate(tensors)]


def _tensors_of(
    pair: Sequence[Any], snapshots: Sequence[Snapshot | None]
) -> list[torch.Tensor] | None:
    """Return the tensors that both mods depend on; None if one is not what its snapshot says."""
    found: list[torch.Tensor] = []
    for mod, snapshot in zip(pair, snapshots, strict=True):
        if snapshot is not None:
            try:
                tensors = snapshot.tensors_of(mod)
            except ValueError:  # an empty cell
                return None
            if tensors is None:
                return None
            found += tensors
    return found


# A digest, the snapshots of its mods, which of their tensors are one, and the places of those that
# the mods captured.
_Entry = tuple[str, list[Snapshot | None], list[int], list[int]]


class Recent:
    """The results of ``resolve`` for recent pairs of mods, found by the mods' code."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[_Entry]] = {}

    def find(
        self, pair: Sequence[Any], *rest: Hashable
    ) -> tuple[str, tuple[torch.Tensor, ...]] | None:
        """Return the digest and the captured tensors of a ``pair`` of mods; None if no such pair is
        known. ``rest``: everything else that the trace depends on, such as the device."""
        for digest, snapshots, firsts, places in self._found.get(_key(pair, rest), ()):
            tensors = _tensors_of(pair, snapshots)
            if tensors is not None and _first_of_each(tensors) == firsts:
                return digest, tuple([tensors[place] for place in places])
        return None

    def keep(
        self, digest: str, captured: Sequence[torch.Tensor], pair: Sequence[Any], *rest: Hashable
    ) -> None:
        """Keep a result for ``find``."""
        try:
            snapshots = [None if mod is None else Snapshot(mod) for mod in pair]
        except (Unsure, ValueError):
            return
        tensors = _tensors_of(pair, snapshots) or []
        numbers = {id(x): number for number, x in enumerate(tensors)}
        if all(id(x) in numbers for x in captured):
            places = [numbers[id(x)] for x in captured]
            if len(self._found) >= _MOST:
                self._found.clear()
            entry: _Entry = digest, snapshots, _first_of_each(tensors), places
            key = _key(pair, rest)
            # A new list, because other threads may be reading the old one.
            self._found[key] = [entry, *self._found.get(key, ())][:_MOST_ALIKE]


def _key(pair: Sequence[Any], rest: tuple[Hashable, ...]) -> Hashable:
    # By the identity of the code, which an entry keeps: its hash takes 1 µs.
    score, mask = pair
    return id(getattr(score, "__code__", score)), id(getattr(mask, "__code__", mask)), rest
