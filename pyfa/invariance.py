"""``use_batch_invariant``: whether a row's bits may depend on what shares its batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from . import _torch, env

_context: ContextVar[bool | None] = ContextVar("pyfa_batch_invariant", default=None)
# As in ``dispatch``: what torch.compile guards, and what autograd hands to its threads.
_traced_context: bool | None = None
_HANDED_ON = "pyfa_batch_invariant"
_from_environment: bool = env.get("PYFA_BATCH_INVARIANT")
# Whether the context was ever set, here or anywhere: to ask ``context`` takes 0.2 µs.
named = False


@contextlib.contextmanager
def use_batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside the ``with`` block, all calls are ``batch_invariant``; with False, only those that
    ask for it themselves.

    Ranks above ``PYFA_BATCH_INVARIANT``. Other threads are not affected. The backward follows its
    forward, on any thread. A forward recomputed by activation checkpointing follows the
    ``use_batch_invariant`` active at ``backward()``.

    >>> with pyfa.use_batch_invariant():
    ...     out = pyfa.attention(q, k, v)
    """
    global _traced_context, named
    if enabled is not True and enabled is not False:
        raise TypeError(f"enabled: expected True or False; got {type(enabled).__name__}")
    named = True
    before, _traced_context = _traced_context, enabled
    token = None
    if not torch.compiler.is_compiling():
        token = _context.set(enabled)
        _torch.hand_to_backward(_HANDED_ON, enabled)
    try:
        yield
    finally:
        if token is None:
            _traced_context = before
        else:
            _context.reset(token)
            _traced_context = _context.get()
            _torch.hand_to_backward(_HANDED_ON, _traced_context)


def context() -> bool | None:
    """What ``use_batch_invariant`` set: here, or where this thread's ``backward`` was called."""
    here = _context.get()
    if here is not None:
        return here
    handed: bool | None = _torch.handed_to_backward(_HANDED_ON)
    return handed


def is_on() -> bool:
    """Whether calls are batch invariant that do not ask for it themselves."""
    here = _traced_context if torch.compiler.is_compiling() else context()
    return _from_environment if here is None else here
