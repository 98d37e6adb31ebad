"""What the HIP kernels have in common: archs, number formats, the plans of all of them."""

from __future__ import annotations

import torch

from ... import device
from ...device import DEVICES, Device
from ...plan import Plan
from ...problem import Call, Problem

ARCHS = ("gfx942",)
DTYPES = ("float16", "bfloat16")
DTYPE_CODES = {"float16": 0, "bfloat16": 1}
LDS_BYTES = 65536
COMMON_HEAD_DIMS = (64, 128)


def device_of(problem: Problem) -> Device:
    """The device that a plan is made for: the emulator's stands for an MI300X."""
    return DEVICES["MI300X"] if problem.arch == "cpu" else problem.device


def device_at(where: torch.device) -> Device:
    """The same of the device that tensors are on."""
    return DEVICES["MI300X"] if where.type == "cpu" else device.of(where)


def tensors_of(call: Call) -> dict[str, torch.Tensor]:
    """The tensors that ``call`` came with, by name: what kernels may read."""
    return {name: x for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}


def all_plans(backend: str) -> list[Plan]:
    """Every kernel that any problem can get."""
    from . import append, backward, combine, decode, forward

    kernels = (forward, backward, decode, combine, append)
    return [plan for kernel in kernels for plan in kernel.all_plans(backend)]


def common_plans(backend: str) -> list[Plan]:
    """The kernels that a wheel carries: heads of 64 and 128, no dropout, no pages in prefill."""
    from . import forward

    def is_common(plan: Plan) -> bool:
        constants = dict(plan.constants)
        dim = constants.get("HEAD_DIM", COMMON_HEAD_DIMS[0])
        if constants.get("PAGED") or constants.get("SCORE") == forward.DROPOUT:
            return False
        return dim in COMMON_HEAD_DIMS and constants.get("HEAD_DIM_V", dim) == dim

    return [plan for plan in all_plans(backend) if is_common(plan)]
