"""Bound calls: checked, planned and prepared once, then run again with other tensors.

A call is found by its *numbers*, the arguments that are not tensors. Its tensors must match those
it was bound for in shapes, strides, dtypes, devices and ``requires_grad``, and be unwatched
(``_torch.is_unwatched``). Their values and addresses may differ.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from . import _torch, mods
from .backends.base import Gradients, Run, RunBackward
from .blocks import kept
from .dispatch import prepare
from .problem import Append, Call, Form, are_on_16, form_of, tensors_of


class Fits(Protocol):
    """Returns whether a call may take these tensors."""

    def __call__(self, *tensors: torch.Tensor) -> bool: ...


_MOST_ALIKE = 8  # of the same numbers and shapes, with other strides, dtypes, devices, gradients
_MOST = 4096


# By a tensor's number, the dimension whose size may differ: the rows of a packed tensor.
Free = dict[int, int]


def free_of(form: Form) -> Free:
    """Return the dimensions of a packed call's tensors whose sizes may differ.

    They do not include float8 scales per block of packed rows, whose shape depends on the number of
    blocks.
    """
    if "k_descale" in form.names:
        return {}
    free = {0: 0} if "cu_seqlens_q" in form.names else {}
    packed_k = form.shared_offsets or "cu_seqlens_k" in form.names
    return {**free, 1: 0, 2: 0} if packed_k else free


def _sizes(x: torch.Tensor, at: int | None) -> tuple[list[int | None], list[int | None]]:
    """Return shape and strides, with None if ``at`` is free or a stride depends on it."""
    shape: list[int | None] = [*x.shape]
    strides: list[int | None] = [*x.stride()]
    if at is not None and shape:  # a tensor of a repeated call may have no dimension
        shape[at] = None
        strides[:at] = [None] * at
    return shape, strides


def facts(tensors: Sequence[torch.Tensor], free: Free) -> list[object]:
    """Return the properties of the tensors on which a bound call depends."""
    found: list[object] = [torch.is_inference_mode_enabled()]
    for number, x in enumerate(tensors):
        sizes = _sizes(x, free[number]) if number in free else (x.shape, x.stride())
        # Outside of inference_mode, an append to a tensor created in it is refused.
        found.append((*sizes, x.dtype, x.device, x.requires_grad, x.is_inference()))
    return found


def guard(tensors: Sequence[torch.Tensor], free: Free) -> Fits | None:
    """Return a check that tensors differ from these only in values, addresses and free dimensions,
    and that at most forward-mode differentiation watches them.

    The check consists of PyTorch's own guards, which take 0.6 µs where single checks take 4.8 µs.
    Return None if PyTorch has no guards or creates them in another way. Guards fail if a tensor is
    passed twice.
    """
    sizes = [_sizes(x, free.get(number)) for number, x in enumerate(tensors)]
    try:
        found: Fits = _torch.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[shape for shape, _ in sizes],
            dynamic_dims_strides=[strides for _, strides in sizes],
        ).check
    except (TypeError, RuntimeError, AttributeError):
        return None
    return found if found(*tensors) else None


class Fitting:
    """A check whether tensors are like those of a call. The first check compares them one by one,
    since the call may never repeat; later checks use PyTorch's guards.

    ``free`` lists the dimensions whose sizes may differ. ``alike`` maps a tensor's number to the
    tensors whose free dimension must have the same size (the total of rows) as its own. Strides
    that depend on a free dimension are not compared. A contiguous tensor with free dimensions must
    therefore stay contiguous. ``off_16``: the number of a tensor that must not be 16-byte aligned.
    """

    __slots__ = ("_alike", "_facts", "_free", "_off_16", "_whole", "fits")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        free: Free | None = None,
        alike: Mapping[int, Sequence[int]] = MappingProxyType({}),
        off_16: int | None = None,
    ) -> None:
        self._free = at = free or {}
        self._alike = [(a, at[a], [(b, at[b]) for b in others]) for a, others in alike.items()]
        self._whole = [
            number for number, at in self._free.items() if at and tensors[number].is_contiguous()
        ]
        self._facts = facts(tensors, self._free)
        self._off_16 = off_16
        self.fits: Fits = self._first

    def _first(self, *tensors: torch.Tensor) -> bool:
        one_by_one = self._agreeing(self._one_by_one)
        if not one_by_one(*tensors):
            return False
        found = guard(tensors, self._free)
        self.fits = one_by_one if found is None else self._agreeing(found)
        return True

    def _one_by_one(self, *tensors: torch.Tensor) -> bool:
        return _torch.is_unwatched(*tensors) and facts(tensors, self._free) == self._facts

    def _agreeing(self, fits: Fits) -> Fits:
        """Return a check that tensors pass ``fits``, that their totals agree, and that the one of
        ``off_16`` is misaligned."""
        alike, whole, off_16 = self._alike, self._whole, self._off_16
        if not (alike or whole or off_16 is not None):
            return fits

        def fits_and_agrees(*tensors: torch.Tensor) -> bool:
            if not fits(*tensors):
                return False
            for number, at, others in alike:
                total = tensors[number].shape[at]
                for other, at_other in others:
                    if tensors[other].shape[at_other] != total:
                        return False
            for number in whole:  # a generator takes two calls more
                if not tensors[number].is_contiguous():
                    return False
            return off_16 is None or tensors[off_16].data_ptr() & 15 != 0

        return fits_and_agrees


_OF_GRADIENTS = {"q": 0, "k": 1, "v": 2, "bias": 3, "sinks": 4}
_NO_GRADIENT = len(Gradients._fields)  # behind them


@functools.lru_cache(1024)
def picking(names: tuple[str, ...], digest: str) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks the gradient of each tensor in the fields ``names`` of a call
    with these mods, or None if the tensor has no gradient. The function takes the elements of
    ``Gradients``, None, and the gradients of the captured tensors, in this order."""
    places = dict(_OF_GRADIENTS)
    if digest:  # a table that a mask alone reads has none, nor one of integers
        places |= {f"captured{slot}": _NO_GRADIENT + 1 + slot for slot in mods.of(digest).wanted}
    return operator.itemgetter(*(places.get(name, _NO_GRADIENT) for name in names))


def modes() -> tuple[bool, bool]:
    """Return the global modes that a call depends on if an input requires a gradient."""
    return torch.is_grad_enabled(), _torch.is_deterministic()


class Bound:
    """One bound call: ``run`` maps its tensors to out and, if needed, LSE.

    ``form``: the call without its tensors. ``who``: the backends that may run it, and which inputs
    need a gradient. ``writes``: it appends to a cache. ``free``: the dimensions of packed rows,
    of which ``run`` takes any number. ``backwards``: its bound backwards without and with a
    gradient of the LSE, each with the tensors that it fits. ``pick``: see ``picking``.
    """

    __slots__ = (
        "aligned", "backwards", "fitting", "form", "free", "has_bias", "modes", "needs_grad",
        "pick", "returns_lse", "run", "who", "writes",
    )  # fmt: skip

    def __init__(
        self,
        run: Run,
        call: Call,
        append: Append | None,
        who: tuple[str, bool, bool],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self.run, self.who = run, who
        self.form: Form = form_of(call, append)
        self.free = free_of(self.form)
        # The first gradient is None, for the bound call, which comes before its tensors.
        self.pick = picking(("", *self.form.names), call.mods)
        self.returns_lse, self.needs_grad = call.return_lse, who[1]
        self.writes = append is not None and append.k is not None
        self.modes = modes() if any(x.requires_grad for x in tensors) else None
        self.has_bias = call.bias is not None
        self.aligned = _alignments(tensors, self.has_bias)
        # k and v have the same rows. A plan for a misaligned bias may be slower, and would run an
        # aligned one.
        alike, off_16 = {1: (2,)} if 1 in self.free else {}, None if self.aligned[1] else 3
        self.fitting = Fitting(tensors, self.free, alike, off_16)
        self.backwards: dict[bool, list[tuple[Fitting, RunBackward]]] = {False: [], True: []}


def _alignments(tensors: Sequence[torch.Tensor], has_bias: bool) -> tuple[bool, bool]:
    """Return whether q, k and v are 16-byte aligned, and whether the bias is, which comes next. A
    plan may need either without the other."""
    return are_on_16(*tensors[:3]), not has_bias or tensors[3].data_ptr() & 15 == 0


class Slot:
    """The most recent bound call with given numbers."""

    __slots__ = ("bound",)

    def __init__(self, bound: Bound) -> None:
        self.bound = bound


class Table:
    """The bound calls. A call is first looked up by its numbers alone, which gives the most recent
    match: ``recent`` returns its slot, and raises ``KeyError`` for numbers of no call.

    If this match does not fit, a second lookup, which takes 0.3 µs more, includes the shapes, so
    that calls with several shapes can alternate. When the table is full, for example after long
    serving, it is emptied. Both lookups include the types of the numbers, because Python treats 1.0
    and True as the same key, while a call may accept only one of them.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], list[Bound]] = {}
        self._slots: dict[tuple[Any, ...], Slot] = {}
        # This looks at the types in C, which takes half the time. It caches no error, so that it
        # holds no key but those of ``_slots``.
        self.recent = functools.lru_cache(None, typed=True)(lambda *key: self._slots[_typed(key)])

    def clear(self) -> None:
        """Forget all calls."""
        self.known.clear()
        self._slots.clear()
        self.recent.cache_clear()

    def find(self, key: tuple[Any, ...], tensors: Sequence[Any]) -> Bound | None:
        """Return the call that was bound for these numbers and tensors like these, or None."""
        if not _torch.is_unwatched(*tensors):
            return None
        for bound in self.known.get(_with_shapes(key, tensors), ()):
            if (
                (bound.modes is None or bound.modes == modes())
                and bound.aligned == _alignments(tensors, bound.has_bias)
                # The last: it makes guards, which hold for the modes in which they are made.
                and bound.fitting.fits(*tensors)
            ):
                self._set_recent(key, bound)
                return bound
        return None

    def keep(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor], found: Bound) -> None:
        """Store ``found``, which was bound for the unwatched ``tensors``."""
        if len(self.known) >= _MOST:
            self.clear()
        shaped = _with_shapes(key, tensors)
        # A new list, because other threads may be reading the old one.
        self.known[shaped] = [found, *self.known.get(shaped, ())][:_MOST_ALIKE]
        self._set_recent(key, found)

    def _set_recent(self, key: tuple[Any, ...], bound: Bound) -> None:
        self._slots.setdefault(_typed(key), Slot(bound)).bound = bound


def _typed(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key, tuple(map(type, key))


def _with_shapes(key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Extend a key by its members' types and by the shapes, without the number of packed rows."""
    q, k, last = tensors[0], tensors[1], tensors[-1]
    rows = q.shape[:2] if q.dim() == 4 else ()
    of_k = k.shape[1:] if k.dim() == 4 else k.shape[-2:]
    return *_typed(key), rows, q.shape[-2:], of_k, last.shape[:1]


# Calls by all that ``Call`` says, from every way that leads to a backend.
calls = Table()


def bound_of(
    call: Call, append: Append | None, who: tuple[str, bool, bool], with_lse: bool
) -> Bound:
    """Return ``call`` bound, with its tensors or others like them.

    ``who`` are the arguments of ``dispatch.prepare`` after the call. The bound call is kept if the
    tensors are unwatched.
    """
    tensors = tensors_of(call, append)
    form = form_of(call, append)
    uncounted = bool(call.mods) and kept.is_uncounted()
    key = (*form.places, form.shared_offsets, *form.numbers, form.append, *who, with_lse, uncounted)
    found = calls.find(key, tensors)
    if found is None:
        prepared = prepare(call, *who)
        run = prepared.bind(call, append, with_lse)
        found = Bound(run, call, append, who, tensors)
        if _torch.is_unwatched(*tensors):
            calls.keep(key, tensors, found)
    return found
