"""Instruction sets and their limits, one row each, with the document that each row comes from.

An arch describes one compute unit (AMD: CU, NVIDIA: SM). The number of units, their clock and the
memory of a GPU are in ``device.py``, because one arch covers very different devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Arch:
    """Limits of one compute unit.

    ``lanes``: lanes of a wavefront or warp. ``shared_bytes``: LDS or shared memory of a compute
    unit; ``shared_bytes_per_block``: the most that one workgroup may use. ``register_bytes``:
    vector register file of a compute unit. ``registers_per_lane``: the most 32-bit registers that
    one lane can own. ``waves``: wavefronts or warps that are resident at once, on ``simds``
    schedulers. ``shared_bytes_per_clock``: LDS or shared memory read per clock, 0 if unknown.
    ``matrix_rates``: dense matrix FLOP per clock and compute unit by input dtype, accumulating in
    float32 (a multiply-add counts as two). For float32 it is the rate of the vector units, or of
    matrix units with IEEE float32.
    """

    name: str
    vendor: str
    lanes: int
    shared_bytes: int
    shared_bytes_per_block: int
    register_bytes: int
    registers_per_lane: int
    waves: int
    simds: int
    shared_bytes_per_clock: int
    matrix_rates: Mapping[str, int]
    source: str


def _arch(
    name: str,
    vendor: str,
    lanes: int,
    shared_kib: int,
    block_kib: int,
    register_kib: int,
    registers: int,
    waves: int,
    shared_per_clock: int,
    rates: dict[str, int],
    source: str,
) -> Arch:
    return Arch(
        name,
        vendor,
        lanes,
        shared_kib * 1024,
        block_kib * 1024,
        register_kib * 1024,
        registers,
        waves,
        _SIMDS.get(name, 4),
        shared_per_clock,
        MappingProxyType(rates),
        source,
    )


# RDNA's CU has two SIMDs of 32 lanes; all others here have four.
_SIMDS = {"gfx1100": 2}


def _rates(rate: int, float32: int, fp8: int | None = None) -> dict[str, int]:
    rates = {"float16": rate, "bfloat16": rate, "float32": float32}
    if fp8 is not None:
        rates["float8"] = fp8
    return rates


ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        row.name: row
        for row in (
            # Wavefronts: LLVM's AMDGPU guide has 8 a SIMD on CDNA 2 and later, 16 on RDNA 3. Warps:
            # CUDA C++ programming guide, "technical specifications per compute capability". Shared
            # memory has 32 banks of 4 bytes on all of NVIDIA's and on CDNA 2 and 3; CDNA 4's white
            # paper doubles LDS bandwidth. float32: the same white papers' vector rate, for
            # CDNA 2 and 3 that of the matrix units, which is IEEE.
            # 512 registers a lane are 256 VGPRs and 256 AGPRs; 4 SIMDs of 128 KiB each.
            _arch("gfx90a", "amd", 64, 64, 64, 512, 512, 32, 128, _rates(1024, 256),
                  "AMD CDNA 2 white paper: 383 TFLOP/s fp16 on 220 CUs at 1.7 GHz"),
            _arch("gfx942", "amd", 64, 64, 64, 512, 512, 32, 128, _rates(2048, 256, 4096),
                  "AMD CDNA 3 white paper: 1307 TFLOP/s fp16 on 304 CUs at 2.1 GHz"),
            _arch("gfx950", "amd", 64, 160, 160, 512, 512, 32, 256, _rates(4096, 256, 8192),
                  "AMD CDNA 4 white paper: 2.5 PFLOP/s fp16 on 256 CUs at 2.4 GHz"),
            # LDS is 128 KiB per WGP of two CUs, of which one workgroup may take 64 KiB.
            _arch("gfx1100", "amd", 32, 64, 64, 384, 256, 32, 0, _rates(512, 256),
                  "AMD RDNA 3 ISA guide; 122.8 TFLOP/s fp16 on 96 CUs at 2.5 GHz (RX 7900 XTX)"),
            _arch("sm_80", "nvidia", 32, 164, 163, 256, 255, 64, 128, _rates(2048, 128),
                  "NVIDIA A100 white paper; CUDA C++ programming guide, compute capability 8.0"),
            # GeForce cards run at half this rate when they accumulate in float32: device.py.
            _arch("sm_86", "nvidia", 32, 100, 99, 256, 255, 48, 128, _rates(1024, 256),
                  "NVIDIA GA102 white paper; CUDA C++ programming guide, compute capability 8.6"),
            _arch("sm_89", "nvidia", 32, 100, 99, 256, 255, 48, 128, _rates(1024, 256, 2048),
                  "NVIDIA Ada white paper; CUDA C++ programming guide, compute capability 8.9"),
            _arch("sm_90a", "nvidia", 32, 228, 227, 256, 255, 64, 128, _rates(4096, 256, 8192),
                  "NVIDIA H100 white paper; CUDA C++ programming guide, compute capability 9.0"),
            _arch("sm_100", "nvidia", 32, 228, 227, 256, 255, 64, 128, _rates(8192, 256, 16384),
                  "NVIDIA Blackwell brief: 2.25 PFLOP/s fp16 on 148 SMs; programming guide, 10.0"),
            _arch("sm_120", "nvidia", 32, 100, 99, 256, 255, 48, 128, _rates(1024, 256, 2048),
                  "NVIDIA RTX Blackwell white paper; CUDA C++ programming guide, 12.0"),
        )
    }
)  # fmt: skip
