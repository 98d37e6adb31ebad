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
from . import code, plans

# The leading members of ``Params``, which a prepared launch gets anew: q, k, v, out and lse.
TENSORS = 5


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
        self._load(plan, threads, index).launch((blocks,), abi.pack(values))

    def prepare(
        self, plan: Plan, threads: int, values: Mapping[str, int | float], index: int
    ) -> Callable[..., None]:
        """The kernel as a function of the number of blocks and the addresses of q, k, v, out, lse.

        All else is as in ``values``.
        """
        return self.prepare_all([(plan, threads)], values, index, f"{TENSORS}Q")

    def prepare_all(
        self,
        kernels: Sequence[tuple[Plan, int]],
        values: Mapping[str, int | float],
        index: int,
        first: str,
    ) -> Callable[..., None]:
        """``libcuda.launcher`` of plans, each with its number of threads, which share ``Params``.

        The leading members, of the struct format ``first``, come anew; all else is as in
        ``values``.
        """
        loaded = [self._load(plan, threads, index).kernel for plan, threads in kernels]
        return libcuda.launcher(index, loaded, abi.pack(values), first)

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
        arch = plans.compiled_for(device.of(torch.device("cuda", index)).arch)
        kernel = code.load(plan, arch)
        self.digests[str(plan)] = kernel.digest
        shared = plans.shared_bytes(plan)
        function = libcuda.load(kernel.data, name_of(plan), index, shared)
        loaded = libcuda.Kernel(function, threads, shared)
        launch = libcuda.launcher(index, [loaded], bytes(abi.SIZE), f"{abi.SIZE}s")
        return Loaded(loaded, launch)


def _index(where: torch.device) -> int:
    return where.index if where.index is not None else torch.cuda.current_device()
