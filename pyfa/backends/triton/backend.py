"""The ``triton`` backend: every GPU that Triton compiles for, and its interpreter on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ... import _torch, blocks
from ... import device as devices
from ...blocks import Tiles, Visits
from ...plan import Plan
from ...problem import Append, Call, Problem, features_by
from ...traffic import Shape, TiledKernel
from ..base import Rounding, Run, RunBackward, Saved, missing
from . import plans, tiling

if TYPE_CHECKING:
    from .runtime import Runner


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonBackend:
    NAME = "triton"
    FEATURES = features_by("triton")
    DTYPES: tuple[str, ...] = (
        "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz",
    )  # fmt: skip

    def __init__(self) -> None:
        # The key is the plan's identity, because hashing its constants costs more than a launch.
        # The plan is kept, so that no other plan gets the same identity.
        self._runners: dict[int, tuple[Plan, Runner]] = {}
        # Problems with equal plans share one plan object, and therefore its kernels.
        self._plans: dict[Plan, Plan] = {}

    def why_unavailable(self) -> str | None:
        return _why_unavailable(_interpreted())

    def why_not(self, problem: Problem) -> Sequence[str]:
        reasons = missing(self, problem)
        if problem.arch == "cpu" and not _interpreted():
            reasons.append("the device is a CPU (TRITON_INTERPRET=1 interprets the kernels there)")
        elif "fp8" in problem.features and problem.mods:
            reasons.append("score_mod and mask_mod with float8 are not implemented")
        elif "fp8" in problem.features:
            dtype = problem.dtype_k or problem.dtype
            if not plans.has_float8(problem.arch, dtype):
                reasons.append(f"{problem.arch} has no {dtype}")
        return reasons

    def plan(self, problem: Problem) -> Plan:
        found = plans.plan(problem, self.NAME)
        return self._plans.setdefault(found, found)

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        return tiling.kernels_of(plan, problem, shape, compiled)

    def visits(self, plan: Plan, call: Call) -> tuple[Tiles, Visits | None] | None:
        tiles = plans.list_tiles(dict(plan.constants), "fwd", call)
        if tiles is None:
            return None
        return tiles, blocks.visits_of(call, tiles) if blocks.is_quick(call) else None

    def runner(self, plan: Plan) -> Runner:
        found = self._runners.get(id(plan))
        if found is None:
            from .runtime import Runner

            found = self._runners[id(plan)] = (plan, Runner(plan))
        return found[1]

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        return self.runner(plan).bind(call, with_lse)

    def bind_backward(self, plan: Plan, given: Saved, bias_grad: bool) -> RunBackward:
        from . import runtime_backward

        return runtime_backward.bind(self.runner(plan), given, bias_grad)

    def quantize(
        self, xs: Sequence[torch.Tensor], how: Rounding
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        where = xs[0].device
        if not plans.has_float8(devices.of(where).arch, str(how.dtype).removeprefix("torch.")):
            return None
        from . import quantize

        if _torch.current_device() == where.index:
            return quantize.quantize(xs, how)
        with torch.cuda.device(where):
            return quantize.quantize(xs, how)


@functools.cache
def _why_unavailable(interpreted: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted:
        return None
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        return f"Triton finds no driver: {error}"
    return None
