"""One launch: from a plan to its code object, ``Params`` and a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from ... import abi
from ...device import Device
from ...plan import Plan
from ...problem import Problem
from . import code, plans


class Runtime(Protocol):
    """What runs a code object: a GPU, or the emulator."""

    def why_unavailable(self) -> str | None: ...

    def why_not(self, problem: Problem) -> str | None:
        """Why the problem's device is not this runtime's."""

    def launch(
        self,
        kernel: code.Code,
        grid: tuple[int, int, int],
        threads: int,
        params: bytes,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Run one grid. ``tensors`` are all that the kernel may touch, by name."""


class Launcher:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.digests: dict[str, str] = {}
        """The kernels that ran in this process, each with the sha256 of its code object."""

    def __call__(
        self,
        plan: Plan,
        blocks: int,
        threads: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """``common.launch.Launch``."""
        kernel = code.load(replace(plan, backend="hip"), plans.ARCHS[0])
        self.digests[str(plan)] = kernel.digest
        self.runtime.launch(kernel, (blocks, 1, 1), threads, abi.pack(values), tensors)

    def plan(self, kernel: str, dtype: int) -> Plan:
        return plans.plan_of("hip", kernel, dtype)

    def device_at(self, where: torch.device) -> Device:
        return plans.device_at(where)
