"""A peer that is ready to be timed at one cell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

# Attention of q, k and v as (batch, seqlen, heads, head_dim), then of (heads,) sinks where the cell
# has them.
Attend = Callable[..., torch.Tensor]


class Ready(NamedTuple):
    """The functions to time, with their inputs. ``forward`` returns the output of ``leaves``;
    ``dout`` is the gradient of the output. The timed code runs inside the context ``within``. If
    ``step`` is given, it is timed instead of forward and gradients."""

    forward: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    dout: torch.Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    step: Callable[[], object] | None = None
