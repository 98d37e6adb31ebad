"""The number of XCDs of a GPU from the Linux driver, because HIP runtimes before 7.0 do not report
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def dies(bus_id: str, nodes: Path = NODES) -> int | None:
    """Return the XCDs of the GPU at the PCI address ``bus_id`` (``0000:47:00.0``); None if unknown.

    In a partition mode (CPX, DPX) it is the number of one partition; all partitions of a card are
    equal.
    """
    domain, bus, device = bus_id.split(".")[0].split(":")
    wanted = (int(domain, 16), int(bus, 16), int(device, 16))
    for folder in sorted(nodes.glob("*")):
        node = _properties(folder / "properties")
        if _place(node) == wanted:
            return node.get("num_xcc") or None
    return None


def _place(node: Mapping[str, int]) -> tuple[int, int, int]:
    """Return domain, bus and device. The last 3 bits, a function, number the partitions of a
    card."""
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
