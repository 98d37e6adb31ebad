"""Code that all HIP kernels share: archs, their tiles, devices."""

from __future__ import annotations

import torch

from ... import device
from ...device import DEVICES, Device
from ...plan import Plan
from ...problem import Problem
from ..native import plans, tiles
from ..native.tiles import gfx942

ARCHS = tiles.archs("gfx")
EMULATED = "gfx942"
_STANDS_FOR = DEVICES["MI300X"]  # the emulator


def device_of(problem: Problem) -> Device:
    """Return the device that a plan is made for: for the emulator (arch "cpu"), an MI300X."""
    return _STANDS_FOR if problem.arch == "cpu" else problem.device


def device_at(where: torch.device) -> Device:
    """Return the device of tensors on ``where``: on the CPU, where the emulator runs, an MI300X."""
    return _STANDS_FOR if where.type == "cpu" else device.of(where)


def tiles_of(arch: str) -> gfx942.Tiles:
    found: gfx942.Tiles = tiles.of(EMULATED if arch == "cpu" else arch)
    return found


def plan_of(backend: str, kernel: str, dtype: int | None = None) -> Plan:
    """Return the plan of a kernel that depends on a number format at most."""
    return plans.plan_with(backend, f"hip/{kernel}.hip", {} if dtype is None else {"DTYPE": dtype})
