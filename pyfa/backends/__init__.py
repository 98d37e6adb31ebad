"""The backends by name."""

from __future__ import annotations

from .base import Backend
from .cuda.backend import CudaBackend
from .hip.backend import HipBackend
from .hip.runtime_device import DeviceRuntime
from .hip.runtime_emulator import EmulatorRuntime
from .torch.backend import TorchBackend
from .triton.backend import TritonBackend

# Tried in this order when nobody names a backend. The emulator runs only when it is named.
AUTOMATIC = {
    "amd": ("hip", "triton", "torch"),
    "nvidia": ("cuda", "triton", "torch"),
    "cpu": ("torch",),
    "unknown": ("triton", "torch"),
}

BACKENDS: dict[str, Backend] = {
    backend.NAME: backend
    for backend in (
        HipBackend("hip", DeviceRuntime()),
        CudaBackend(),
        TritonBackend(),
        TorchBackend(),
        HipBackend("emulator", EmulatorRuntime()),
    )
}

NAMES = tuple(BACKENDS)
