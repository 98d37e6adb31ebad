"""Fit the clock rate of an MI300X to its published hardware counters and times.

    python benchmarks/mi300x_clock.py

``MfmaUtil`` is the share of clocks that the matrix units work, whatever the clock; the counter of
executed bfloat16 operations says how many clocks they work. So a kernel's length in clocks is
measured, and with its time the clock. No model of a kernel takes part. The law that comes out,
Hz · (reference / utilization) ** exponent, is the one that the timing model uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyfa.emulator.timing import constants
from pyfa.emulator.timing.issue import SIMDS

FLOPS_OF_UNIT = 512 * SIMDS  # of a bfloat16 product in a clock: 16,384 of 32 clocks on each SIMD


class Counted(NamedTuple):
    """One kernel on 16 sequences of 16 heads, causal: what was counted, and the median time."""

    kernel: str
    dim: int
    length: int
    utilization: float
    gflop: float
    ms: float
    fit: bool

    @property
    def clocks(self) -> float:
        """That the kernel took, by its counters."""
        units = constants.DEVICE["units"].low
        return self.gflop * 1e9 / (FLOPS_OF_UNIT * units * self.utilization)


# results/raw/counters_v1.csv and sweep_v1.csv of midiareshadi/attn-dsl-bench, May 27 and 28, 2026:
# one MI300X, ROCm 7.2, rocprofv3. CK is what AITER calls for D = 64, AOTriton what PyTorch 2.10's
# scaled_dot_product_attention calls. The Triton kernel is left out: its counters are means over
# the runs of its autotuner. ``fit``: the rows of 2048 and 8192.
COUNTED = tuple(
    Counted(kernel, dim, length, share, gflop, ms, length in (2048, 8192))
    for kernel, dim, rows in (
        ("CK", 64, ((0.19388, 38.6547, 0.21583), (0.27831, 146.0289, 0.56290),
                    (0.35526, 566.9357, 1.84395), (0.39556, 2233.3830, 6.64897),
                    (0.42292, 8864.8125, 24.74392))),
        ("AITER", 128, ((0.42157, 85.8993, 0.29907), (0.50130, 309.2376, 0.87341),
                        (0.64536, 1168.2311, 2.68707), (0.67653, 4535.4855, 9.85640),
                        (0.72087, 17867.0640, 35.48026))),
        ("AOTriton", 64, ((0.12668, 38.6547, 0.25282), (0.22781, 146.0289, 0.64364),
                          (0.22306, 566.9357, 2.40880), (0.25136, 2233.3830, 8.58659),
                          (0.26817, 8864.8125, 32.60241))),
        ("AOTriton", 128, ((0.16261, 77.3094, 0.41835), (0.20701, 292.0578, 1.28059),
                           (0.26470, 1133.8714, 4.27813), (0.29245, 4466.7660, 15.12471),
                           (0.31361, 17729.6250, 57.28360))),
    )
    for length, (share, gflop, ms) in zip((1024, 2048, 4096, 8192, 16384), rows, strict=True)
)  # fmt: skip


@dataclass(frozen=True)
class Law:
    """``outside``: seconds in each time that are not the kernel's. Its harness waits for the GPU
    before the first event, so that what Python takes to launch is inside."""

    hz: float
    exponent: float
    outside: float

    def clock(self, utilization: float) -> float:
        return self.hz * (constants.REFERENCE / utilization) ** self.exponent

    def errors(self, rows: tuple[Counted, ...]) -> list[float]:
        """The logarithm of each row's time by the law over its measured one."""
        return [
            math.log((row.clocks / self.clock(row.utilization) + self.outside) * 1e3 / row.ms)
            for row in rows
        ]


def fitted(rows: tuple[Counted, ...]) -> Law:
    """The law with the least squares over ``rows``; ``outside`` in steps of 5 µs."""
    best: tuple[float, Law] | None = None
    for step in range(31):
        outside = step * 5e-6
        hz = np.log([row.clocks / (row.ms * 1e-3 - outside) for row in rows])
        busy = np.log([constants.REFERENCE / row.utilization for row in rows])
        exponent, level = np.polyfit(busy, hz, 1)
        law = Law(float(np.exp(level)), float(exponent), outside)
        square = float(np.square(law.errors(rows)).mean())
        if best is None or square < best[0]:
            best = square, law
    assert best is not None
    return best[1]


def law() -> Law:
    """Of the rows marked ``fit``."""
    return fitted(tuple(row for row in COUNTED if row.fit))


def main() -> None:
    found = law()
    print(f"{found.hz / 1e9:.3f} GHz at a utilization of {constants.REFERENCE}, exponent "
          f"{found.exponent:.3f}, {found.outside * 1e6:.0f} us outside")  # fmt: skip
    for row, error in zip(COUNTED, found.errors(COUNTED), strict=True):
        ghz = row.clocks / row.ms / 1e6
        print(f"{row.kernel:9s} {row.dim:4d} {row.length:6d} {'fit  ' if row.fit else 'blind'} "
              f"{row.utilization:.3f} {ghz:.3f} GHz {error:+.1%}")  # fmt: skip
    for name, chosen in (("fit", True), ("blind", False)):
        rows = tuple(row for row in COUNTED if row.fit == chosen)
        mean = math.sqrt(np.square(found.errors(rows)).mean())
        print(f"{name}: {len(rows)} rows, {mean:.1%} root mean square")


if __name__ == "__main__":
    main()
