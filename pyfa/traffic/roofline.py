"""The roofline (Williams, Waterman, Patterson 2009): whether memory or matrix units bound.

Peaks are those of the vendors' data sheets (``arch.py``, ``device.py``), which nobody reaches for
long: a lower bound of time, no prediction of it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device


class Bound(NamedTuple):
    """``seconds`` at least; ``by`` is ``memory`` or ``compute``, "" where no peak is known."""

    seconds: float
    by: str
    intensity: float


def ridge(device: Device, dtype: str) -> float:
    """FLOP/byte from which the matrix units bound, 0 where a peak is not known."""
    return device.matrix_flops(dtype) / device.bandwidth if device.bandwidth else 0.0


def bound(device: Device, dtype: str, flops: float, moved: float) -> Bound:
    """Of ``flops`` in matrix products beside ``moved`` bytes of memory, overlapped perfectly."""
    peak = device.matrix_flops(dtype)
    intensity = flops / moved if moved else 0.0
    if not peak or not device.bandwidth:
        return Bound(0.0, "", intensity)
    computing, moving = flops / peak, moved / device.bandwidth
    return Bound(max(computing, moving), "compute" if computing > moving else "memory", intensity)
