"""What the host side of ``kernels/`` needs of a driver, whatever the vendor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..._torch import Empty
from ...device import Device
from ...plan import Plan
from ..common.program import Launch, Program
from .target import Target


class Launcher(Protocol):
    """Turns programs into launches on one driver."""

    target: Target
    """Whose kernels it launches."""
    APART: bool
    """Whether parts of a workspace are tensors of their own, so that an access outside is found."""
    NEEDS_LSE: bool
    """Whether the forward kernels write an LSE that nobody asked for."""

    def launch_of(self, program: Program, tensors: tuple[torch.Tensor, ...]) -> Launch:
        """``program``, as described for ``tensors``, as a launch on the current stream."""

    @property
    def empty(self) -> Empty:
        """Makes an uninitialised tensor on the current device."""

    def on(self, where: torch.device) -> AbstractContextManager[None]:
        """Makes the device that tensors are on the current one, where a driver has such a thing."""

    def plan(self, kernel: str, dtype: int | None = None) -> Plan:
        """The plan of a kernel of ``kernels/common``, as "combine"."""

    def device_at(self, where: torch.device) -> Device:
        """The facts of the device that tensors are on, or of the one that is emulated there."""
