"""Run the host side of the cuda and hip backends on a CPU, with a fake driver.

Tensors are on the CPU and pass for those of an H200 or an MI300X; kernels are neither compiled nor
run, so that results are whatever memory holds. A launch calls a C function that returns at once, or
one that notes what it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from pyfa import _torch, abi, binding, bound, context, device, dispatch
from pyfa.backends import BACKENDS
from pyfa.backends.common import arguments, libcuda
from pyfa.backends.cuda import counters, launcher, tensor_maps
from pyfa.backends.hip import backend as hip_backend

_CONFIG = "7IQQI"  # CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes


def _at(reference: Any) -> int:
    """The address that ``ctypes.byref`` passes."""
    return ctypes.addressof(reference._obj)


class Driver:
    """libcuda as far as launches need it. Where it notes them: ``launched`` are kernels by name,
    their configurations and arguments; the next launches return ``errors``, where there are any."""

    def __init__(self, notes: bool) -> None:
        self.names: list[str] = []
        self.launched: list[tuple[str, tuple[int, ...], bytes]] = []
        self.errors: list[int] = []
        # Of four arguments like cuLaunchKernelEx's: 0, for the first two differ.
        self.cuLaunchKernelEx: Any = self._note if notes else ctypes.CDLL(None).pthread_equal

    def cuDriverGetVersion(self, number: Any) -> int:
        return 1  # as without a driver, so that none is in the way of a compiler

    def cuTensorMapEncodeTiled(
        self, at: Any, dtype: Any, rank: Any, base: Any, sizes: Any, strides: Any, *_: Any
    ) -> int:
        """A map that holds the address, the strides and, in its last word, the rows less 1."""
        data = struct.pack("<4Q92xI", base.value, *strides, sizes[1] - 1)
        ctypes.memmove(at.value, data, 128)
        return 0

    def function(self, name: str) -> int:
        self.names.append(name)
        return len(self.names)

    def _note(self, how: Any, function: Any, parameters: Any, extra: Any) -> int:
        time.sleep(0)  # other threads run, as while ctypes calls C
        error = self.errors.pop(0) if self.errors else 0
        if error:
            return error
        name = self.names[_at(function) - 1]
        config = struct.unpack(_CONFIG, ctypes.string_at(_at(how), struct.calcsize(_CONFIG)))
        if parameters is None:  # Triton's kernels: all parameters as they lie
            parts = (ctypes.c_void_p * 5).from_address(_at(extra))
            at, size = parts[1], ctypes.c_size_t.from_address(parts[3]).value
        else:
            at = ctypes.c_void_p.from_address(_at(parameters)).value
            size = abi.MAPPED_SIZE if name.split()[0] in tensor_maps.BOXES else abi.SIZE
            captured = re.search(r"'MOD_CAPTURED', (\d+)", name)
            size += abi.captured_bytes(int(captured[1])) if captured else 0
        assert at is not None
        self.launched.append((name, config, ctypes.string_at(at, size)))
        return 0


def _load(driver: Driver) -> Callable[..., libcuda.Kernel]:
    def load(plan: Any, threads: int, index: int) -> libcuda.Kernel:
        name = f"{plan.kernel} {plan.constants}"
        return launcher.launchable(plan, driver.function(name), threads, 0, index)

    return load


def _on(name: str) -> list[tuple[Any, str, Any]]:
    """What a process is like in which nothing was called yet, and tensors are on ``name``."""
    return [
        (device, "of", lambda where: device.DEVICES[name]),
        (dispatch, "of", lambda where: device.DEVICES[name]),
        (dispatch, "_prepared", {}),
        (context, "used", False),
        (binding, "calls", bound.Table()),
        (bound, "calls", bound.Table()),
        (_torch, "current_stream", lambda index: 0),
        (_torch, "current_device", lambda: 0),
        (_torch, "empty_cuda", _torch.empty_cpu),
    ]


@contextlib.contextmanager
def _changed(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in changes:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


class _Runtime:
    """A HIP runtime that takes every kernel and launches none."""

    APART = False
    empty = staticmethod(_torch.empty_cpu)
    # 0 where its two arguments differ.
    _launch = staticmethod(ctypes.CDLL(None).pthread_equal)

    def why_unavailable(self) -> None:
        return None

    def why_not(self, problem: Any) -> None:
        return None

    def launch_of(self, program: Any, kernels: Any) -> Any:
        layout = arguments.layout_of(program, lambda _: ())
        blocks = [step.blocks for step in program.steps]

        def calls_of(address: int) -> Any:
            first, second = ctypes.c_void_p(address), ctypes.c_void_p(0)
            steps = [(first, second)] * len(blocks)
            return arguments.Calls(steps, lambda stream: None, lambda found: None)

        def recover(error: int, step: int, call: Any) -> None:
            raise RuntimeError(f"step {step} failed with {error}")

        return arguments.launcher(layout, 0, self._launch, calls_of, recover, (), blocks)


@contextlib.contextmanager
def amd(name: str = "MI300X") -> Iterator[None]:
    """The hip backend takes the CPU's tensors for those of the GPU ``name``."""
    backend = hip_backend.HipBackend("hip", _Runtime())
    changes: list[tuple[Any, str, Any]] = [
        *_on(name),
        (backend, "why_unavailable", lambda: None),
        (backend.launch, "_load", lambda plan, arch: None),
        (backend.launch, "begin", lambda wanted, arch: None),
    ]
    with mock.patch.dict(BACKENDS, {"hip": backend}), _changed(changes):
        yield


@contextlib.contextmanager
def nvidia(name: str = "H200", notes: bool = False) -> Iterator[Driver]:
    """The cuda backend takes the CPU's tensors for those of the GPU ``name``."""
    driver, backend = Driver(notes), BACKENDS["cuda"]
    made = launcher.Launcher()
    changes: list[tuple[Any, str, Any]] = [
        *_on(name),
        (backend, "launch", made),
        (backend, "why_unavailable", lambda: None),
        (made, "_load_new", _load(driver)),
        (made, "begin", lambda wanted, arch: None),
        (libcuda, "library", lambda: driver),
        (counters, "source", lambda index: lambda: 4096),
        (tensor_maps, "rows_at", functools.cache(tensor_maps.rows_at.__wrapped__)),
        (tensor_maps, "movable", functools.cache(tensor_maps.movable.__wrapped__)),
        (tensor_maps, "_encoded_as_is", functools.cache(tensor_maps._encoded_as_is.__wrapped__)),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "current_device", lambda: 0),
    ]
    with _changed(changes):
        yield driver
