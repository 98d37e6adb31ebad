"""The properties of one GPU: read from a GPU of this machine, or looked up by name."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .arch import ARCHS, Arch

GIB = 1024**3
MIB = 1024**2
NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # what the Linux driver tells of AMD's GPUs


@dataclass(frozen=True)
class Device:
    """One device as PyTorch shows it (an MI250X counts as two, an MI300X in CPX mode as eight).

    ``units``: CUs or SMs; 0 for a CPU. ``dies``: XCDs, each with its own L2; 1 for devices without
    XCDs. ``bandwidth``: bytes per second of device memory. ``l2_bytes`` is per die.
    ``cache_bytes``: a last-level cache behind the L2 (AMD's Infinity Cache), 0 without one.
    ``clock``: Hz, the vendor's peak. ``matrix_scale``: a factor of the arch's matrix rate, 0.5 for
    GeForce (which halves it when accumulating in float32), otherwise 1. Unknown figures are 0.
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
        """Return ``amd``, ``nvidia``, ``cpu``, or ``unknown`` for an arch that ``ARCHS`` does not
        list."""
        if self.arch == "cpu":
            return "cpu"
        row = ARCHS.get(self.arch)
        if row is not None:
            return row.vendor
        prefixes = {"gfx": "amd", "sm_": "nvidia"}
        return prefixes.get(self.arch[:3], "unknown")

    @property
    def limits(self) -> Arch | None:
        """Return the entry of this device's arch in ``ARCHS``, None if there is none."""
        return ARCHS.get(self.arch)

    def matrix_flops(self, dtype: str) -> float:
        """Return the peak dense matrix FLOP per second for inputs of ``dtype``; 0 if unknown.

        This is the vendor's peak, which no card sustains under load. All float8 formats have the
        same rate.
        """
        rates = self.limits.matrix_rates if self.limits else {}
        dtype = "float8" if dtype.startswith("float8") else dtype
        # GeForce halves the rate of its matrix units, not that of the vector units.
        scale = 1.0 if dtype == "float32" else self.matrix_scale
        return rates.get(dtype, 0) * self.units * self.clock * scale

    @property
    def shared_bandwidth(self) -> float:
        """Return the bytes per second of all LDS or shared memory at the vendor's clock; 0 if
        unknown."""
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
    """Return the device that a card shows in a partition mode with ``dies`` XCDs per device.

    The memory system is assumed to be shared evenly, whatever its own mode.
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
            _gpu("H200", "sm_90a", 132, 4800, 141, 60, 1830),
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
    """Return the device called ``name``; case, spaces and the vendor's name do not matter.

    Raises ``ValueError`` if there is none. For a card that is too old for the kernels, the message
    gives the reason.
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
    """Return the properties of a device of this machine: a GPU as torch shows it, otherwise the
    CPU."""
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
    """Return what not every version of torch reports: memory bandwidth and XCDs.

    The values come from the named device of the same arch and size, or of a partition of one. For
    any other device they are 0 (unknown) rather than a guess.
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
    """Return the XCDs as Linux's driver reports them; None if it does not, or if torch does not say
    which GPU it is."""
    parts: list[Any] = [
        getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if torch.version.hip is None or None in parts:
        return None
    return dies_by_driver("{:04x}:{:02x}:{:02x}.0".format(*parts))


def dies_by_driver(bus_id: str, nodes: Path = NODES) -> int | None:
    """Return the number of XCDs of the GPU at the PCI address ``bus_id`` (``0000:47:00.0``), or
    None if it is unknown. The number comes from Linux's driver, because HIP runtimes before 7.0 do
    not report it.

    In a partition mode (CPX, DPX) it is the number of XCDs of one partition; all partitions of a
    card are equal.
    """
    domain, bus, device = bus_id.split(".")[0].split(":")
    wanted = (int(domain, 16), int(bus, 16), int(device, 16))
    for folder in sorted(nodes.glob("*")):
        node = _properties(folder / "properties")
        if _place(node) == wanted:
            return node.get("num_xcc") or None
    return None


def _place(node: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the PCI domain, bus and device number of ``node``. The lowest 3 bits of its
    ``location_id``, the PCI function, are ignored: they number the partitions of a card."""
    location = node.get("location_id", 0)
    return node.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        # A GPU that this container may not use: its node is listed and cannot be read.
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
