"""The ``cuda`` backend: NVIDIA's GPUs from Ampere on, through kernels compiled by NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...problem import Problem
from ..base import missing
from ..common import calls, libcuda
from ..native import backward as native_backward
from ..native.backend import NativeBackend
from ..native.decode import ALONE, are_few
from . import code, decode, forward_sm90, forward_sm90_fp8, plans
from .launcher import Launcher
from .target import TARGET


class CudaBackend(NativeBackend):
    DTYPES: tuple[str, ...] = (*calls.DTYPES, forward_sm90_fp8.DTYPE)

    def __init__(self) -> None:
        super().__init__("cuda", TARGET, Launcher())

    def why_unavailable(self) -> str | None:
        return _why_unavailable()

    def why_not(self, problem: Problem) -> Sequence[str]:
        reasons = self._why_refused(problem)
        # Code is not needed for a device that is not here, and is never missing with a compiler.
        if reasons or self.why_unavailable() or not (no_compiler := code.why_no_compiler()):
            return reasons
        without = code.why_missing(self.kernels(problem), problem.arch, no_compiler)
        return [without] if without else []

    def _why_refused(self, problem: Problem) -> list[str]:
        elsewhere = plans.why_not(problem.arch)
        reasons = [elsewhere] if elsewhere else []
        reasons += missing(self, problem)
        if decode.takes(problem):
            return reasons
        if ALONE & problem.features:
            return [*reasons, *decode.why_not_alone(problem)]
        if plans.runs_sm90(problem.arch):
            reasons += forward_sm90.why_not_invariant(problem)
        if "fp8" in problem.features:
            why_not = decode.why_not if are_few(problem) else forward_sm90_fp8.why_not
            return [*reasons, *why_not(problem)]
        if "backward" in problem.features:
            reasons += native_backward.why_not(problem)
        return reasons


@functools.cache
def _why_unavailable() -> str | None:
    if torch.version.cuda is None:
        return "this PyTorch is not a build for CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if libcuda.library() is None:
        return "libcuda.so.1 was not found, or the driver is older than CUDA 12.4"
    return code.why_unavailable()
