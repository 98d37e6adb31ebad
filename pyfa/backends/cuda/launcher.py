"""One launch: from a plan to its cubin, loaded on a device, and ``Params``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ... import abi, device
from ...device import Device
from ...plan import Plan
from ..common import libcuda
from ..common.plans import name_of
from . import code, counters, plans, tensor_maps

# What a prepared launch gets anew of ``Params``, in its order, and of packed calls.
NAMES = ("q", "k", "v", "out", "lse")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
_COUNTER_AT = 8 * abi.NAMES.index("counter")  # only pointers come before


class Loaded(NamedTuple):
    kernel: libcuda.Kernel
    launch: Callable[..., None]  # with all of ``Params`` given anew


class Launcher:
    """``common.launch.Launch`` on NVIDIA's driver. Safe to use from several threads."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """The kernels that ran in this process, each with the sha256 of its cubin."""
        self._loaded: dict[tuple[str, tuple[object, ...], int, int], Loaded] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        plan: Plan,
        blocks: int,
        threads: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        index = _index(next(iter(tensors.values())).device)
        loaded, grid = self._load(plan, threads, index), self._grid(plan, blocks, index)
        if grid < blocks:
            values = {**values, "counter": counters.source(index)()}
        loaded.launch((grid,), abi.pack(values, tensor_maps.maps_of(plan, tensors)))

    def _grid(self, plan: Plan, blocks: int, index: int) -> int:
        return plans.grid_of(plan, blocks, self.device_at(torch.device("cuda", index)).units)

    def can_prepare(self, plan: Plan) -> bool:
        """Whether nothing but addresses changes between launches."""
        return plan.kernel not in tensor_maps.BOXES or tensor_maps.movable()

    def prepare(
        self,
        plan: Plan,
        blocks: int,
        threads: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, torch.Tensor],
    ) -> tuple[Callable[..., None], int]:
        """The kernel as a function of its grid and the addresses of q, k, v, out and lse, and of
        offsets where there are any, and the grid for ``blocks``.

        All else is as in ``values``, and in ``tensors``, of which the kernel has maps.
        """
        index = _index(tensors["q"].device)
        grid = self._grid(plan, blocks, index)
        names = NAMES + OFFSETS if OFFSETS[0] in tensors else NAMES
        launch = self.prepare_all(
            [(plan, threads)], values, index, names, tensors, counted=grid < blocks
        )
        return launch, grid

    def prepare_all(
        self,
        kernels: Sequence[tuple[Plan, int]],
        values: Mapping[str, int | float],
        index: int,
        names: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        counted: bool = False,
    ) -> Callable[..., None]:
        """``libcuda.launcher`` of plans, each with its number of threads, which share ``Params``.

        The members ``names`` come anew, and those between them are 0: ``between``. All else is as
        in ``values``, and in ``tensors``, of which one kernel of all may have maps. ``counted``:
        blocks take their work from a counter.
        """
        loaded = [self._load(plan, threads, index).kernel for plan, threads in kernels]
        maps: tuple[bytes, ...] = ()
        again: list[tuple[int, int]] = []
        for plan, _ in kernels:
            for box in tensor_maps.BOXES.get(plan.kernel, ()):
                again.append((abi.MAPS_AT + len(again) * abi.MAP_SIZE, names.index(box.tensor)))
            maps += tensor_maps.maps_of(plan, tensors)
        taken = [(_COUNTER_AT, counters.source(index))] if counted else []
        return libcuda.launcher(index, loaded, abi.pack(values, maps), _format(names), again, taken)

    def plan(self, kernel: str, dtype: int) -> Plan:
        return plans.plan_of(kernel, dtype)

    def device_at(self, where: torch.device) -> Device:
        return device.of(where)

    def _load(self, plan: Plan, threads: int, index: int) -> Loaded:
        key = (plan.kernel, plan.constants, threads, index)
        found = self._loaded.get(key)
        if found is None:
            with self._lock:
                found = self._loaded.get(key)
                if found is None:
                    found = self._loaded[key] = self._load_new(plan, threads, index)
        return found

    def _load_new(self, plan: Plan, threads: int, index: int) -> Loaded:
        # Notes are no part of a kernel: two plans that differ in them are one.
        plan = replace(plan, notes=())
        arch = plans.compiled_for(device.of(torch.device("cuda", index)).arch, plan)
        kernel = code.load(plan, arch)
        self.digests[str(plan)] = kernel.digest
        shared = plans.shared_bytes(plan)
        function = libcuda.load(kernel.data, name_of(plan), index, shared)
        if plan.kernel in plans.PERSISTENT:
            counters.source(index)  # now, since it cannot be made while a graph is captured
        return launchable(plan, function, threads, shared, index)


def launchable(plan: Plan, function: int, threads: int, shared: int, index: int) -> Loaded:
    """A function that is on device ``index``, as ``plan`` takes its arguments."""
    ahead = plans.starts_ahead(plan, device.of(torch.device("cuda", index)).arch)
    size = abi.MAPPED_SIZE if plan.kernel in tensor_maps.BOXES else abi.SIZE
    kernel = libcuda.Kernel(function, threads, shared, struct=True, ahead=ahead)
    return Loaded(kernel, libcuda.launcher(index, [kernel], bytes(size), f"{size}s"))


def between(names: Sequence[str]) -> list[str]:
    """The members of ``Params`` up to the last of ``names`` that are not among them."""
    return [name for name in abi.NAMES[: abi.NAMES.index(names[-1])] if name not in names]


def _format(names: Sequence[str]) -> str:
    """The struct format of these members, addresses in the order of ``Params``, and of zeros
    ``between`` them."""
    last = abi.NAMES.index(names[-1])
    return "".join("Q" if name in names else "8x" for name in abi.NAMES[: last + 1])


def _index(where: torch.device) -> int:
    return where.index if where.index is not None else torch.cuda.current_device()
