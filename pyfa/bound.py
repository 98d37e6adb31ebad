"""Calls that are bound: checked, planned and prepared once, then run again with other tensors.

A call is found by its numbers, and held to the tensors that it was bound for: shapes, strides,
dtypes, devices, ``requires_grad``, and that nobody watches. Their values and addresses may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _torch
from .backends.base import Run, RunBackward
from .problem import Append, Call, Form, are_on_16, form_of

Fits = Callable[..., bool]

_MOST_ALIKE = 8  # of the same numbers and shapes, with other strides, dtypes, devices, gradients
_MOST = 4096


# Of a tensor, by its number, the dimension whose size may differ: the rows of packed ones.
Free = dict[int, int]


def free_of(form: Form) -> Free:
    """The dimensions of a call's tensors whose sizes may differ, where it is packed.

    Float8 scales of packed blocks of rows hang on their number.
    """
    if "k_descale" in form.names:
        return {}
    free = {0: 0} if "cu_seqlens_q" in form.names else {}
    packed_k = form.shared_offsets or "cu_seqlens_k" in form.names
    return {**free, 1: 0, 2: 0} if packed_k else free


def _sizes(x: torch.Tensor, at: int | None) -> tuple[list[int | None], list[int | None]]:
    """Shape and strides, None where ``at`` is free, or a stride hangs on it."""
    shape: list[int | None] = [*x.shape]
    strides: list[int | None] = [*x.stride()]
    if at is not None:
        shape[at] = None
        strides[:at] = [None] * at
    return shape, strides


def facts(tensors: Sequence[torch.Tensor], free: Free) -> list[object]:
    """What a bound call depends on of its tensors."""
    found: list[object] = [torch.is_inference_mode_enabled()]
    for number, x in enumerate(tensors):
        sizes = _sizes(x, free[number]) if number in free else (x.shape, x.stride())
        # Tensors of inference_mode are refused where they are appended to outside of it.
        found.append((*sizes, x.dtype, x.device, x.requires_grad, x.is_inference()))
    return found


def guard(tensors: Sequence[torch.Tensor], free: Free) -> Fits | None:
    """Whether tensors differ from these by values, addresses and what is free alone; also, whether
    nobody watches them but forward-mode differentiation.

    PyTorch's own guards tell in one call of 0.6 µs what takes 4.8 to ask one by one. None where it
    has none, or makes them in another way. They are never satisfied where one tensor comes twice.
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
    """Whether tensors are like those of a call: asked one by one at first, since a call may never
    come again, and by PyTorch's guards from the second time on.

    ``free``: what may differ. All that have one total of rows have to agree on it: ``alike`` are
    pairs of (tensor, dimension).
    """

    __slots__ = ("_alike", "_facts", "_free", "fits")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        free: Free | None = None,
        alike: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._free, self._alike = free or {}, alike
        self._facts = facts(tensors, self._free)
        self.fits: Fits = self._first

    def _first(self, *tensors: torch.Tensor) -> bool:
        if not self._one_by_one(*tensors):
            return False
        found = guard(tensors, self._free)
        if found is None:
            self.fits = self._one_by_one
        elif self._alike:
            self.fits = lambda *given: found(*given) and self._agree(given)
        else:
            self.fits = found
        return True

    def _one_by_one(self, *tensors: torch.Tensor) -> bool:
        return (
            _torch.is_unwatched(*tensors)
            and facts(tensors, self._free) == self._facts
            and self._agree(tensors)
        )

    def _agree(self, tensors: Sequence[torch.Tensor]) -> bool:
        for a, b in self._alike:
            if tensors[a].shape[self._free[a]] != tensors[b].shape[self._free[b]]:
                return False
        return True


def modes() -> tuple[bool, bool]:
    """What else a call depends on where an input requires a gradient."""
    return torch.is_grad_enabled(), _torch.is_deterministic()


class Bound:
    """One call, bound: ``run`` takes its tensors to out and, where somebody needs it, LSE.

    ``form`` is the call without its tensors, ``who`` may run it and what needs a gradient.
    ``writes``: it appends to a cache.
    ``any_total``: ``run`` takes packed rows however many they are; ``free`` says of which tensors.
    ``backwards``: its bound backwards without and with a gradient of the LSE, each with the tensors
    that it fits.
    """

    __slots__ = (
        "aligned", "backwards", "fitting", "form", "free", "modes", "needs_grad",
        "returns_lse", "run", "who", "writes",
    )  # fmt: skip

    def __init__(
        self,
        run: Run,
        call: Call,
        append: Append | None,
        who: tuple[str, bool, bool],
        tensors: Sequence[torch.Tensor],
        any_total: bool,
    ) -> None:
        self.run, self.who = run, who
        self.form: Form = form_of(call, append)
        self.free = free_of(self.form) if any_total else {}
        self.returns_lse, self.needs_grad = call.return_lse, who[1]
        self.writes = append is not None and append.k is not None
        # k's rows are v's.
        self.fitting = Fitting(tensors, self.free, [(1, 2)] if 1 in self.free else ())
        self.modes = modes() if any(x.requires_grad for x in tensors) else None
        self.aligned = are_on_16(*tensors[:3])
        self.backwards: dict[bool, list[tuple[Fitting, RunBackward]]] = {False: [], True: []}


Kinds = tuple[type, ...]


class Table:
    """Bound calls, first by their numbers alone: the one that came last, which mostly comes again.

    To look up shapes as well takes 0.3 µs more. They are in the other key so that many of them may
    take turns; and so that both are emptied when serving has filled them. Each stands beside the
    types of its key's members: 1.0 is refused where True is taken, and Python finds one by the
    other.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], tuple[Kinds, Bound]] = {}
        self.known: dict[tuple[Any, ...], list[tuple[Kinds, Bound]]] = {}

    def find(self, key: tuple[Any, ...], tensors: Sequence[Any]) -> Bound | None:
        """The call of these numbers that was bound for such tensors; None where there is none."""
        if not _torch.is_unwatched(*tensors):
            return None
        kinds = tuple(map(type, key))
        for each in self.known.get(_with_shapes(key, tensors), ()):
            bound = each[1]
            if (
                each[0] == kinds
                and (bound.modes is None or bound.modes == modes())
                and bound.aligned == are_on_16(*tensors[:3])
                # The last: it makes guards, which hold for the modes in which they are made.
                and bound.fitting.fits(*tensors)
            ):
                self.recent[key] = each
                return bound
        return None

    def keep(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor], found: Bound) -> None:
        """``found`` was bound for ``tensors``, which nobody watches."""
        if len(self.known) >= _MOST:
            self.known.clear()
            self.recent.clear()
        entry = tuple(map(type, key)), found
        shaped = _with_shapes(key, tensors)
        # A new list, for those who are reading the old one.
        self.known[shaped] = [entry, *self.known.get(shaped, ())][:_MOST_ALIKE]
        self.recent[key] = entry


def _with_shapes(key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """With what tells most calls of one key apart: not the rows, of which packed ones have any."""
    q, k, last = tensors[0], tensors[1], tensors[-1]
    rows = q.shape[:2] if q.dim() == 4 else ()
    return key, rows, q.shape[-2:], k.shape[1:] if k.dim() == 4 else k.shape[-2:], last.shape[:1]
