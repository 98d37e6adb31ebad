"""On-chip limits: rows per block by two rules, and the number of blocks that a compute unit holds
at once."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arch import Arch

REGISTER_BYTES = 4
# Registers are given to a wavefront in steps of this many a lane (LLVM's AMDGPU guide, VGPR
# granule; CUDA's occupancy calculator, 256 registers of a warp).
_GRANULE = 8


def rows_of_three_tiles(sram_bytes: int, head_dim: int, size: int = 4) -> int:
    """Return M = SRAM / (3·d·size): one tile each of Q, K and V (common notes on FlashAttention use
    ``size`` = 4).

    The rule leaves out S and O, which attention also keeps on chip.
    """
    return sram_bytes // (3 * head_dim * size)


def rows_with_scores(sram_bytes: int, head_dim: int, size: int = 4) -> int:
    """Return the largest M for which Q, K, V and O of M × d, and S of M × M, fit: 4·d·M + M²
    elements."""
    elements = sram_bytes // size
    rows = int(math.sqrt(4 * head_dim * head_dim + elements)) - 2 * head_dim
    # The root is rounded: one off at most.
    return max(m for m in (rows - 1, rows, rows + 1) if m * (4 * head_dim + m) <= elements)


class Occupancy(NamedTuple):
    """Workgroups that a compute unit holds at once, and the resource that limits them. ``share``:
    their wavefronts, as a fraction of the most that a compute unit can hold."""

    workgroups: int
    share: float
    limited_by: str


def occupancy(arch: Arch, shared_bytes: int, threads: int, registers: int = 0) -> Occupancy:
    """Return the occupancy for workgroups of ``threads`` with ``shared_bytes`` of LDS or shared
    memory each.

    ``registers``: per lane; 0 if unknown, which makes the result an upper bound. An NVIDIA block
    takes 1 KiB of shared memory beyond its own (CUDA C++ programming guide, from 8.0 on).
    """
    waves = -(-threads // arch.lanes)
    reserved = 1024 if arch.vendor == "nvidia" else 0
    limits = {"wavefronts": arch.waves // waves}
    if shared_bytes:
        limits["shared memory"] = arch.shared_bytes // (shared_bytes + reserved)
    if registers:
        wave_bytes = -(-registers // _GRANULE) * _GRANULE * REGISTER_BYTES * arch.lanes
        # A wavefront's registers are all of one SIMD, of which a unit has four.
        per_simd = arch.register_bytes // arch.simds // wave_bytes
        limits["registers"] = min(per_simd * arch.simds, arch.waves) // waves
    if shared_bytes > arch.shared_bytes_per_block:
        return Occupancy(0, 0.0, "shared memory")
    by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[by], limits[by] * waves / arch.waves, by)
