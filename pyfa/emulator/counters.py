"""Counters of a launch: instructions by class, MFMA clocks, LDS clocks, bytes and segments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyfa.emulator.timing.trace import Trace

CHECKS = ("undefined", "memory", "races", "waits", "barriers", "alignment", "global_races")

# Clocks that a SIMD's matrix unit is busy with one instruction: 4 times the passes that LLVM's
# scheduling model of gfx942 gives it.
MFMA_CLOCKS = {
    "v_mfma_f32_32x32x1_2b_f32": 64, "v_mfma_f32_16x16x1_4b_f32": 32,
    "v_mfma_f32_4x4x1_16b_f32": 8, "v_mfma_f32_32x32x2_f32": 64, "v_mfma_f32_16x16x4_f32": 32,
    "v_mfma_f32_32x32x4_2b_f16": 64, "v_mfma_f32_16x16x4_4b_f16": 32,
    "v_mfma_f32_4x4x4_16b_f16": 8, "v_mfma_f32_32x32x8_f16": 32, "v_mfma_f32_16x16x16_f16": 16,
    "v_mfma_f32_32x32x4_2b_bf16": 64, "v_mfma_f32_16x16x4_4b_bf16": 32,
    "v_mfma_f32_4x4x4_16b_bf16": 8, "v_mfma_f32_32x32x8_bf16": 32,
    "v_mfma_f32_16x16x16_bf16": 16, "v_mfma_i32_32x32x16_i8": 32, "v_mfma_i32_16x16x32_i8": 16,
    **{f"v_mfma_f32_32x32x16_{a}_{b}": 32 for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
    **{f"v_mfma_f32_16x16x32_{a}_{b}": 16 for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}  # fmt: skip


# What the core counts, in its order; ``Counters`` says what each is.
SUMS = (
    "lds_conflict_clocks", "lds_clocks", "lds_read_bytes", "lds_write_bytes", "lds_direct_bytes",
    "load_bytes", "scalar_bytes", "store_bytes", "segments64", "segments128", "barriers",
    "buffer_out_of_range",
)  # fmt: skip


class Totals(ctypes.Structure):
    """The struct ``Totals`` of core/core.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in SUMS),
        ("violations", ctypes.c_uint64 * len(CHECKS)),
    )


@dataclass(frozen=True)
class Counters:
    """Sums over all wavefronts of a launch.

    ``instructions`` counts wavefront instructions by class, ``mnemonics`` by name, ``executed`` by
    address in the code object. ``load_bytes`` and ``store_bytes`` are the bytes of global memory
    that active lanes requested, without those out of range (atomics count as stores).
    ``scalar_bytes`` is the part of ``load_bytes`` that scalar instructions loaded, such as
    arguments and lengths. ``segments64`` and ``segments128`` count the different aligned segments
    of 64 and 128 bytes that each vector memory instruction touches, summed over the instructions.
    ``lds_clocks`` and ``lds_conflict_clocks`` are modeled from addresses (32 banks of 4 bytes,
    groups of lanes as in core/phases.h), not measured. ``lds_read_bytes`` and ``lds_write_bytes``
    (with atomics) are the bytes that active lanes request in the same instructions.
    ``lds_direct_bytes`` is loaded directly into LDS, and has no LDS clocks. ``buffer_out_of_range``
    counts lanes outside a buffer descriptor's range. ``violations`` counts the findings of each
    check with the policy "count". ``barriers`` counts the arrivals of waves at barriers. ``traces``
    are those of the workgroups that the launch recorded.
    """

    wavefronts: int
    instructions: Mapping[str, int]
    mnemonics: Mapping[str, int]
    executed: Mapping[int, int]
    mfma_clocks: Mapping[str, int]
    lds_clocks: int
    lds_conflict_clocks: int
    lds_read_bytes: int
    lds_write_bytes: int
    lds_direct_bytes: int
    load_bytes: int
    scalar_bytes: int
    store_bytes: int
    segments64: int
    segments128: int
    barriers: int
    buffer_out_of_range: int
    violations: Mapping[str, int] = field(default_factory=dict)
    traces: tuple[Trace, ...] = ()

    @property
    def total(self) -> int:
        """Return the number of all wavefront instructions."""
        return sum(self.instructions.values())
