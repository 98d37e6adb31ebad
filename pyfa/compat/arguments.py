"""Arguments that the versions of flash-attention share, converted to pyfa's."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from .. import validate

Window = Sequence[int] | torch.Tensor


def window(window_size: Window) -> tuple[int, int] | None:
    """Return pyfa's window. If both bounds are unlimited, return None instead of (-1, -1): any
    window, even an unlimited one, changes the positions that rotary embedding gives to queries."""
    if type(window_size) is tuple and window_size == (-1, -1):
        return None  # at once, for it is the default
    try:
        left, right = (max(-1, operator.index(edge)) for edge in window_size)
    except (TypeError, ValueError):
        validate.wrong("window_size", "two integers (left, right)", window_size)
    return None if left == right == -1 else (left, right)


def length(value: int | torch.Tensor) -> int:
    """Return a maximum length as an int. Callers may pass an int or a tensor."""
    return int(value) if isinstance(value, torch.Tensor) else value


def natural(name: str, value: int) -> int:
    """Return an int, and 0 for negative ones."""
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an int; got {type(value).__name__}")
    return max(value, 0)


def unpacked(name: str, x: torch.Tensor, parts: int, dims: int) -> tuple[torch.Tensor, ...]:
    """Split a packed tensor along the dimension before heads and head_dim."""
    validate.a_tensor(name, x)
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "batch, seqlen" if dims == 5 else "total"
        validate.wrong(name, f"shape ({lead}, {parts}, heads, head_dim)", x)
    return x.unbind(-3)
