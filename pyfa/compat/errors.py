"""pyfa's errors with the argument names of the package that the caller uses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# pyfa's names, and those in every version of flash-attention.
_AS_ARGUMENT = {
    "scale": "softmax_scale",
    "window": "window_size",
    "bias": "attn_bias",
}


class ArgumentError(ValueError, RuntimeError):
    """A wrong argument. It is a ``RuntimeError``, which flash-attention raises, and a
    ``ValueError``, which pyfa raises."""


def in_words_of(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that replaces pyfa's argument names in errors by those of another package.
    Each keyword is a name in pyfa, and its value the name in that package.

    ``ValueError`` becomes ``ArgumentError``; ``TypeError`` stays ``TypeError``.
    """
    known = _AS_ARGUMENT | names

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                raise ArgumentError(_translated(str(error), known)) from error
            except TypeError as error:
                raise TypeError(_translated(str(error), known)) from error

        return renamed

    return decorated


def refuse(name: str, value: object, why: str) -> None:
    """Raise ``NotImplementedError``, which names the argument, unless ``value`` is None."""
    if value is not None:
        raise NotImplementedError(f"{name}: {why}")


def _translated(message: str, known: Mapping[str, str]) -> str:
    name, colon, rest = message.partition(":")
    message = known.get(name, name) + colon + rest
    for ours, theirs in known.items():
        # "scale" and "window" are also plain words: only where the message begins with them.
        if "_" in ours:
            message = re.sub(rf"\b{ours}\b", theirs, message)
    return message
