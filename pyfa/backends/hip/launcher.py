"""Programs on a runtime that takes gfx942 code objects: a GPU's, or the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from ..._torch import Empty
from ...device import Device
from ...plan import Plan
from ...problem import Problem
from ..common.program import Launch, Program
from ..native.target import Target
from . import code, plans
from .target import TARGET


class Runtime(Protocol):
    """What runs code objects: a GPU, or the emulator."""

    APART: bool

    def why_unavailable(self) -> str | None: ...

    def why_not(self, problem: Problem) -> str | None:
        """Why the problem's device is not this runtime's."""

    @property
    def empty(self) -> Empty:
        """Makes an uninitialised tensor on the current device."""

    def launch_of(self, program: Program, kernels: Sequence[code.Code]) -> Launch:
        """``program`` with the code of each of its steps."""


class Launcher:
    """``native.launch.Launcher``. Safe to use from several threads."""

    NEEDS_LSE = True
    target: Target = TARGET

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.APART = runtime.APART
        self.digests: dict[str, str] = {}
        """The kernels that ran in this process, each with the sha256 of its code object."""

    def launch_of(self, program: Program, tensors: tuple[torch.Tensor, ...]) -> Launch:
        """``native.launch.Launcher.launch_of``."""
        arch = self.device_at(program.device).arch
        kernels = [self._load(step.plan, arch) for step in program.steps]
        return self.runtime.launch_of(program, kernels)

    def _load(self, plan: Plan, arch: str) -> code.Code:
        kernel = code.load(replace(plan, backend="hip"), arch)
        self.digests[str(plan)] = kernel.digest
        return kernel

    @property
    def empty(self) -> Empty:
        return self.runtime.empty

    def on(self, where: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def plan(self, kernel: str, dtype: int | None = None) -> Plan:
        return plans.plan_of("hip", kernel, dtype)

    def device_at(self, where: torch.device) -> Device:
        return plans.device_at(where)
