"""Decode: conditions beyond ``native/decode.py``, and the number of splits of the keys."""

from __future__ import annotations

import functools

from ...problem import Problem
from ..common import splits
from ..native import decode as native
from ..native.tiles import GROUP

FEATURES = native.FEATURES | {"fp8"}
KERNEL = "hip/attn_decode.hip"
THREADS = 256
_MOST_SPLITS = 512


def takes(problem: Problem) -> bool:
    """Return whether the plan is decode rather than forward.

    With float8 keys, decode takes 16-bit queries whatever their number, if it has the features:
    the forward kernel has one format for queries and keys.
    """
    if problem.dtype_k:
        return native.has_all(problem, FEATURES)
    return native.takes(problem, FEATURES)


@functools.lru_cache(4096)
def splits_for(workgroups: int, keys: int, units: int) -> int:
    """Return the number of splits of ``keys`` with which ``workgroups`` fill a device of ``units``
    CUs.

    It is the smallest number that fills 85 % of the CUs, or nine tenths of what the best number
    fills. No split is shorter than 64 keys, one step of each wavefront, and there are at most two
    workgroups per CU.
    """
    groups, units = -(-keys // GROUP), max(1, units)
    most = max(1, min(_MOST_SPLITS, -(-groups // 4), 2 * units // max(1, workgroups)))
    return splits.fewest_to_fill(
        workgroups, groups, units, most, lambda _, best: min(0.85, 0.9 * best)
    )
