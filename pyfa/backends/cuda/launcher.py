"""Programs on NVIDIA's driver: cubins loaded on a device, tensor maps, work counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ... import _torch, abi, device
from ..._torch import Empty
from ...device import Device
from ...plan import Plan
from ...sizes import Size, Totals
from ..common import arguments, libcuda
from ..common.arguments import TensorMap
from ..common.program import Launch, Program
from ..native.plans import name_of
from ..native.target import Target
from . import code, counters, plans, tensor_maps
from .target import TARGET

_COUNTER = abi.NAMES.index("counter")  # only pointers come before


class Launcher:
    """``native.launch.Launcher`` on NVIDIA's driver. Safe to use from several threads."""

    APART = False
    NEEDS_LSE = False
    target: Target = TARGET

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """The kernels that ran in this process, each with the sha256 of its cubin."""
        self._loaded: dict[tuple[str, tuple[object, ...], int, int], libcuda.Kernel] = {}
        self._lock = threading.Lock()

    def launch_of(self, program: Program, tensors: tuple[torch.Tensor, ...]) -> Launch:
        """Implement ``native.launch.Launcher.launch_of``."""
        given = dict(zip(program.inputs, tensors, strict=True))
        if not any(step.plan.kernel in tensor_maps.BOXES for step in program.steps):
            return self._launch(program, given, None)
        # The total of packed rows is set at each launch.
        for name, (shape, _, dtype) in zip(program.made, program.likes, strict=True):
            if name in tensor_maps.MADE:
                known = [1 if isinstance(size, Size) else size for size in shape]
                given[name] = torch.empty(known, dtype=dtype, device="meta")
        if tensor_maps.movable():
            return self._launch(program, given, None)

        def launch(
            addresses: list[int], tensors: Sequence[torch.Tensor],
            made: Sequence[torch.Tensor], totals: Totals | None,
        ) -> None:  # fmt: skip
            given = dict(zip(program.tensors, (*tensors, *made), strict=True))
            of_names = dict(zip(program.names, addresses, strict=True))
            self._launch(program, given, of_names)(addresses, tensors, made, totals)

        return launch

    def _launch(
        self,
        program: Program,
        tensors: Mapping[str, torch.Tensor],
        addresses: Mapping[str, int] | None,
    ) -> Launch:
        """Return the launch. ``addresses`` are given if this driver's tensor maps cannot be
        moved."""
        pointers = {step.plan.kernel: step.params.pointers for step in program.steps}

        def maps_of(plan: Plan) -> list[TensorMap]:
            return tensor_maps.maps_of(plan, tensors, pointers[plan.kernel], addresses)

        index = index_of(program.device)
        layout = arguments.layout_of(program, maps_of)
        units = self.device_at(program.device).units
        self.begin([step.plan for step in program.steps], self.device_at(program.device).arch)
        launches = []
        taken: list[tuple[int, Callable[[], int]]] = []
        for step, start in zip(program.steps, layout.starts, strict=True):
            blocks = plans.grid_of(step.plan, step.blocks, units)
            if step.plan.kernel in plans.COUNTED and blocks != step.blocks:
                taken.append((start // 8 + _COUNTER, counters.source(index)))
            kernel = self._load(step.plan, step.threads, index)
            launches.append(libcuda.Launch(kernel, blocks, start))
        return libcuda.launcher(index, launches, layout, taken)

    @property
    def empty(self) -> Empty:
        return _torch.empty_cuda

    def on(self, where: torch.device) -> AbstractContextManager[None]:
        return torch.cuda.device(where)

    def plan(self, kernel: str, dtype: int | None = None) -> Plan:
        return plans.plan_of(kernel, dtype)

    def device_at(self, where: torch.device) -> Device:
        return device.of(where)

    def begin(self, wanted: Sequence[Plan], arch: str) -> None:
        """Implement ``native.launch.Launcher.begin``."""
        code.begin([_plain(plan) for plan in wanted], arch)

    def _load(self, plan: Plan, threads: int, index: int) -> libcuda.Kernel:
        key = (plan.kernel, plan.constants, threads, index)
        found = self._loaded.get(key)
        if found is None:
            with self._lock:
                found = self._loaded.get(key)
                if found is None:
                    found = self._loaded[key] = self._load_new(plan, threads, index)
        return found

    def _load_new(self, plan: Plan, threads: int, index: int) -> libcuda.Kernel:
        plan = _plain(plan)
        arch = plans.compiled_for(device.of(torch.device("cuda", index)).arch, plan)
        kernel = code.load(plan, arch)
        self.digests[str(plan)] = kernel.digest
        shared = plans.shared_bytes(plan)
        function = libcuda.load(kernel.data, name_of(plan), index, shared)
        if plan.kernel in plans.COUNTED:
            counters.source(index)  # now, since it cannot be made while a graph is captured
        return launchable(plan, function, threads, shared, index)


def _plain(plan: Plan) -> Plan:
    """Return ``plan`` without notes, which are no part of a kernel: two plans that differ in them
    are one."""
    return replace(plan, notes=())


def launchable(plan: Plan, function: int, threads: int, shared: int, index: int) -> libcuda.Kernel:
    """Return a function on device ``index``, which takes its arguments as ``plan`` says."""
    ahead = plans.starts_ahead(plan, device.of(torch.device("cuda", index)).arch)
    return libcuda.Kernel(function, threads, shared, struct=True, ahead=ahead)


def index_of(where: torch.device) -> int:
    """Return the index of a CUDA device, or that of the current device if ``where`` has no
    index."""
    return where.index if where.index is not None else torch.cuda.current_device()
