"""Every number of the timing model, with its source.

Results are given for two ends of each number: ``low`` makes a kernel slower, ``high`` faster. If
they are equal, the number comes from a document or a published measurement. If they differ, no
measurement is published, and the number is an assumption with a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Constant:
    """One number: its two ends, its unit and its source."""

    low: float
    high: float
    unit: str
    source: str


_LLVM = "LLVM's scheduling model and hazard recognizer of gfx942"
_ISA = "AMD Instinct MI300 ISA reference"
_PAPER = "AMD CDNA 3 white paper"
_PROFILER = "ROCm Compute Profiler's page on the compute unit and its pipelines"

# The constants of one compute unit, passed to core/timing.c in the order of its `Parameters`.
ISSUE: Mapping[str, Constant] = MappingProxyType(
    {
        "lds_latency": Constant(128, 100, "clk", "fitted within 64 to 128"),
        "lds_queue": Constant(64, 64, "clk", "assumption: most work that can wait in LDS"),
        "lds_direct_bytes": Constant(
            64, 128, "B/clk", "assumption: rate at which direct loads fill LDS"
        ),
        "l1_latency": Constant(140, 116, "clk", "assumption: published for L1 hits on CDNA GPUs"),
        "l2_latency": Constant(700, 400, "clk", "assumption: L2 hit to Infinity Cache hit, loaded"),
        "l2_bytes": Constant(
            54, 64, "B/clk", f"{_PAPER}: 2048 B/clk per XCD over 38 CUs; 64 B per CU"
        ),
        "l1_queue": Constant(256, 256, "clk", "assumption: most work that can wait in L1"),
        "store_latency": Constant(700, 400, "clk", "assumption: equal to a load's"),
        "store_bytes": Constant(64, 64, "B/clk", f"{_PAPER}: L1 to L2"),
        "atomic_latency": Constant(1000, 500, "clk", "assumption"),
        "atomic_bytes": Constant(
            16, 64, "B/clk", "assumption: rate of updates in L2, all CUs together"
        ),
        "scalar_latency": Constant(200, 200, "clk", "assumption: a hit in the scalar cache"),
        "barrier": Constant(96, 64, "clk", "fitted within 32 to 96: time from the last arrival"),
        "branch": Constant(
            20, 12, "clk", "assumption: a taken branch refills the instruction buffer"
        ),
        "fetch_bytes": Constant(32, 32, "B/quantum", f"{_PROFILER}: 32 B for one SIMD at a time"),
        "transcendental": Constant(
            16, 16, "clk", f"{_ISA}: quarter rate; slots of AITER's kernels agree"
        ),
        "transcendental_apart": Constant(
            0, 1, "", "assumption: 1 if v_exp_f32 overlaps with other vector work"
        ),
        "matrix_apart": Constant(
            1, 1, "", "fitted, 0 or 1: 1 if a product issues together with vector work"
        ),
        "matrix_extra": Constant(12, 12, "clk", f"{_LLVM}: three wait states after the passes"),
        "transcendental_extra": Constant(4, 4, "clk", f"{_LLVM}: one wait state"),
        "l1_lines": Constant(
            256, 256, "lines", f"{_PAPER}: 32 KB of 128 B; 64 ways (ROCm Compute Profiler)"
        ),
    }
)

# The constants of the device.
DEVICE: Mapping[str, Constant] = MappingProxyType(
    {
        "units": Constant(304, 304, "CUs", f"{_PAPER}: 38 on each of 8 dies"),
        "dies": Constant(
            8, 8, "XCDs", f"{_PAPER}; workgroups go to them round-robin (arXiv 2511.02132)"
        ),
        "engines": Constant(
            4,
            1,
            "",
            "assumption. 4: the 4 shader engines of a die (rocminfo: 32 in all) take workgroups "
            "strictly in turn, as AMD's patent US 11941723 says of older devices. 1: any engine "
            "with room takes the next workgroup",
        ),
        "peak_hz": Constant(2.1e9, 2.1e9, "Hz", f"{_PAPER}"),
        "wave_gap": Constant(
            16, 4, "clk", "assumption: time between the wavefronts of a starting workgroup"
        ),
        "dispatch": Constant(
            1000, 300, "clk", "assumption: time from a workgroup's end to the next one's start"
        ),
        "launch_seconds": Constant(
            6e-6, 3e-6, "s", "assumption: time outside the kernel, as events measure it"
        ),
        "hbm_bytes": Constant(4.0e12, 4.3e12, "B/s", "assumption: 75 to 81 % of 5.3 TB/s"),
        "l2_bytes_of_die": Constant(2048, 2048, "B/clk", f"{_PAPER}: 16 channels of 128 B"),
    }
)

# The clock that 750 W leave: ``CLOCK_HZ`` at a matrix utilization of ``REFERENCE``, falling with a
# power of it, never above the peak. The power is measured: counters of one MI300X under kernels of
# three authors, utilizations from 0.13 to 0.72, follow it to 3 %. The Hz are fitted by
# benchmarks/mi300x_model.py to published forward kernels of another; AMD's blog "Measuring
# Max-Achievable FLOPs", part 2, gives 1.115 to 1.23 GHz at about 0.9 for matrix products alone.
# The machines behind the figures differ: ``MACHINES``.
_FITTED = "fitted: benchmarks/results/mi300x_model.json"
REFERENCE = 0.75
CLOCK_HZ = Constant(1.26e9, 1.18e9, "Hz", _FITTED)
CLOCK_EXPONENT = Constant(
    0.45, 0.45, "", "counters and times of attn-dsl-bench's MI300X: benchmarks/mi300x_clock.py"
)
MACHINES = Constant(0.89, 1.06, "", f"{_FITTED}, the slowest and the fastest of three")


def ends() -> tuple[str, str]:
    """Return the names of the two ends."""
    return ("low", "high")


def of(table: Mapping[str, Constant], end: str) -> dict[str, float]:
    """Return every number of ``table`` at one end, ``low`` or ``high``."""
    return {name: getattr(constant, end) for name, constant in table.items()}


def clock(utilization: float, end: str, law: tuple[float, float] | None = None) -> float:
    """Return the Hz at which the device runs while its matrix units are busy for ``utilization`` of
    the time.

    ``law``: Hz at ``REFERENCE`` and the exponent. By default, the law that was fitted to the
    model's utilizations at ``end``, scaled to the slowest (``low``) or fastest (``high``) known
    machine.
    """
    peak = DEVICE["peak_hz"].low
    if utilization <= 0:
        return peak
    if law is None:
        hz, exponent = getattr(CLOCK_HZ, end), getattr(CLOCK_EXPONENT, end)
        law = hz * getattr(MACHINES, end), exponent
    return float(min(peak, law[0] * (REFERENCE / utilization) ** law[1]))
