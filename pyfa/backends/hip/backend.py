"""The ``hip`` and ``emulator`` backends: the same plans and code objects on two runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...plan import Plan
from ...problem import Append, Call, Problem
from ...traffic import Shape, TiledKernel
from ..base import Run, RunBackward, missing
from ..common import append as common_append
from ..common import backward as common_backward
from ..common import calls
from . import backward, code, decode, forward, plans, tiling
from .launcher import Launcher, Runtime


class HipBackend:
    ANY_TOTAL = True
    FEATURES = forward.FEATURES | common_backward.FEATURES | {"bias_grad"}
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

    @property
    def orders(self) -> Any:
        """What chooses the order of float atomics: the emulator's ``Orders``, None on a GPU."""
        return getattr(self.runtime, "orders", None)

    def why_not(self, problem: Problem) -> Sequence[str]:
        elsewhere = self.runtime.why_not(problem)
        reasons = [elsewhere] if elsewhere else []
        reasons += missing(self, problem)
        if not decode.takes(problem):
            reasons += forward.why_not(problem) + common_backward.why_not(problem)
        # Of a device that is not here nobody asks for code.
        if not reasons and not self.runtime.why_unavailable():
            without = code.why_missing(self._kernels(problem), plans.ARCHS[0])
            reasons += [without] if without else []
        return reasons

    def _kernels(self, problem: Problem) -> list[Plan]:
        """All that ``problem`` may launch, as the bundle names them."""
        out = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
        found = [self.plan(problem), plans.plan_of(self.NAME, "combine", out)]
        if problem.features & {"varlen", "seqused"}:
            found.append(plans.plan_of(self.NAME, "gaps"))
        if "backward" in problem.features:
            found += backward.plans_for(problem)
        if "bias_grad" in problem.features:
            found.append(backward.bias_plan_for(problem))
        return [replace(plan, backend="hip", notes=()) for plan in found]

    def plan(self, problem: Problem) -> Plan:
        if decode.takes(problem):
            return decode.plan(self.NAME, problem)
        plan = forward.plan(self.NAME, problem)
        return replace(plan, notes=(*plan.notes, *backward.notes_of(problem)))

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        return tiling.kernels_of(plan, problem, shape, compiled)

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        bind = decode.bind if plan.kernel == decode.KERNEL else forward.bind
        return bind(self.launch, plan, call, append, with_lse)

    def why_not_append(self, call: Call, append: Append) -> str | None:
        return common_append.why_declined(call, append)

    def bind_backward(
        self,
        plan: Plan,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        bias_grad: bool,
    ) -> RunBackward:
        return backward.bind(self.launch, call, out, lse, dout, dlse, bias_grad)
