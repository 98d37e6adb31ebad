"""Calls that come again, of q, k, v, offsets of packed ones, masks and numbers alone: found by what
they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .backends.base import Repeat, RepeatBackward
from .problem import Call, again, are_on_16, changing, unchanging

Fits = Callable[..., bool]
_Guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_Guards = getattr(_Guards, "TensorGuards", None)
_is_deterministic: Any = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)

_MOST_ALIKE = 8  # of the same options and shapes, with other strides, dtypes, devices, gradients
_MOST = 4096


def is_unwatched(*tensors: torch.Tensor) -> bool:
    """Plain tensors, and no compiler, mode, transform or autocast to be heard."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is torch.Tensor for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
        and not any(x.is_neg() for x in tensors)
    )


def fitting(*tensors: torch.Tensor) -> Fits:
    """Whether tensors differ from these, which are unwatched, only by values and addresses.

    That is: shapes, strides, dtypes, devices, ``requires_grad``, and nobody who watches them but
    for forward-mode gradients. PyTorch's own guards tell in one call of 0.6 µs what takes 4.8 to
    ask one by one; they are never satisfied where one tensor comes twice.
    """
    guard = _guard(tensors)
    if guard is not None and guard(*tensors):
        return guard
    expected = _facts(tensors)
    return lambda *given: is_unwatched(*given) and _facts(given) == expected


def _guard(tensors: tuple[torch.Tensor, ...]) -> Fits | None:
    """PyTorch's own; None where it has none, or one that is made in another way."""
    try:
        found: Fits = _Guards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
    except (TypeError, RuntimeError, AttributeError):
        return None
    return found


def _facts(tensors: tuple[torch.Tensor, ...]) -> list[object]:
    facts = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors]
    return [torch.is_inference_mode_enabled(), *facts]


def modes() -> tuple[bool, bool]:
    """What else a call depends on where an input requires a gradient."""
    return torch.is_grad_enabled(), _is_deterministic()


class Repeated:
    """A call that may come again: how it runs, what of its ``Call`` stays, and who may run it and
    what needs a gradient.

    It comes with other tensors, ``problem.changing``, which ``fits`` holds to what these were.
    ``backwards``: how the backward of such a call runs, for the tensors that each fits; None where
    the general way is the only one.
    """

    __slots__ = (
        "aligned", "backwards", "fits", "modes", "needs_grad", "rest", "returns_lse", "run", "who",
    )  # fmt: skip

    def __init__(
        self,
        run: Repeat,
        call: Call,
        who: tuple[str, bool, bool],
    ) -> None:
        tensors = changing(call)
        self.run, self.rest, self.who = run, unchanging(call), who
        self.returns_lse, self.needs_grad = call.return_lse, who[1]
        self.fits = fitting(*tensors)
        self.modes = modes() if any(x.requires_grad for x in tensors) else None
        self.aligned = are_on_16(*tensors[:3])
        self.backwards: list[tuple[Fits, RepeatBackward | None]] = []

    def call(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The call with these tensors."""
        return again(self.rest, tensors)


def _key(options: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """With the shapes of q, k and v, or of offsets, which tell how many sequences there are."""
    return options, tensors[0].shape, tensors[1].shape, tensors[-1].shape


class Table:
    """What came, first by options alone: the one that came last, which mostly comes again.

    To look up shapes as well takes 0.3 µs more. They are in the other key so that many of them may
    take turns; and so that both are emptied when serving has filled them.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], Repeated] = {}
        self.known: dict[tuple[Any, ...], list[Repeated]] = {}

    def find(self, options: tuple[Any, ...], *tensors: Any) -> Repeated | None:
        """Also where it is not the one that came last."""
        if not is_unwatched(*tensors):
            return None
        for each in self.known.get(_key(options, tensors), ()):
            if (
                each.fits(*tensors)
                and (each.modes is None or each.modes == modes())
                and each.aligned == are_on_16(*tensors[:3])
            ):
                self.recent[options] = each
                return each
        return None

    def keep(self, options: tuple[Any, ...], call: Call, found: Repeated) -> None:
        """``found`` is of ``call``, which is unwatched."""
        if len(self.known) >= _MOST:
            self.known.clear()
            self.recent.clear()
        key = _key(options, changing(call))
        # A new list, for those who are reading the old one.
        self.known[key] = [found, *self.known.get(key, ())][:_MOST_ALIKE]
        self.recent[options] = found
