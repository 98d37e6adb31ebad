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
_LEAST_GROUPS = 8  # of keys in a split: kLeastGroups of the kernel
# For sequences whose lengths only the device knows: the most keys that a split should have, and the
# workgroups per CU. With only a few splits there may be more workgroups per CU.
_LONGEST_SPLIT = 2048
_PER_UNIT, _MOST_PER_UNIT, _FEW_SPLITS = 4, 16, 9


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
    fills. No split is shorter than 128 keys, two steps of each wavefront, and there are at most two
    workgroups per CU.
    """
    groups, units = -(-keys // GROUP), max(1, units)
    short = -(-groups // _LEAST_GROUPS)
    most = max(1, min(_MOST_SPLITS, short, 2 * units // max(1, workgroups)))
    return splits.fewest_to_fill(
        workgroups, groups, units, most, lambda _, best: min(0.85, 0.9 * best)
    )


def splits_of_lengths(parts: int, workgroups: int, keys: int, units: int) -> int:
    """Return the number of splits, at least ``parts``, of sequences whose lengths only the device
    knows, with at most ``keys`` keys.

    One long sequence among short ones would otherwise keep a few CUs busy while the others have
    nothing left. Splits that a short sequence does not need are empty. In the timing model, the
    workgroup of an empty split ends after 2,000 clocks, and 16 empty splits per CU take 10 to 15
    µs.
    """
    workgroups = max(1, workgroups)
    few = min(_FEW_SPLITS, _MOST_PER_UNIT * units // workgroups)
    most = max(few, _PER_UNIT * units // workgroups)
    return max(parts, min(_MOST_SPLITS, most, -(-keys // _LONGEST_SPLIT)))
