"""The ``torch`` backend: runs wherever PyTorch runs, and is the default where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ...blocks import Tiles, Visits
from ...plan import Plan
from ...problem import Append, Call, Problem, features_by, form_of
from ..base import Gradients, Run, RunBackward, Saved, missing
from . import sdpa, tiled


class TorchBackend:
    NAME = "torch"
    FEATURES = features_by("torch")
    DTYPES: tuple[str, ...] = (
        "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz",
    )  # fmt: skip

    def why_unavailable(self) -> str | None:
        return None

    def why_not(self, problem: Problem) -> Sequence[str]:
        reasons = missing(self, problem)
        if "batch_invariant" in problem.features and problem.arch != "cpu":
            reasons.append("on a GPU, PyTorch chooses its matrix products by the size of the batch")
        return reasons

    def plan(self, problem: Problem) -> Plan:
        if "batch_invariant" in problem.features:
            rows, keys = tiled.WHOLE_TILE
            note = (
                f"batch_invariant: every tile is {rows} rows x {keys} keys, even for a single row"
            )
            return Plan(self.NAME, "tiled", notes=(note,))
        why_tiled = sdpa.why_not(problem)
        if not why_tiled:
            return Plan(self.NAME, "sdpa")
        return Plan(self.NAME, "tiled", notes=tuple(why_tiled))

    def visits(self, plan: Plan, call: Call) -> tuple[Tiles, Visits | None] | None:
        return tiled.visits(call)

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        form = form_of(call)
        forward = _fused_forward if plan.kernel == "sdpa" else _tiled_forward
        return lambda *tensors: [*forward(form.fill(tensors)[0])]

    def bind_backward(self, plan: Plan, given: Saved, bias_grad: bool) -> RunBackward:
        fill, by_sdpa = given.filling(), plan.kernel == "sdpa" and given.dlse is None

        def backward(*tensors: torch.Tensor) -> Gradients:
            saved = fill(*tensors)
            call, out, lse, dout, _ = saved
            if by_sdpa and (not lse.is_cpu or sdpa.is_usual(lse)):
                return sdpa.backward(call, out, lse, dout)
            with _without_autocast(call):
                return tiled.backward(saved, bias_grad)

        return backward


def _fused_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return sdpa.forward(call) or _tiled_forward(call)


def _tiled_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    with _without_autocast(call):
        return tiled.forward(call)


def _without_autocast(call: Call) -> AbstractContextManager[object]:
    """Disable autocast: the inputs already have their dtype, and autocast would round scores and P
    before a product."""
    device = call.q.device.type
    if not torch.amp.is_autocast_available(device):  # "meta", for one
        return nullcontext()
    return torch.autocast(device, enabled=False)
