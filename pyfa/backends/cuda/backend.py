"""The ``cuda`` backend: NVIDIA's GPUs from Ampere on, through kernels compiled by NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...plan import Plan
from ...problem import Append, Call, Problem
from ...traffic import Shape, TiledKernel
from ..base import Run, RunBackward, missing
from ..common import calls, libcuda
from ..native import append as common_append
from ..native import backward as common_backward
from ..native.decode import are_few
from . import backward, decode, forward, forward_sm90_fp8, plans, runtime_compiler, tiling
from .launcher import Launcher


class CudaBackend:
    NAME = "cuda"
    ANY_TOTAL = True
    FEATURES = forward.FEATURES | common_backward.FEATURES
    DTYPES: tuple[str, ...] = (*calls.DTYPES, forward_sm90_fp8.DTYPE)

    def __init__(self) -> None:
        self.launch = Launcher()

    def why_unavailable(self) -> str | None:
        return _why_unavailable()

    def kernel_digests(self) -> Mapping[str, str]:
        """For a conformance report: which bytes its cases ran."""
        return self.launch.digests

    def why_not(self, problem: Problem) -> Sequence[str]:
        elsewhere = plans.why_not(problem.arch)
        reasons = [elsewhere] if elsewhere else []
        reasons += missing(self, problem)
        if decode.takes(problem):
            return reasons
        if "fp8" in problem.features:
            why_not = decode.why_not if are_few(problem) else forward_sm90_fp8.why_not
            return reasons + why_not(problem)
        return reasons + common_backward.why_not(problem)

    def plan(self, problem: Problem) -> Plan:
        if decode.takes(problem):
            return decode.plan(problem)
        plan = forward.plan(problem)
        return replace(plan, notes=(*plan.notes, *backward.notes_of(problem)))

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        return tiling.kernels_of(plan, problem, shape, compiled)

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        bind = decode.bind if plan.kernel == decode.KERNEL else forward.bind
        with torch.cuda.device(call.q.device):
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
        # bias_grad is never asked for: FEATURES has none.
        with torch.cuda.device(call.q.device):
            return backward.bind(self.launch, call, out, lse, dout, dlse)


@functools.cache
def _why_unavailable() -> str | None:
    if torch.version.cuda is None:
        return "this PyTorch is not a build for CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if libcuda.library() is None:
        return "libcuda.so.1 is not there or older than CUDA 12.4"
    missing_compiler = runtime_compiler.why_unavailable()
    if missing_compiler:
        return missing_compiler
    driver, compiler = libcuda.version()[0], runtime_compiler.major()
    if compiler > driver:
        return (
            f"NVRTC {compiler} makes code that this driver for CUDA {driver} refuses: install "
            f"cuda-bindings and NVRTC {driver}"
        )
    return None
