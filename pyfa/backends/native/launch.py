"""The interface of a driver to the host side of ``kernels/``, for any vendor."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Whether each buffer of a workspace is a separate tensor, so that overruns are found."""
    NEEDS_LSE: bool
    """Whether the forward kernels also write an LSE that was not requested."""

    def launch_of(self, program: Program, tensors: tuple[torch.Tensor, ...]) -> Launch:
        """Return the launch of ``program`` with ``tensors`` on the current stream."""

    def begin(self, wanted: Sequence[Plan], arch: str) -> None:
        """Begin to compile, in threads, those of ``wanted`` that have no code yet. They are in
        order: those that are needed first, and of these the longest compilation first."""

    @property
    def empty(self) -> Empty:
        """Make an uninitialized tensor on the current device."""

    def on(self, where: torch.device) -> AbstractContextManager[None]:
        """Make the device that tensors are on the current one, if the driver has a current
        device."""

    def plan(self, kernel: str, dtype: int | None = None) -> Plan:
        """Return the plan of a kernel of ``kernels/common``, such as "combine"."""

    def device_at(self, where: torch.device) -> Device:
        """Describe the device that tensors are on, or the emulated device."""
