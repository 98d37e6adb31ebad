"""Facts of one GPU: read from the one that is there, or looked up by name for one that is not."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from . import topology
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


def _partition(card: Device, name: str, dies: int) -> Device:
    """What a card shows in a partition mode that gives a device ``dies`` of its XCDs.

    The memory system is taken as shared evenly, whatever its own mode is.
    """
    share = dies / card.dies
    return replace(
        card,
        name=name,
        units=card.units * dies // card.dies,
        dies=dies,
        bandwidth=card.bandwidth * share,
        memory_bytes=int(card.memory_bytes * share),
        cache_bytes=int(card.cache_bytes * share),
    )


_MI300X = _gpu("MI300X", "gfx942", 304, 5300, 192, 4, 2100, dies=8, cache_mib=256)

# Sources: the vendors' data sheets and architecture white papers. NVIDIA's clock is the one behind
# the data sheet's matrix rate. MI308X: 4 XCDs of 20 CUs, as Linux's driver tells (num_xcc).
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _MI300X,
            _gpu("MI325X", "gfx942", 304, 6000, 256, 4, 2100, dies=8, cache_mib=256),
            _partition(_MI300X, "MI300X-DPX", 4),
            _partition(_MI300X, "MI300X-QPX", 2),
            _partition(_MI300X, "MI300X-CPX", 1),
            _gpu("MI300A", "gfx942", 228, 5300, 128, 4, 2100, dies=6, cache_mib=256),
            _gpu("MI308X", "gfx942", 80, 5300, 192, 4, 1420, dies=4, cache_mib=256),
            _gpu("MI250X", "gfx90a", 110, 1638.4, 64, 8, 1700),
            _gpu("MI355X", "gfx950", 256, 8000, 288, 4, 2400, dies=8, cache_mib=256),
            _gpu("RX7900XTX", "gfx1100", 96, 960, 24, 6, 2500, cache_mib=96),
            _gpu("A100-80GB", "sm_80", 108, 2039, 80, 40, 1410),
            _gpu("RTX3090", "sm_86", 82, 936, 24, 6, 1695, matrix_scale=0.5),
            _gpu("RTX4070", "sm_89", 46, 504, 12, 36, 2475, matrix_scale=0.5),
            _gpu("RTX4090", "sm_89", 128, 1008, 24, 72, 2520, matrix_scale=0.5),
            _gpu("L40S", "sm_89", 142, 864, 48, 96, 2520),
            _gpu("H100", "sm_90a", 132, 3350, 80, 50, 1830),
            _gpu("H200", "sm_90a", 132, 4800, 141, 50, 1830),
            _gpu("B200", "sm_100", 148, 8000, 180, 126, 1856),
            _gpu("RTX5090", "sm_120", 170, 1792, 32, 96, 2407, matrix_scale=0.5),
        )
    }
)

# Cards that people ask for, older than any that a backend has kernels for.
_OLD = {
    **dict.fromkeys(
        ("v100", "t4", "p100", "2080", "2080ti"), "the cuda backend needs sm_80 or newer"
    ),
    **dict.fromkeys(("mi50", "mi60", "mi100"), "the hip backend needs gfx942"),
}

CPU = Device(platform.processor() or platform.machine(), "cpu", 0, 1, 0.0, 0, 0, 0, 0.0)


def by_name(name: str) -> Device:
    """The device called ``name``; case, spaces and the vendor's name do not matter.

    ``ValueError`` if there is none, with the reason for cards that no backend has kernels for.
    """
    if not isinstance(name, str):
        raise TypeError(f"device: expected a name; got {type(name).__name__}")
    wanted = _plain(name)
    for key, device in DEVICES.items():
        if _plain(key) == wanted or _plain(key.split("-")[0]) == wanted:
            return device
    if why := _OLD.get(wanted):
        raise ValueError(f"device: {name} is too old: {why}; triton and torch are untested there")
    raise ValueError(f"device: expected one of {', '.join(DEVICES)}; got {name!r}")


def _plain(name: str) -> str:
    words = ("nvidia", "geforce", "amd", "instinct", "radeon", "rtx", "rx")
    text = re.sub("|".join(words), "", name.lower())
    return re.sub(r"[\s_-]", "", text)


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
    known = _known(properties.name, arch, properties.multi_processor_count)
    return replace(
        known,
        name=properties.name,
        dies=_dies(properties) or known.dies,
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", known.l2_bytes),
        clock=getattr(properties, "clock_rate", 0) * 1e3 or known.clock,
    )


def _known(name: str, arch: str, units: int) -> Device:
    """What torch does not tell on every version: the memory's speed, the dies.

    Those of the named device of the same arch and size, or of a part of one, and 0 (unknown) rather
    than a guess for any other.
    """
    cards = [d for d in DEVICES.values() if d.arch == arch]
    named = [d for d in cards if d.name.split("-")[0] in name]
    parts = [
        _partition(card, card.name, dies)
        for card in named
        for dies in range(card.dies, 0, -1)
        if card.dies % dies == 0
    ]
    for device in (*named, *parts, *cards):
        if device.units == units:
            return device
    # An XCD of gfx942 has 38 CUs switched on, but an MI308X's.
    dies = units // 38 if arch == "gfx942" and units % 38 == 0 else 1
    return Device("", arch, units, dies, 0.0, 0, 0, 0, 0.0)


def _dies(properties: Any) -> int | None:
    """XCDs as Linux's driver tells them; None where it does not, or torch not which GPU it is."""
    parts: list[Any] = [
        getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if torch.version.hip is None or None in parts:
        return None
    return topology.dies("{:04x}:{:02x}:{:02x}.0".format(*parts))
