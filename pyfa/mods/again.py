"""Recognizes a mod by its code and dependencies. The tensors may be different ones, but of the same
kinds (dtype and number of dimensions).

This takes a fifth of the time of ``captured.Dependencies``, because it does not look into
containers and other functions.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .captured import is_unchanging, names_of

_MISSING = object()
_Function = types.FunctionType
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
        contents = [cell.cell_contents for cell in mod.__closure__ or ()]
        contents += [self._globals.get(name, _MISSING) for name in self._names]
        self._known = [_known(x) for x in contents]

    def add_tensors(self, mod: Any, tensors: list[torch.Tensor]) -> bool:
        """Append the tensors that ``mod`` depends on to ``tensors``. Return False if ``mod``
        differs from the snapshot in anything else."""
        if (
            type(mod) is not _Function
            or mod.__code__ is not self._code
            or mod.__globals__ is not self._globals
            or mod.__defaults__
            or mod.__kwdefaults__
        ):
            return False
        contents = []
        for cell in mod.__closure__ or ():
            contents.append(cell.cell_contents)
        for name in self._names:
            contents.append(self._globals.get(name, _MISSING))
        for known, x in zip(self._known, contents, strict=True):
            if type(known) is _Kind:
                # The same object may have another dtype or device than before.
                if (
                    type(x) is not known.type
                    or x.dtype is not known.dtype
                    or x.shape != known.shape
                    or x.requires_grad is not known.grad
                    or x.device != known.device
                ):
                    return False
                tensors.append(x)
            elif x is not known and not _are_equal(x, known):
                return False
        return True


class _Kind:
    """The properties of a tensor that a trace depends on. ``Module.half()`` and ``.to()`` change
    the dtype and the device of a parameter, which stays the same object."""

    __slots__ = ("device", "dtype", "grad", "shape", "type")

    def __init__(self, x: torch.Tensor) -> None:
        self.type, self.shape, self.grad = type(x), x.shape, x.requires_grad
        self.dtype, self.device = x.dtype, x.device


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
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(x), number) for number, x in enumerate(tensors)]


class _Entry(NamedTuple):
    """``snapshots``: those of the mods, each with the number of its mod. ``firsts``: which of their
    tensors are one, None if there is one tensor at most. ``places``: which of their tensors the
    mods captured, None if all of them, in order."""

    digest: str
    snapshots: list[tuple[int, Snapshot]]
    firsts: list[int] | None
    places: list[int] | None


class Recent:
    """The results of ``resolve`` for recent pairs of mods, found by the mods' code."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[_Entry]] = {}

    def find(
        self, pair: tuple[Any, Any], device: torch.device, grads: bool
    ) -> tuple[str, tuple[torch.Tensor, ...]] | None:
        """Return the digest and the captured tensors of a ``pair`` of mods; None if no such pair is
        known. ``device`` and ``grads``: everything else that the trace depends on."""
        for digest, snapshots, firsts, places in self._found.get(_key(pair, device, grads), ()):
            tensors: list[torch.Tensor] = []
            try:
                for number, snapshot in snapshots:
                    if not snapshot.add_tensors(pair[number], tensors):
                        break
                else:
                    if firsts is None or _first_of_each(tensors) == firsts:
                        if places is None:
                            return digest, tuple(tensors)
                        return digest, tuple([tensors[place] for place in places])
            except ValueError:  # an empty cell
                continue
        return None

    def keep(
        self,
        digest: str,
        captured: Sequence[torch.Tensor],
        pair: tuple[Any, Any],
        device: torch.device,
        grads: bool,
    ) -> None:
        """Keep a result for ``find``."""
        try:
            found = [(at, Snapshot(mod)) for at, mod in enumerate(pair) if mod is not None]
        except (Unsure, ValueError):
            return
        tensors: list[torch.Tensor] = []
        for at, snapshot in found:
            snapshot.add_tensors(pair[at], tensors)
        numbers = {id(x): number for number, x in enumerate(tensors)}
        if all(id(x) in numbers for x in captured):
            places = [numbers[id(x)] for x in captured]
            if len(self._found) >= _MOST:
                self._found.clear()
            firsts = _first_of_each(tensors) if len(tensors) > 1 else None
            in_order = places == [*range(len(tensors))]
            entry = _Entry(digest, found, firsts, None if in_order else places)
            key = _key(pair, device, grads)
            # A new list, because other threads may be reading the old one.
            self._found[key] = [entry, *self._found.get(key, ())][:_MOST_ALIKE]


def _key(pair: tuple[Any, Any], device: torch.device, grads: bool) -> Hashable:
    # By the identity of the code, which an entry keeps: its hash takes 1 µs.
    score, mask = pair
    of_score = 0 if score is None else id(getattr(score, "__code__", score))
    of_mask = 0 if mask is None else id(getattr(mask, "__code__", mask))
    return of_score, of_mask, device, grads
