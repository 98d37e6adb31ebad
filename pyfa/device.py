"""Facts of one GPU: read from the one that is there, or looked up by name for one that is not."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from .arch import ARCHS, Arch

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class Device:
    """One device as PyTorch shows it (an MI250X counts as two, an MI300X in CPX mode as eight).

    ``units``: CUs or SMs; 0 for a CPU. ``dies``: XCDs, each with its own L2; 1 elsewhere.
    ``bandwidth``: bytes per second of device memory. ``l2_bytes`` is per die. ``cache_bytes``: a
    last-level cache behind the L2 (AMD's Infinity Cache), 0 where there is none. ``clock``: Hz, the
    vendor's peak. ``matrix_scale``: GeForce halves the matrix rate when accumulating in float32.
    A figure that nobody could tell is 0.
    """

    name: str
    arch: str
    units: int
    dies: int
    bandwidth: float
    memory_bytes: int
    l2_bytes: int
    cache_bytes: int
    clock: float
    matrix_scale: float = 1.0

    @property
    def vendor(self) -> str:
        """``amd``, ``nvidia``, ``cpu``, or ``unknown`` for an arch that has no row."""
        if self.arch == "cpu":
            return "cpu"
        row = ARCHS.get(self.arch)
        if row is not None:
            return row.vendor
        prefixes = {"gfx": "amd", "sm_": "nvidia"}
        return prefixes.get(self.arch[:3], "unknown")

    @property
    def limits(self) -> Arch | None:
        """The row of this device's arch, None where there is none."""
        return ARCHS.get(self.arch)

    def matrix_flops(self, dtype: str) -> float:
        """Peak dense matrix FLOP per second for inputs of ``dtype``; 0 where unknown.

        The vendor's peak, which no card holds under load. All float8 formats run at one rate.
        """
        rates = self.limits.matrix_rates if self.limits else {}
        dtype = "float8" if dtype.startswith("float8") else dtype
        # GeForce halves the rate of its matrix units, not that of the vector units.
        scale = 1.0 if dtype == "float32" else self.matrix_scale
        return rates.get(dtype, 0) * self.units * self.clock * scale

    @property
    def shared_bandwidth(self) -> float:
        """Bytes per second of all LDS or shared memory at the vendor's clock; 0 where unknown."""
        per_clock = self.limits.shared_bytes_per_clock if self.limits else 0
        return per_clock * self.units * self.clock


def _gpu(
    name: str,
    arch: str,
    units: int,
    bandwidth_gb: float,
    memory_gib: int,
    l2_mib: int,
    mhz: int,
    dies: int = 1,
    cache_mib: int = 0,
    matrix_scale: float = 1.0,
) -> Device:
    return Device(
        name,
        arch,
        units,
        dies,
        bandwidth_gb * 1e9,
        memory_gib * GIB,
        l2_mib * MIB,
        cache_mib * MIB,
        mhz * 1e6,
        matrix_scale,
    )


# Sources: the vendors' data sheets and architecture white papers. NVIDIA's clock is the one behind
# the data sheet's matrix rate. A CPX partition gets an eighth of the card's memory system.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _gpu("MI300X", "gfx942", 304, 5300, 192, 4, 2100, dies=8, cache_mib=256),
            _gpu("MI325X", "gfx942", 304, 6000, 256, 4, 2100, dies=8, cache_mib=256),
            _gpu("MI300X-CPX", "gfx942", 38, 662.5, 24, 4, 2100, cache_mib=32),
            _gpu("MI250X", "gfx90a", 110, 1638.4, 64, 8, 1700),
            _gpu("A100-80GB", "sm_80", 108, 2039, 80, 40, 1410),
            _gpu("RTX4070", "sm_89", 46, 504, 12, 36, 2475, matrix_scale=0.5),
            _gpu("RTX4090", "sm_89", 128, 1008, 24, 72, 2520, matrix_scale=0.5),
            _gpu("L40S", "sm_89", 142, 864, 48, 96, 2520),
            _gpu("H100", "sm_90a", 132, 3350, 80, 50, 1830),
            _gpu("H200", "sm_90a", 132, 4800, 141, 50, 1830),
        )
    }
)

CPU = Device(platform.processor() or platform.machine(), "cpu", 0, 1, 0.0, 0, 0, 0, 0.0)


def by_name(name: str) -> Device:
    """The device called ``name`` (upper and lower case alike). ``ValueError`` if there is none."""
    for key, device in DEVICES.items():
        if key.lower() == name.lower():
            return device
    raise ValueError(f"device: expected one of {', '.join(DEVICES)}; got {name!r}")


def of(device: torch.device) -> Device:
    """The facts of a device that is there: a GPU as torch shows it, otherwise the CPU."""
    if device.type != "cuda":
        return CPU
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _read(index)


@functools.cache
def _read(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        arch = {"sm_90": "sm_90a"}.get(arch, arch)
    units = properties.multi_processor_count
    # torch tells neither the memory's speed nor the dies on every version: take those of the named
    # device of the same arch and size, and say 0 (unknown) rather than guess for any other.
    alike = [d for d in DEVICES.values() if d.arch == arch and d.units == units]
    alike = [d for d in alike if d.name.split("-")[0] in properties.name] or alike
    known = alike[0] if alike else Device("", arch, units, 1, 0.0, 0, 0, 0, 0.0)
    return replace(
        known,
        name=properties.name,
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", known.l2_bytes),
        clock=getattr(properties, "clock_rate", 0) * 1e3 or known.clock,
    )
