"""The ``hip`` and ``emulator`` backends: the same plans and code objects on two runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...problem import Problem
from ..base import missing
from ..common import calls
from ..native import backward as native_backward
from ..native import decode as native_decode
from ..native.backend import NativeBackend
from . import code, decode, forward, plans
from .launcher import Launcher, Runtime
from .target import TARGET


class HipBackend(NativeBackend):
    DTYPES: tuple[str, ...] = (*calls.DTYPES, forward.FLOAT8)

    def __init__(self, name: str, runtime: Runtime) -> None:
        super().__init__(name, TARGET, Launcher(runtime))
        self.runtime = runtime

    def why_unavailable(self) -> str | None:
        return self.runtime.why_unavailable() or code.why_unavailable()

    def describe(self) -> str:
        return self.runtime.describe()

    @property
    def orders(self) -> Any:
        """Return the ``Orders`` of the emulator, which choose the order of float atomics; None on a
        GPU."""
        return getattr(self.runtime, "orders", None)

    @property
    def coverage(self) -> Any:
        """Return the emulator's ``Coverage`` of the code objects; None before a run and on a
        GPU."""
        return getattr(self.runtime, "coverage", None)

    def why_not(self, problem: Problem) -> Sequence[str]:
        elsewhere = self.runtime.why_not(problem)
        reasons = [elsewhere] if elsewhere else []
        reasons += missing(self, problem)
        if not decode.takes(problem) and native_decode.ALONE & problem.features:
            reasons += native_decode.why_not_alone(problem, decode.FEATURES)
        elif not decode.takes(problem):
            reasons += forward.why_not(problem)
            if "backward" in problem.features:
                reasons += native_backward.why_not(problem)
        # Code is not needed for a device that is not here.
        if not reasons and not self.runtime.why_unavailable():
            kernels, arch = self.kernels(problem), plans.device_of(problem).arch
            without = code.why_missing(kernels, arch) or code.why_refused(kernels, arch)
            reasons += [without] if without else []
        return reasons

    def why_not_built(self, problem: Problem) -> Sequence[str]:
        modified = [plan for plan in self.kernels(problem) if "MOD" in dict(plan.constants)]
        reason = code.why_not_built(modified, plans.device_of(problem).arch)
        return [reason] if reason else []
