"""The ``hip`` and ``emulator`` backends: the same plans and code objects on two runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...plan import Plan
from ...problem import Call, Problem
from ...traffic import Shape, TiledKernel
from ..base import Gradients, Rotary, missing
from ..common import append, calls
from ..common import backward as common_backward
from . import backward, code, decode, forward, tiling
from .launcher import Launcher, Runtime


class HipBackend:
    FEATURES = forward.FEATURES | common_backward.FEATURES
    DTYPES: tuple[str, ...] = (*calls.DTYPES, forward.FLOAT8)

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.NAME = name
        self.runtime = runtime
        self.launch = Launcher(runtime)

    def why_unavailable(self) -> str | None:
        return self.runtime.why_unavailable() or code.why_unavailable()

    def kernel_digests(self) -> Mapping[str, str]:
        """For a conformance report: which bytes its cases ran."""
        return self.launch.digests

    def why_not(self, problem: Problem) -> Sequence[str]:
        elsewhere = self.runtime.why_not(problem)
        reasons = [elsewhere] if elsewhere else []
        reasons += missing(self, problem)
        if decode.takes(problem):
            return reasons
        return reasons + forward.why_not(problem) + common_backward.why_not(problem)

    def plan(self, problem: Problem) -> Plan:
        if decode.takes(problem):
            return decode.plan(self.NAME, problem)
        plan = forward.plan(self.NAME, problem)
        return replace(plan, notes=(*plan.notes, *backward.notes_of(problem)))

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        return tiling.kernels_of(plan, problem, shape, compiled)

    def forward(self, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        if plan.kernel == decode.KERNEL:
            return decode.run(self.launch, plan, call)
        return forward.run(self.launch, plan, call)

    def append(
        self,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotary: Rotary | None,
    ) -> bool:
        return append.run(self.launch, call, q, k, v, rotary)

    def backward(
        self,
        plan: Plan,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        bias_grad: bool,
    ) -> Gradients:
        # bias_grad is never asked for: FEATURES has none.
        return backward.run(self.launch, call, out, lse, dout, dlse)
