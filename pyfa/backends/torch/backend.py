"""The ``torch`` backend: runs wherever PyTorch runs, and is the default where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ...plan import Plan
from ...problem import FEATURES, Call, Problem
from ..base import Gradients, missing
from . import sdpa, tiled


class TorchBackend:
    NAME = "torch"
    FEATURES = frozenset(FEATURES)
    DTYPES: tuple[str, ...] = (
        "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz",
    )  # fmt: skip

    def why_unavailable(self) -> str | None:
        return None

    def why_not(self, problem: Problem) -> Sequence[str]:
        return missing(self, problem)

    def plan(self, problem: Problem) -> Plan:
        why_tiled = sdpa.why_not(problem)
        if not why_tiled:
            return Plan(self.NAME, "sdpa")
        return Plan(self.NAME, "tiled", notes=tuple(why_tiled))

    def forward(self, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        if plan.kernel == "sdpa":
            return sdpa.forward(call)
        with _without_autocast(call):
            return tiled.forward(call)

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
        if plan.kernel == "sdpa" and dlse is None:
            return sdpa.backward(call, out, lse, dout)
        with _without_autocast(call):
            return tiled.backward(call, out, lse, dout, dlse, bias_grad)


def _without_autocast(call: Call) -> AbstractContextManager[object]:
    """The inputs have their dtype by now; autocast would round scores and P before a product."""
    device = call.q.device.type
    if not torch.amp.is_autocast_available(device):  # "meta", for one
        return nullcontext()
    return torch.autocast(device, enabled=False)
