"""What the HIP kernels have in common: archs, and the plans of all of them."""

from __future__ import annotations

import torch

from ... import device
from ...device import DEVICES, Device
from ...plan import Plan
from ...problem import Problem
from ..common.calls import DTYPE_CODES
from ..native.plans import is_common

ARCHS = ("gfx942",)
LDS_BYTES = 65536


def device_of(problem: Problem) -> Device:
    """The device that a plan is made for: the emulator's stands for an MI300X."""
    return DEVICES["MI300X"] if problem.arch == "cpu" else problem.device


def device_at(where: torch.device) -> Device:
    """The same of the device that tensors are on."""
    return DEVICES["MI300X"] if where.type == "cpu" else device.of(where)


def all_plans(backend: str) -> list[Plan]:
    """Every kernel that any problem can get."""
    from . import backward, decode, forward

    found = [plan for each in (forward, backward, decode) for plan in each.all_plans(backend)]
    for kernel in ("combine", "append"):
        found += [plan_of(backend, kernel, code) for code in DTYPE_CODES.values()]
    return [*found, plan_of(backend, "gaps")]


def plan_of(backend: str, kernel: str, dtype: int | None = None) -> Plan:
    """The plan of a kernel that needs a number format at most."""
    constants = () if dtype is None else (("DTYPE", dtype),)
    return Plan(backend, f"hip/{kernel}.hip", constants)


def common_plans(backend: str) -> list[Plan]:
    """The kernels that a wheel carries: heads of 64 and 128, no dropout, no pages in prefill."""
    return [plan for plan in all_plans(backend) if is_common(plan)]
