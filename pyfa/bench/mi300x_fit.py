"""Finds the single constant of the timing model that best explains the model's difference from
measurements.

For each cell the model gives a range of times: one with the present constants, and one for each
change of a constant. Where the device lies between the two ends of the range is a free parameter,
the same for all cells. A constant is named if changing it alone, within its range or beyond,
explains the measured times clearly better than changing none, and clearly better than changing any
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..backends.hip.runtime_sensitivity import FACTORS, Constant

# Standard deviations of measured over modeled time if all constants are right. FORWARD: the
# difference that remains for published kernels with one clock per kernel and machine (2 to 6 %).
# BACKWARD: the same across kernels of a backward (8 to 15 %; benchmarks/results/mi300x_model.json).
# MEMORY: half of the error that is possible for a kernel that waits for memory (docs/mi300x.md).
FORWARD, BACKWARD, MEMORY = 0.05, 0.10, 0.15
FEWEST = 6
# Differences of chi squared that chance does not reach: for the best of some 25 constants (4
# standard deviations), and for the best one against the second (3).
NAMED, APART = 16.0, 9.0
EXPLAINED = 0.25  # of chi squared is left at most by what is named: half of the distance
_STEPS = np.linspace(0, 1, 21)  # between the ends
_POWERS = np.linspace(math.log2(FACTORS[0]), math.log2(FACTORS[-1]), 65)

# Names of constants in a sentence; all others keep their own names.
WORDS = {
    "clock": "the clock at a matrix utilization of 0.75",
    "clock_exponent": "how steeply the clock falls with utilization",
    "hbm_bytes": "the bandwidth of HBM",
    "l2_bytes_of_die": "the bandwidth of a die's L2",
    "launch_seconds": "the cost of a launch",
    "dispatch": "the cost of starting the next workgroup",
    "lds_latency": "the latency of LDS",
    "lds_direct_bytes": "the rate at which direct loads fill LDS",
    "l2_latency": "the latency of L2",
    "l2_bytes": "the bytes that a compute unit gets from L2",
    "barrier": "the cost of a barrier",
    "branch": "the cost of a taken branch",
    "transcendental": "the time of v_exp_f32",
    "transcendental_apart": "whether v_exp_f32 overlaps with other vector work",
    "matrix_apart": "whether products issue together with vector work",
    "matrix_extra": "the wait behind a product",
    "atomic_bytes": "the rate of atomic additions",
}

Array = npt.NDArray[np.float64]


class Point(NamedTuple):
    """A timed problem (``suites.Cell``). ``measured``: the measured seconds. ``error``: the
    relative error of measurement and model together. ``seconds``: the modeled seconds, at the low
    and the high end of the constants' ranges. ``changed``: the same after a change of one constant
    (``runtime_sensitivity.Reckoned.changed``)."""

    name: str
    measured: float
    error: float
    seconds: tuple[float, float]
    changed: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


@dataclass(frozen=True)
class Found:
    """The best fit that changes one constant: the constant's value, whether this value is beyond
    its range, and the remaining relative distance between measurement and model (``rms``)."""

    constant: str
    value: float
    range: tuple[float, float]
    unit: str
    beyond: bool
    at_edge: bool
    rms: float
    chi2: float


@dataclass(frozen=True)
class Verdict:
    """The result of ``fit``. ``named``: the constant that best explains the difference, or "" if
    none does. ``rms``: the distance between measurement and model with no constant changed.
    ``between``: where the device lies in the model's range, 0 at ``low`` and 1 at ``high``.
    ``found``: the fits of all constants, the best first."""

    named: str
    alike: tuple[str, ...]
    cells: int
    rms: float
    between: float
    found: tuple[Found, ...]
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def fit(points: Sequence[Point], known: Mapping[str, Constant]) -> Verdict:
    """Return the verdict for ``points``. At least FEWEST points are needed."""
    measured = np.log([one.measured for one in points])
    errors = np.array([one.error for one in points])
    ends = np.log([one.seconds for one in points]).T
    chi2, rms, between, _ = _best(measured, errors, ends[:, None, :])
    found = []
    for name in sorted({name for one in points for name in one.changed}):
        constant = known[name]
        curves = _curves(name, constant, points, ends)
        if np.ptp(curves, axis=1).max() < 1e-9 and not constant.switch:
            continue
        found.append(_found(constant, *_best(measured, errors, curves)))
    found.sort(key=lambda one: one.chi2)
    best = found[0]
    # If even the best fit leaves a larger difference than the errors explain, the errors were too
    # small.
    scale = max(1.0, best.chi2 / max(1, len(points) - 2))
    wrong = (
        chi2 > len(points) and (chi2 - best.chi2) / scale > NAMED and best.chi2 < EXPLAINED * chi2
    )
    alike = tuple(one.constant for one in found[1:] if (one.chi2 - best.chi2) / scale <= APART)
    named = best.constant if wrong and not alike else ""
    sentence = _sentence(found, alike if wrong else None, len(points), rms)
    return Verdict(named, alike if wrong else (), len(points), rms, between, tuple(found), sentence)


def _curves(name: str, constant: Constant, points: Sequence[Point], ends: Array) -> Array:
    """Return logarithms of the seconds: ends × positions of the constant × cells."""
    both = []
    for end in range(2):
        rows = []
        for number, one in enumerate(points):
            own = float(ends[end, number])
            if name not in one.changed:
                rows.append(np.full(2 if constant.switch else len(_POWERS), own))
            elif constant.switch:
                rows.append(np.log(one.changed[name][end]))
            else:
                at = [*(math.log2(factor) for factor in FACTORS), 0.0]
                values = [*np.log(one.changed[name][end]).tolist(), own]
                order = np.argsort(at)
                rows.append(np.interp(_POWERS, np.array(at)[order], np.array(values)[order]))
        both.append(np.array(rows).T)
    return np.array(both)


def _best(measured: Array, errors: Array, curves: Array) -> tuple[float, float, float, int]:
    """Return the least chi squared over curves (ends × positions × cells), its rms, and its
    position."""
    low, high = curves
    mixed = low[None] + _STEPS[:, None, None] * (high - low)[None]
    off = measured - mixed
    chi2 = ((off / errors) ** 2).sum(axis=2)
    step, position = np.unravel_index(int(chi2.argmin()), chi2.shape)
    rms = float(np.sqrt((off[step, position] ** 2).mean()))
    return float(chi2[step, position]), rms, float(_STEPS[step]), int(position)


def _found(constant: Constant, chi2: float, rms: float, between: float, position: int) -> Found:
    low, high = constant.ends
    least, most = min(constant.ends), max(constant.ends)
    if constant.switch:
        value, edge = float(position), False
    else:
        value = low ** (1 - between) * high**between * 2 ** float(_POWERS[position])
        edge = position in (0, len(_POWERS) - 1)
    beyond = not least * 0.97 <= value <= most * 1.03
    return Found(constant.name, value, (least, most), constant.unit, beyond, edge, rms, chi2)


def _sentence(found: Sequence[Found], alike: tuple[str, ...] | None, cells: int, rms: float) -> str:
    best = found[0]
    begin = f"The measured times of {cells} cells differ from the model's by {rms:.1%} (rms)"
    if alike is None and best.chi2 > 2 * cells:
        return (
            f"{begin}, which is more than the model's own error. No single constant explains this. "
            f"The best one is {_told(best)}."
        )
    if alike is None:
        return (
            f"{begin}. No constant is shown to be wrong: the best change of one constant, of "
            f"{_name(best)}, leaves {best.rms:.1%}, which is within the model's own error."
        )
    if alike:
        others = [one for one in found if one.constant in alike]
        listed = "; ".join(_told(one) for one in (best, *others[:4]))
        more = f"; and {len(others) - 4} more" if len(others) > 4 else ""
        return f"{begin}. One of these constants is wrong; all are equally likely: {listed}{more}."
    second = found[1] if len(found) > 1 else None
    next_best = f" The next best explanation is {_told(second)}." if second else ""
    rest = ""
    if best.rms > 2 * FORWARD:
        rest = " This constant alone does not explain the whole difference."
    return f"{begin}. The constant that explains this best is {_told(best)}.{next_best}{rest}"


def _name(one: Found) -> str:
    return WORDS.get(one.constant, one.constant)


def _told(one: Found) -> str:
    """Describe a constant with its range and value, and the distance that remains."""
    least, most = one.range
    scale, unit = {"Hz": (1e9, "GHz"), "B/s": (1e12, "TB/s"), "s": (1e-6, "us")}.get(
        one.unit, (1.0, one.unit)
    )
    if unit in ("us", "GHz", "TB/s"):
        least, most, value = least / scale, most / scale, one.value / scale
    else:
        value = one.value
    span = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    edge = " or beyond" if one.at_edge else ""
    where = "beyond its range" if one.beyond else "inside its range"
    tail = f" {unit}" if unit else ""
    return (
        f"{_name(one)}: {value:.3g}{tail}{edge} instead of the model's {span}{tail} ({where}), "
        f"which leaves a difference of {one.rms:.1%}"
    )
