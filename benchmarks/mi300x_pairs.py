"""List published times of gfx942 attention kernels, for ``mi300x_model.py``.

Each is one kernel on one shape. ``machine`` is whose measurement it is: clocks, tools and drivers
differ between them by about a tenth. ``fit``: may be used to choose the clock; the others are
blind.
"""

from __future__ import annotations

from typing import NamedTuple

from mi300x_clock import COUNTED


class Pair(NamedTuple):
    """(batch, query heads, key heads, length, causal) of ``kernel``, and TFLOP/s as published."""

    kernel: str
    batch: int
    heads: int
    heads_k: int
    length: int
    causal: bool
    tflops: float
    machine: str
    fit: bool
    dim: int = 128

    @property
    def backward(self) -> bool:
        return "backward" in self.kernel

    @property
    def flops(self) -> float:
        """As all of them count: 4 · B · H · S² · D, half of it causal, 2.5 times backward."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.dim
        return whole * (0.5 if self.causal else 1) * (2.5 if self.backward else 1)


def _milliseconds(kernel: str, batch: int, heads: int, length: int, ms: float, fit: bool) -> Pair:
    one = Pair(kernel, batch, heads, heads, length, False, 0.0, "MoonMath", fit)
    return one._replace(tflops=one.flops / ms / 1e9)


# The README of moonmath-ai/amd-kernels: its own kernel and AITER's in one session, milliseconds.
_MOONMATH = [
    _milliseconds(f"{family} {rounding}", batch, heads, length, ms, fit)
    for batch, heads, length, fit, times in (
        (2, 24, 8192, False, ((2.983, 3.022, 3.083), (3.303, 3.605, 3.792))),
        (2, 24, 16384, True, ((11.385, 11.479, 11.670), (12.629, 13.801, 14.691))),
        (2, 16, 65536, False, ((114.665, 115.550, 117.612), (121.668, 130.278, 136.301))),
        (1, 16, 131072, True, ((226.152, 228.475, 232.517), (239.587, 258.092, 269.278))),
    )
    for family, row in zip(("MoonMath", "AITER forward"), times, strict=True)
    for rounding, ms in zip(("rtz", "rtna", "rtne"), row, strict=True)
]
# The table in op_tests/cpp/mha/README.md of ROCm/aiter. Forward rounds as its tool does by default
# (rtna), backward as its command lines say (rtz).
_AITER = [
    Pair("AITER forward rtna", batch, heads, 8, length, False, tflops, "AITER", fit)
    for batch, heads, length, tflops, fit in (
        (1, 32, 1024, 338.07, False),
        (1, 32, 4096, 527.73, False),
        (4, 64, 2048, 554.80, True),
        (4, 64, 8192, 592.16, True),
        (8, 64, 10240, 571.39, False),
        (1, 64, 16384, 547.78, False),
    )
]
_AITER += [
    Pair("AITER forward causal rtna", batch, heads, 8, length, True, tflops, "AITER", fit)
    for batch, heads, length, tflops, fit in (
        (8, 64, 2048, 452.03, False),
        (8, 64, 8192, 550.67, True),
        (4, 64, 10240, 557.475, False),
    )
]
_AITER += [
    Pair(f"AITER backward {way} rtz", batch, heads, 8, length, False, tflops, "AITER", False)
    for batch, heads, length, a16, a32 in (
        (8, 64, 10240, 550.19, 480.35),
        (1, 32, 10240, 536.48, 491.28),
        (4, 64, 4096, 510.76, 456.78),
        (8, 64, 2048, 479.74, 430.07),
    )
    for way, tflops in (("a16", a16), ("a32", a32))
]
# results/raw/sweep_v1.csv of midiareshadi/attn-dsl-bench: AITER's default, causal, 16 heads, batch
# 16.
_SWEEP = [
    Pair("AITER forward causal rtna", 16, 16, 16, length, True, tflops, "attn-dsl-bench", fit)
    for length, tflops, fit in (
        (2048, 314.0, True), (4096, 409.0, False), (8192, 446.0, True), (16384, 494.0, False),
    )
]  # fmt: skip
# The same file: HipKittens' triton_baseline_v02.py, by the Triton of ROCm 7.2.
_SWEEP += [
    Pair(f"Triton forward causal {dim}", 16, 16, 16, length, True, rate, "attn-dsl-bench",
         False, dim)
    for dim, length, rate in (
        (128, 4096, 260.0), (128, 8192, 317.0), (128, 16384, 364.0),
        (64, 4096, 231.0), (64, 8192, 271.0), (64, 16384, 301.0),
    )
]  # fmt: skip
# The same file: PyTorch 2.10's scaled_dot_product_attention, which calls AOTriton's forward, and
# AITER's for D = 64, which is CK's.
_SWEEP += [
    Pair(f"{name} forward causal {dim}", 16, 16, 16, length, True, rate, "attn-dsl-bench",
         length in (2048, 8192), dim)
    for name, dim, rates in (
        ("AOTriton", 128, (164.3, 214.7, 257.0, 290.8, 307.1)),
        ("AOTriton", 64, (135.9, 213.5, 228.2, 256.1, 269.8)),
        ("CK", 64, (159.2, 244.2, 298.1, 330.7, 355.5)),
    )
    for length, rate in zip((1024, 2048, 4096, 8192, 16384), rates, strict=True)
]  # fmt: skip
PAIRS: tuple[Pair, ...] = (*_MOONMATH, *_AITER, *_SWEEP)
# counters_v1.csv of the same: MfmaUtil by kernel and length, never fitted to, and the share of what
# was counted that the timed kernel has. The rest are runs of Triton's autotuner.
MFMA_UTIL = {
    **{("AITER forward causal rtna", length): (share, 1.0)
       for length, share in ((2048, 0.501), (4096, 0.645), (8192, 0.677), (16384, 0.721))},
    **{(f"Triton forward causal {dim}", length): (share, 8 / runs)
       for dim, length, share, runs in (
           (128, 4096, 0.226, 878), (128, 8192, 0.305, 278), (128, 16384, 0.340, 98),
           (64, 4096, 0.215, 1838), (64, 8192, 0.275, 578), (64, 16384, 0.318, 178))},
    **{(f"{row.kernel} forward causal {row.dim}", row.length): (row.utilization, 1.0)
       for row in COUNTED if row.kernel in ("AOTriton", "CK")},
}  # fmt: skip
