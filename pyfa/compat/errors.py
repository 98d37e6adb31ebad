"""pyfa's errors in the words of the package that the caller knows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_AS_ARGUMENT = {
    "scale": "softmax_scale",
    "window": "window_size",
    "return_lse": "return_attn_probs",
}
_AS_ARGUMENT |= {"bias": "attn_bias"}


class ArgumentError(ValueError, RuntimeError):
    """A wrong argument: flash-attention raises ``RuntimeError`` for it, pyfa ``ValueError``."""


def in_their_words(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with flash-attention's names in what it raises."""

    @functools.wraps(function)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise ArgumentError(_translated(str(error))) from error
        except TypeError as error:
            raise TypeError(_translated(str(error))) from error

    return renamed


def _translated(message: str) -> str:
    # "scale" and "window" are also plain words: only where the message begins with the argument.
    name, colon, rest = message.partition(":")
    message = _AS_ARGUMENT.get(name, name) + colon + rest
    return re.sub(r"\bpage_table\b", "block_table", message)
