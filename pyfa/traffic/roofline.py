"""The roofline (Williams, Waterman, Patterson 2009): whether memory or matrix units are the bound.

Peaks come from the vendors' data sheets (``arch.py``, ``device.py``) and are not sustained in
practice. The result is a lower bound on the time, not a prediction.
"""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device


class Bound(NamedTuple):
    """A lower bound of a time. ``seconds``: the bound. ``by``: the limit, ``memory`` or
    ``compute``; "" if no peak is known."""

    seconds: float
    by: str
    intensity: float


def ridge(device: Device, dtype: str) -> float:
    """Return the FLOP/byte above which the matrix units are the bound, 0 if a peak is unknown."""
    return device.matrix_flops(dtype) / device.bandwidth if device.bandwidth else 0.0


def bound(device: Device, dtype: str, flops: float, moved: float) -> Bound:
    """Return the bound for ``flops`` in matrix products and ``moved`` bytes of memory, perfectly
    overlapped."""
    peak = device.matrix_flops(dtype)
    intensity = flops / moved if moved else 0.0
    if not peak or not device.bandwidth:
        return Bound(0.0, "", intensity)
    computing, moving = flops / peak, moved / device.bandwidth
    return Bound(max(computing, moving), "compute" if computing > moving else "memory", intensity)
