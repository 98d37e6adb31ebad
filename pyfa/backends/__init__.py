"""The backends by name; each is imported at first use."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from .base import Backend

# Tried in this order when nobody names a backend. The emulator runs only when it is named.
AUTOMATIC = {
    "amd": ("hip", "triton", "torch"),
    "nvidia": ("cuda", "triton", "torch"),
    "cpu": ("torch",),
    "unknown": ("triton", "torch"),
}
NAMES = ("hip", "cuda", "triton", "torch", "emulator")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's garbage collector for imports, which allocate what stays.

    Otherwise they set off a collection of all of torch's objects: 0.08 of the 0.12 s of CPU time of
    a first call.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _make(name: str) -> Backend:
    with _uncollected():
        return _import(name)


def _import(name: str) -> Backend:
    if name == "torch":
        from .torch.backend import TorchBackend

        return TorchBackend()
    if name == "cuda":
        from .cuda.backend import CudaBackend

        return CudaBackend()
    if name == "triton":
        from .triton.backend import TritonBackend

        return TritonBackend()
    from .hip.backend import HipBackend

    if name == "emulator":
        from .hip.runtime_emulator import EmulatorRuntime

        return HipBackend(name, EmulatorRuntime())
    from .hip.runtime_device import DeviceRuntime

    return HipBackend(name, DeviceRuntime())


class _Backends(MutableMapping[str, Backend]):
    """The backends, imported lazily: together they took 95 of the 142 ms of ``import pyfa``."""

    def __init__(self) -> None:
        self._given: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        if name not in NAMES:
            raise KeyError(name)
        return self._given.get(name) or _make(name)

    def __setitem__(self, name: str, backend: Backend) -> None:
        """Replace a backend, as tests do."""
        self._given[name] = backend

    def __delitem__(self, name: str) -> None:
        del self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


BACKENDS: MutableMapping[str, Backend] = _Backends()
