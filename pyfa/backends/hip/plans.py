"""What the HIP kernels have in common: archs, number formats, the plans of all of them."""

from __future__ import annotations

from ...device import DEVICES, Device
from ...plan import Plan
from ...problem import Problem

ARCHS = ("gfx942",)
DTYPES = ("float16", "bfloat16")
DTYPE_CODES = {"float16": 0, "bfloat16": 1}
LDS_BYTES = 65536


def device_of(problem: Problem) -> Device:
    """The device that a plan is made for: the emulator's stands for an MI300X."""
    return DEVICES["MI300X"] if problem.arch == "cpu" else problem.device


def all_plans(backend: str) -> list[Plan]:
    """Every kernel that any problem can get: what is bundled."""
    from . import forward

    return forward.all_plans(backend)
