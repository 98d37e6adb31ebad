"""Work counters, from which the blocks of a launch take their next tile: 0 before and after the
launch.

Launches that run at the same time must not share a counter. Each launch takes the next of many. A
captured launch, which may run at any time, gets its own, which its graph clears.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from ... import _torch

MANY = 1 << 16  # a driver queues far fewer launches


@functools.cache
def source(index: int) -> Callable[[], int]:
    """Return a function that gives the address of a counter on device ``index`` for a launch on the
    current stream."""
    with torch.cuda.device(index):
        pool = zeros(MANY, index)
        torch.cuda.synchronize(index)  # other streams use them too
    base, turns = pool.data_ptr(), itertools.count()

    def take(pool: torch.Tensor = pool) -> int:
        if _torch.is_capturing():
            return zeros(1, index).data_ptr()
        return base + 4 * (next(turns) % MANY)

    return take


def zeros(count: int, index: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", index))
