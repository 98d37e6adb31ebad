"""How the host side of ``kernels/`` runs a kernel, whatever the vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ...device import Device
from ...plan import Plan


class Launch(Protocol):
    """Runs the kernel of a plan on the current stream."""

    def __call__(
        self,
        plan: Plan,
        blocks: int,
        threads: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """``blocks`` workgroups of ``threads``. ``values`` fill ``Params``; ``tensors`` are all
        that the kernel may touch, by name."""

    def plan(self, kernel: str, dtype: int) -> Plan:
        """The plan of a kernel of ``kernels/common``, as "combine"."""

    def device_at(self, where: torch.device) -> Device:
        """The facts of the device that tensors are on, or of the one that is emulated there."""
