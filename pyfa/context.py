"""Settings that a ``with`` block makes for the calls inside it, in eager code, backward and
torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from . import _torch, env

T = TypeVar("T")

# Whether any context was ever set, here or anywhere: to ask ``values`` takes 0.4 µs.
used = False
_contexts: list[Context[Any]] = []


class Context(Generic[T]):
    """A setting for the calls of one thread, and for the backward that it starts on other
    threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._here: ContextVar[T | None] = ContextVar(name, default=None)
        # The value set last in any thread: torch.compile cannot read a ContextVar, and guards this.
        self._traced: T | None = None
        _contexts.append(self)

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Make ``get`` return ``value`` inside the ``with`` block."""
        global used
        used = True
        before, self._traced = self._traced, value
        token = None
        if not torch.compiler.is_compiling():
            token = self._here.set(value)
            _torch.hand_to_backward(self._name, value)
        try:
            yield
        finally:
            if token is None:
                self._traced = before
            else:
                # Use the value that this thread has now, not one that another thread may have set
                # in between.
                self._here.reset(token)
                self._traced = self._here.get()
                _torch.hand_to_backward(self._name, self._traced)

    def get(self) -> T | None:
        """Return the value set in this thread. If there is none, return the value set where the
        backward that runs in this thread was called."""
        if torch.compiler.is_compiling():
            return self._traced
        here = self._here.get()
        if here is not None:
            return here
        handed: T | None = _torch.handed_to_backward(self._name)
        return handed


def values() -> tuple[object, ...]:
    """Return the current value of every context."""
    return tuple(context.get() for context in _contexts)


_batch_invariant: Context[bool] = Context("pyfa_batch_invariant")
_batch_invariant_everywhere: bool = env.get("PYFA_BATCH_INVARIANT")


@contextlib.contextmanager
def use_batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Turn batch invariance on for all calls inside the ``with`` block.

    ``use_batch_invariant(False)`` turns it off, except for calls with ``batch_invariant=True``.

    The context takes precedence over ``PYFA_BATCH_INVARIANT``. It does not affect other threads. A
    backward has the setting of its forward, on any thread. If activation checkpointing recomputes
    a forward, that forward uses the context that is active when ``backward()`` is called. Raises
    ``TypeError`` for anything but a bool.

    >>> with pyfa.use_batch_invariant():
    ...     out = pyfa.attention(q, k, v)
    """
    if enabled is not True and enabled is not False:
        raise TypeError(f"enabled: expected True or False; got {type(enabled).__name__}")
    with _batch_invariant.set(enabled):
        yield


def is_batch_invariant() -> bool:
    """Return whether calls without the argument ``batch_invariant`` are batch-invariant."""
    here = _batch_invariant.get()
    return _batch_invariant_everywhere if here is None else here
