"""Instruction sets and their limits, one row each, with the document that each row comes from.

An arch says what one compute unit (AMD: CU, NVIDIA: SM) can do; how many of them a GPU has, how
fast they run and what feeds them is in ``device.py``, since one arch covers very different devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Arch:
    """Limits of one compute unit.

    ``lanes``: lanes of a wavefront or warp. ``shared_bytes``: LDS or shared memory of a compute
    unit; ``shared_bytes_per_block`` what one workgroup may take of it. ``register_bytes``: vector
    register file of a compute unit. ``registers_per_lane``: the most 32-bit registers that one lane
    can own. ``matrix_rates``: dense matrix FLOP per clock and compute unit by input dtype,
    accumulating in float32 (a multiply-add counts two).
    """

    name: str
    vendor: str
    lanes: int
    shared_bytes: int
    shared_bytes_per_block: int
    register_bytes: int
    registers_per_lane: int
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
        MappingProxyType(rates),
        source,
    )


def _halves(rate: int, fp8: int | None = None) -> dict[str, int]:
    rates = {"float16": rate, "bfloat16": rate}
    if fp8 is not None:
        rates["float8"] = fp8
    return rates


ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        row.name: row
        for row in (
            # 512 registers a lane are 256 VGPRs and 256 AGPRs; 4 SIMDs of 128 KiB each.
            _arch("gfx90a", "amd", 64, 64, 64, 512, 512, _halves(1024),
                  "AMD CDNA 2 white paper: 383 TFLOP/s fp16 on 220 CUs at 1.7 GHz"),
            _arch("gfx942", "amd", 64, 64, 64, 512, 512, _halves(2048, 4096),
                  "AMD CDNA 3 white paper: 1307 TFLOP/s fp16 on 304 CUs at 2.1 GHz"),
            _arch("gfx950", "amd", 64, 160, 160, 512, 512, _halves(4096, 8192),
                  "AMD CDNA 4 white paper: 2.5 PFLOP/s fp16 on 256 CUs at 2.4 GHz"),
            # LDS is 128 KiB per WGP of two CUs, of which one workgroup may take 64 KiB.
            _arch("gfx1100", "amd", 32, 64, 64, 384, 256, _halves(512),
                  "AMD RDNA 3 ISA guide; 122.8 TFLOP/s fp16 on 96 CUs at 2.5 GHz (RX 7900 XTX)"),
            _arch("sm_80", "nvidia", 32, 164, 163, 256, 255, _halves(2048),
                  "NVIDIA A100 white paper; CUDA C++ programming guide, compute capability 8.0"),
            # GeForce cards run at half this rate when they accumulate in float32: device.py.
            _arch("sm_86", "nvidia", 32, 100, 99, 256, 255, _halves(1024),
                  "NVIDIA GA102 white paper; CUDA C++ programming guide, compute capability 8.6"),
            _arch("sm_89", "nvidia", 32, 100, 99, 256, 255, _halves(1024, 2048),
                  "NVIDIA Ada white paper; CUDA C++ programming guide, compute capability 8.9"),
            _arch("sm_90a", "nvidia", 32, 228, 227, 256, 255, _halves(4096, 8192),
                  "NVIDIA H100 white paper; CUDA C++ programming guide, compute capability 9.0"),
            _arch("sm_100", "nvidia", 32, 228, 227, 256, 255, _halves(8192, 16384),
                  "NVIDIA Blackwell brief: 2.25 PFLOP/s fp16 on 148 SMs; programming guide, 10.0"),
            _arch("sm_120", "nvidia", 32, 100, 99, 256, 255, _halves(1024, 2048),
                  "NVIDIA RTX Blackwell white paper; CUDA C++ programming guide, 12.0"),
        )
    }
)  # fmt: skip
