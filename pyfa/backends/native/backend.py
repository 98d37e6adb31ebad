"""The code that ``hip``, ``emulator`` and ``cuda`` share: everything but reasons and code
loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from ... import blocks
from ...blocks import Tiles, Visits
from ...plan import Plan
from ...problem import Append, Call, Problem, features_by
from ..base import Run, RunBackward, Saved
from ..common.calls import DTYPE_CODES
from . import append as appending
from . import backward, block_lists, decode, forward, lists, merge
from .combine import chunked
from .launch import Launcher
from .plans import is_packed, masking
from .target import Target

if TYPE_CHECKING:
    from ...traffic import Shape, TiledKernel


class DigestingLauncher(Launcher, Protocol):
    digests: dict[str, str]
    """The kernels that ran in this process, each with the sha256 of its code object."""


class NativeBackend:
    """``base.Backend`` over a vendor's ``target`` and ``launch``."""

    def __init__(self, name: str, target: Target, launch: DigestingLauncher) -> None:
        self.NAME = name
        self.FEATURES = features_by(target.name)
        self.target = target
        self.launch = launch

    def kernel_digests(self) -> Mapping[str, str]:
        """Return the digests of the code that ran, for a conformance report."""
        return self.launch.digests

    def plan(self, problem: Problem) -> Plan:
        if self.target.takes_decode(problem):
            return masking(decode.plan(self.target, self.NAME, problem), problem.features)
        plan = masking(self.target.forward_plan(self.NAME, problem), problem.features)
        if "backward" not in problem.features:
            return plan
        return replace(plan, notes=(*plan.notes, *self.target.backward_notes(problem)))

    def begin(self, problem: Problem) -> None:
        """Implement ``base.Building.begin``."""
        if not problem.batch or not problem.seqlen_q:
            return
        wanted = []
        for plan in (self.plan(problem), *self._of_backward(problem)):
            wanted.append(plan)
            if lists.is_listed(plan):
                tiles = self.target.list_tiles(plan)
                wanted += block_lists.plans_of(self.launch, problem, tiles)
        self.launch.begin(wanted, self.target.device_of(problem).arch)

    def why_not_built(self, problem: Problem) -> Sequence[str]:
        """Implement ``base.Building.why_not_built``."""
        return ()

    def kernels(self, problem: Problem) -> list[Plan]:
        """Return the plans of all kernels that ``problem`` may launch, as the bundle of compiled
        code (``pyfa/bundle.py``) lists them: with the target's name as their backend, and without
        notes."""
        out = DTYPE_CODES[problem.dtype_out or problem.dtype]
        found = [self.plan(problem), self.target.plan_of(self.NAME, "combine", out)]
        if self.target.block_of(found[0]).chunk:
            found.append(chunked(found[1]))
        if problem.features & {"varlen", "seqused"}:
            found.append(self.target.plan_of(self.NAME, "gaps", None))
        found += self._of_backward(problem)
        return [replace(plan, backend=self.target.name, notes=()) for plan in found]

    def _of_backward(self, problem: Problem) -> list[Plan]:
        found: list[Plan] = []
        if "backward" in problem.features:
            found += backward.plans_for(self.target, self.NAME, problem)
        if "bias_grad" in problem.features:
            found.append(backward.bias_plan_for(self.target, self.NAME, problem))
        return found

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        from . import tiling  # 15 modules of traffic, which no launch needs

        return tiling.kernels_of(self.target, plan, problem, shape, compiled)

    def visits(self, plan: Plan, call: Call) -> tuple[Tiles, Visits | None] | None:
        if not lists.is_listed(plan):
            return None
        tiles = self.target.list_tiles(plan)
        return tiles, blocks.visits_of(call, tiles) if blocks.is_quick(call) else None

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        packed = is_packed(plan, self.target.decode, self.target.latent)
        bind = decode.bind if packed and not call.batch_invariant else forward.bind
        with self.launch.on(call.q.device):
            return bind(self.launch, plan, call, append, with_lse)

    def bind_merge(
        self,
        outs: Sequence[torch.Tensor],
        lses: Sequence[torch.Tensor],
        out: torch.Tensor | torch.dtype,
        with_lse: bool,
    ) -> Run | None:
        given = out if isinstance(out, torch.Tensor) else None
        if not merge.takes(outs, lses, given):
            return None
        return merge.bind(self.launch, outs, lses, out, with_lse)

    def why_not_append(self, call: Call, append: Append) -> str | None:
        return appending.why_refused(call, append)

    def bind_backward(self, plan: Plan, given: Saved, bias_grad: bool) -> RunBackward:
        with self.launch.on(given.call.q.device):
            return backward.bind(self.launch, given, bias_grad)
