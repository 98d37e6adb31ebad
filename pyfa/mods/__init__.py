"""``score_mod`` and ``mask_mod``: Python functions of one score, traced once for every backend.

``resolve`` turns a user's functions into two things: a digest, and the tensors that the functions
captured. The digest is part of each call and of every cache key. ``of`` returns the mods of a
digest.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import _torch
from . import again
from .captured import dependencies_of
from .derive import of_loads, with_slope
from .ir import Function, Op, TooLarge
from .trace import MOST_CAPTURED, ModError, trace

__all__ = ["MOST_CAPTURED", "Function", "Mod", "ModError", "Mods", "of", "resolve"]

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Mods:
    """A pair of mods; either may be missing. ``kinds``: the dtype and the number of dimensions of
    each captured tensor, those of the score_mod first. ``wanted``: the slots of captured tensors
    that get a gradient."""

    score: Function | None
    mask: Function | None
    kinds: tuple[tuple[torch.dtype, int], ...]
    wanted: frozenset[int] = frozenset()

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of what the mods compute from tensors of these kinds."""
        parts = [f.digest if f is not None else "" for f in (self.score, self.mask)]
        wanted = (sorted(self.wanted),) if self.wanted else ()
        return hashlib.sha256(repr((*parts, self.kinds, *wanted)).encode()).hexdigest()[:32]

    @functools.cached_property
    def slope(self) -> Function | None:
        """Return the score_mod with a second result: its derivative."""
        return None if self.score is None else with_slope(self.score)

    @functools.cached_property
    def of_loads(self) -> tuple[tuple[int, Function], ...]:
        """Return ``derive.of_loads`` for the captured tensors that get a gradient."""
        return () if self.score is None else of_loads(self.score, self.wanted)


class _Known(NamedTuple):
    """A trace, for all functions with one key. ``places``: the indices of its captured tensors
    among the tensors that the function depends on. ``kept``: the objects that the key compares by
    identity."""

    function: Function
    places: tuple[int, ...]
    reads_sizes: bool


_UNCHANGED = Function((Op("input", "f", (), "score"),), (0,))
_ALL = Function((Op("const", "b", (), True),), (0,))

_traces: dict[Hashable, _Known] = {}
_mods: dict[str, Mods] = {}
_lock = threading.Lock()
_recent = again.Recent()
_MOST_TRACES = 1024
_is_compiling = torch.compiler.is_dynamo_compiling


def _traced(
    kind: str, mod: Mod | None, device: torch.device
) -> tuple[Function | None, tuple[torch.Tensor, ...]]:
    if mod is None:
        return None, ()
    if not callable(mod):
        raise TypeError(f"{kind}: expected a function; got {type(mod).__name__}")
    found = dependencies_of(mod)
    if found is not None:
        key: Hashable = (kind, device, torch.is_grad_enabled(), found.key)
        known = _traces.get(key)
        if known is not None and known.reads_sizes:
            known = _traces.get((key, tuple(x.shape for x in found.tensors)))
        if known is not None:
            return known.function, tuple(found.tensors[place] for place in known.places)
    with _lock:
        traces = trace(kind, mod, device)
    if kind == "score_mod":
        _refuse_large_slope(mod, traces.function)
    if found is not None:
        numbers = {id(x): number for number, x in enumerate(found.tensors)}
        if all(id(x) in numbers for x in traces.captured):
            places = tuple(numbers[id(x)] for x in traces.captured)
            if len(_traces) >= _MOST_TRACES:
                _traces.clear()
            _traces[key] = known = _Known(traces.function, places, traces.reads_sizes)
            if traces.reads_sizes:
                _traces[key, tuple(x.shape for x in found.tensors)] = known
    return traces.function, traces.captured


def _refuse_large_slope(mod: Mod, function: Function) -> None:
    try:
        with_slope(function)
    except TooLarge:
        code = getattr(mod, "__code__", None)
        place = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
        name = getattr(mod, "__name__", type(mod).__name__)
        raise ModError(
            f"score_mod {name}{place}: more than 512 operations with its derivative; precompute "
            "part of it as a tensor and capture that"
        ) from None


def resolve(
    score_mod: Mod | None, mask_mod: Mod | None, device: torch.device
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Trace these mods for inputs on ``device``. Return their digest and the tensors that they
    captured. The digest is "" if the mods change nothing.

    Raises ``ModError``, which names the line, for operations that cannot be traced or computed.
    """
    pair, grads = (score_mod, mask_mod), torch.is_grad_enabled()
    if _is_compiling() and all(map(_is_made_before, pair)):
        digest, places = _in_eager_code(score_mod, mask_mod, device, grads)
        if places is not None:
            tensors = _dependencies(score_mod, mask_mod)
            return digest, tuple([tensors[place] for place in places])
    found = _recent.find(pair, device, grads)
    if found is None:
        found = _resolved(score_mod, mask_mod, device)
        _recent.keep(*found, pair, device, grads)
    return found


@_torch.runs_while_compiling
def _in_eager_code(
    score_mod: Mod | None, mask_mod: Mod | None, device: torch.device, grads: bool
) -> tuple[str, tuple[int, ...] | None]:
    """Return the digest and the places of the captured tensors in ``_dependencies``; None if some
    are not there. torch.compile calls this while it compiles, because it cannot trace a mod."""
    with torch.set_grad_enabled(grads):
        digest, captured = resolve(score_mod, mask_mod, device)
    numbers = {id(x): number for number, x in enumerate(_dependencies(score_mod, mask_mod))}
    if any(id(x) not in numbers for x in captured):
        return digest, None
    return digest, tuple(numbers[id(x)] for x in captured)


def _is_made_before(mod: Mod | None) -> bool:
    """Return whether torch.compile can pass ``mod`` to eager code. It cannot if the code that it
    compiles creates the function; it then shows no closure."""
    if mod is None:
        return True
    try:
        _ = mod.__closure__
    except AttributeError:  # torch.compile raises it even from hasattr and getattr
        return False
    return True


def _dependencies(*mods: Mod | None) -> list[torch.Tensor]:
    """Return the tensors that the mods depend on, as far as these are known."""
    found: list[torch.Tensor] = []
    for mod in mods:
        of_mod = None if mod is None else dependencies_of(mod)
        if of_mod is not None:
            found += of_mod.tensors
    return found


def _resolved(
    score_mod: Mod | None, mask_mod: Mod | None, device: torch.device
) -> tuple[str, tuple[torch.Tensor, ...]]:
    score, of_score = _traced("score_mod", score_mod, device)
    mask, of_mask = _traced("mask_mod", mask_mod, device)
    # Frameworks pass functions that do nothing, for which kernels would be compiled.
    score = None if score == _UNCHANGED else score
    mask = None if mask == _ALL else mask
    if score is None and mask is None:
        return "", ()
    captured = of_score + of_mask
    if len(captured) > MOST_CAPTURED:
        raise ModError(
            f"score_mod and mask_mod capture {len(captured)} tensors, expected at most "
            f"{MOST_CAPTURED}; stack those of one shape into one tensor"
        )
    kinds = tuple((x.dtype, x.dim()) for x in captured)
    wanted: frozenset[int] = frozenset()
    if torch.is_grad_enabled():
        # A mask's decision has no derivative.
        wanted = frozenset(slot for slot, x in enumerate(of_score) if x.requires_grad)
    if mask is not None and of_score:
        # Its captured tensors come behind those of the score_mod.
        moved = (
            op._replace(value=int(op.value or 0) + len(of_score)) if op.name == "load" else op
            for op in mask.ops
        )
        mask = mask._replace(ops=tuple(moved))
    mods = Mods(score, mask, kinds, wanted)
    # Not by equality: a function with the constant 0.0 is equal to one with -0.0.
    _mods.setdefault(mods.digest, mods)
    return mods.digest, captured


@_torch.runs_while_compiling
def has_wanted(digest: str) -> bool:
    """Return whether captured tensors get a gradient."""
    return bool(of(digest).wanted)


def of(digest: str) -> Mods:
    """Return the mods for which ``resolve`` returned ``digest`` in this process."""
    return _mods[digest]
