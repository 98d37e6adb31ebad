"""The ``hip`` and ``emulator`` backends: the same plans and code objects on two runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call, Problem, is_aligned
from ..base import Gradients, missing
from . import code, plans


class Runtime(Protocol):
    """What runs a code object: a GPU, or the emulator."""

    def why_unavailable(self) -> str | None: ...

    def why_not(self, problem: Problem) -> str | None:
        """Why the problem's device is not this runtime's."""

    def launch(
        self,
        kernel: code.Code,
        grid: tuple[int, int, int],
        threads: int,
        params: bytes,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Run one grid. ``tensors`` are all that the kernel may touch, by name."""


class HipBackend:
    FEATURES = plans.FEATURES
    DTYPES: tuple[str, ...] = plans.DTYPES

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.NAME = name
        self.runtime = runtime
        self.digests: dict[str, str] = {}
        """The plans that ran in this process, each with the sha256 of its code object."""

    def why_unavailable(self) -> str | None:
        return self.runtime.why_unavailable() or code.why_unavailable()

    def kernel_digests(self) -> Mapping[str, str]:
        """For a conformance report: which bytes its cases ran."""
        return self.digests

    def why_not(self, problem: Problem) -> Sequence[str]:
        reasons = missing(self, problem) + plans.why_not(problem)
        elsewhere = self.runtime.why_not(problem)
        return [elsewhere, *reasons] if elsewhere else reasons

    def plan(self, problem: Problem) -> Plan:
        return plans.plan(self.NAME, problem)

    def forward(self, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out = call.q.new_empty(call.out_shape())
        lse = call.q.new_empty(call.lse_shape(), dtype=torch.float32)
        if lse.numel() == 0:
            return out, lse
        if not is_aligned(call):
            call = call._replace(q=_aligned(call.q), k=_aligned(call.k), v=_aligned(call.v))
        tensors = {"q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse}
        kernel = code.load(replace(plan, backend="hip"), plans.ARCHS[0])
        self.digests[str(plan)] = kernel.digest
        self.runtime.launch(
            kernel,
            plans.grid(call.max_seqlen_q, call.q.shape[-2], call.batch),
            plans.THREADS,
            abi.pack(abi.forward_values(call, out, lse)),
            tensors,
        )
        return out, lse

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
        raise AssertionError("a plan with backward is never made: FEATURES has none")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
