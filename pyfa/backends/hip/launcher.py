"""Programs on a runtime that takes gfx942 code objects: a GPU's, or the emulator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from ..._torch import Empty
from ...device import Device
from ...errors import CodeObjectError
from ...plan import Plan
from ...problem import Problem
from ..common.program import Launch, Program
from ..native import lists
from ..native.target import Target
from . import code, forward, plans
from .target import TARGET

_log = logging.getLogger("pyfa")


class Runtime(Protocol):
    """A runtime for code objects: a GPU's, or the emulator."""

    APART: bool

    def why_unavailable(self) -> str | None: ...

    def describe(self) -> str:
        """Return a description for reports."""

    def why_not(self, problem: Problem) -> str | None:
        """Return why the problem's device does not belong to this runtime."""

    @property
    def empty(self) -> Empty:
        """Make an uninitialized tensor on the current device."""

    def launch_of(self, program: Program, kernels: Sequence[code.Code]) -> Launch:
        """Return a function that launches the steps of ``program``. ``kernels`` has the code of
        each step."""


class Launcher:
    """``native.launch.Launcher``. Safe to use from several threads."""

    NEEDS_LSE = True
    target: Target = TARGET

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.APART = runtime.APART
        self.digests: dict[str, str] = {}
        """The kernels that ran in this process, each with the sha256 of its code object."""
        self._fitting: dict[Plan, Plan] = {}

    def launch_of(self, program: Program, tensors: tuple[torch.Tensor, ...]) -> Launch:
        """Implement ``native.launch.Launcher.launch_of``."""
        arch = self.device_at(program.device).arch
        self.begin([step.plan for step in program.steps], arch)
        kernels = [self._load(step.plan, arch) for step in program.steps]
        return self.runtime.launch_of(program, kernels)

    def begin(self, wanted: Sequence[Plan], arch: str) -> None:
        """Implement ``native.launch.Launcher.begin``."""
        code.begin([_plain(self._fitting.get(plan, plan)) for plan in wanted], arch)

    def _load(self, plan: Plan, arch: str) -> code.Code:
        tried = forward.fallbacks(self._fitting.get(plan, plan))
        for number, each in enumerate(tried):
            try:
                kernel = code.load(_plain(each), arch)
                break
            except CodeObjectError as error:
                if each == tried[-1]:
                    raise
                every = lists.is_unlisted(tried[number + 1])
                how = "visits every tile" if every else "has a general plan"
                _log.info("%s %s, because %s", plan.kernel, how, error)
        if each != plan:
            self._fitting[plan] = each
        self.digests[str(each)] = kernel.digest
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


def _plain(plan: Plan) -> Plan:
    """Return ``plan`` without its notes and for ``hip``: neither notes nor the emulator change the
    code."""
    return replace(plan, backend="hip", notes=())
