"""Run code objects on an AMD GPU next to PyTorch, with its HIP runtime, devices and streams.

A launch neither waits for the device nor allocates on it, so it can be captured into a graph. A
code object is loaded once per device, when the first program with it is bound. It stays loaded
until the process ends, because graphs and launches in flight use it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import _torch, codeobject, device
from ..._torch import Empty
from ...errors import CodeObjectError
from ...problem import Problem
from ...sizes import Size
from ..common import arguments
from ..common.program import Launch, Program
from . import libamdhip64, plans, runtime_hip_python
from .code import Code
from .libamdhip64 import Hip
from .runtime_hip_python import HipPython


class Loaded(NamedTuple):
    """A kernel on one device: its ``hipFunction_t``, the size of its parameters, its image.

    ``image`` is kept because the runtime may read it for as long as the module lives: CLR's
    FatBinaryInfo holds the pointer that it was given and makes no copy.
    """

    function: int
    params_bytes: int
    image: bytes


Binding = HipPython | libamdhip64.Ctypes


class DeviceRuntime:
    """The runtime of the ``hip`` backend. Safe to use from several threads."""

    APART = False

    def __init__(self) -> None:
        self._hip: Hip | None = None
        self._binding: Binding | None = None
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._lock = threading.Lock()

    def why_unavailable(self) -> str | None:
        """Return why this process cannot launch anything; None if it can.

        The check repeats until the answer is None, because a HIP runtime may be loaded later. Then
        the answer is kept.
        """
        with self._lock:
            if self._hip is not None:
                return None
            found = _open()
            if isinstance(found, str):
                return found
            self._hip, self._binding = found
            return None

    def why_not(self, problem: Problem) -> str | None:
        """Return why the kernels are not compiled for the problem's device."""
        facts = problem.device
        if facts.arch in plans.ARCHS:
            return None
        if facts.vendor == "cpu":
            return "the device is a CPU"
        if facts.vendor == "nvidia":
            return f"the device is NVIDIA ({facts.arch})"
        return f"{facts.arch} is not {' or '.join(plans.ARCHS)}"

    @property
    def empty(self) -> Empty:
        return _torch.empty_cuda

    def launch_of(self, program: Program, kernels: Sequence[Code]) -> Launch:
        """Return a function that launches the steps of ``program`` on torch's current stream.
        ``kernels`` has the code of each step.

        Loads code that is not on the device yet. Raises ``CodeObjectError`` if the device refuses
        the code, ``HipError`` if the runtime fails, ``RuntimeError`` if there is no runtime or a
        graph is being captured, and ``ValueError`` if the number of parameter bytes that a
        kernel takes is not that of its step.
        """
        hip, binding = self._runtime()
        layout = arguments.layout_of(program, lambda _: ())
        index = program.device.index
        functions = [self._load(hip, kernel, index) for kernel in kernels]
        for kernel, loaded, step in zip(kernels, functions, program.steps, strict=True):
            # The runtime reads as many bytes as the kernel takes, whatever was given.
            taken = arguments.params_bytes(step.plan)
            if loaded.params_bytes != taken:
                raise ValueError(
                    f"{kernel.kernel.name} takes {loaded.params_bytes} bytes of parameters, "
                    f"got {taken}"
                )
        grids = [step.blocks for step in program.steps]
        known = [0 if isinstance(blocks, Size) else blocks for blocks in grids]
        threads = [step.threads for step in program.steps]
        of_code = [loaded.function for loaded in functions]
        steps = list(zip(of_code, known, threads, layout.starts, strict=True))

        def calls_of(address: int) -> arguments.Calls:
            return binding.calls_of(steps, address)

        def recover(error: int, step: int, call: object) -> None:
            name, blocks = kernels[step].kernel.name, program.steps[step].blocks
            raise hip.failure(
                error, f"{name} was not launched (grid ({blocks}, 1, 1), device {index})"
            )

        return arguments.launcher(layout, index, binding.run, calls_of, recover, (), grids)

    def describe(self) -> str:
        """Describe the runtime in use and its binding, for reports: ``HIP 7.0.51831,
        /…/libamdhip64.so.7, launched by hip-python 10.0.0``.

        Raises ``RuntimeError`` if there is none.
        """
        hip, binding = self._runtime()
        return f"HIP {hip.version()}, {hip.path}, launched by {binding.name}"

    def _runtime(self) -> tuple[Hip, Binding]:
        reason = self.why_unavailable()
        if self._hip is None or self._binding is None:
            raise RuntimeError(reason)
        return self._hip, self._binding

    def _load(self, hip: Hip, kernel: Code, index: int) -> Loaded:
        with self._lock:
            found = self._loaded.get((kernel.digest, index))
            if found is None:
                with _Current(hip, index, _current_device(hip)):
                    found = _load_module(hip, kernel, index)
                self._loaded[kernel.digest, index] = found
        return found


def _open() -> tuple[Hip, Binding] | str:
    """Return torch's HIP runtime and its binding, or the reason why there is none."""
    if torch.version.hip is None:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        return f"torch has no HIP runtime loaded: this is a {build} build of torch"
    try:
        path = libamdhip64.the_copy()
    except OSError as error:
        return (
            "cannot find torch's HIP runtime: the list of loaded libraries is not readable "
            f"({error})"
        )
    except RuntimeError as error:
        return str(error)
    try:
        hip = Hip(path)
        hip.device_count()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be used: {error}"
    except libamdhip64.HipError as error:
        return str(error)
    try:
        return hip, HipPython(hip)
    except runtime_hip_python.Refused as error:
        return hip, libamdhip64.Ctypes(hip, str(error))


def _load_module(hip: Hip, kernel: Code, index: int) -> Loaded:
    """Load ``kernel`` on the current device, ``index``. Raises as ``launch_of`` does."""
    name = kernel.kernel.name
    capturing = ctypes.c_int()
    hip.check(
        hip.calls.hipStreamIsCapturing(_torch.current_stream(index), ctypes.byref(capturing)),
        f"{name} was not loaded on device {index}",
    )
    # A module takes memory and copies to the device, outside the graph and not repeated by it.
    if capturing.value:
        raise RuntimeError(
            f"{name} is not loaded on device {index} and cannot be while a graph is captured: "
            "run the same attention once before the capture"
        )
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = hip.calls.hipModuleLoadData(ctypes.byref(module), kernel.data)
    if code in libamdhip64.BAD_IMAGE:
        failure = hip.failure(code, f"{name} was not loaded on device {index}")
        theirs = device.of(torch.device("cuda", index)).arch
        raise CodeObjectError(
            f"{failure}. The code object is for {codeobject.parse(kernel.data).arch}, "
            f"the device is {theirs}"
        )
    hip.check(code, f"{name} was not loaded on device {index}")
    code = hip.calls.hipModuleGetFunction(ctypes.byref(function), module, name.encode())
    if code == libamdhip64.NOT_FOUND:
        raise CodeObjectError(str(hip.failure(code, f"no kernel {name!r} in its code object")))
    hip.check(code, f"{name} was not found on device {index}")
    visible = (a for a in kernel.kernel.arguments if not a.kind.startswith("hidden_"))
    return Loaded(function.value or 0, sum(a.size for a in visible), kernel.data)


def _current_device(hip: Hip) -> int:
    index = ctypes.c_int()
    code = hip.calls.hipGetDevice(ctypes.byref(index))
    if code:
        raise hip.failure(code, "the HIP runtime does not report the current device")
    return index.value


class _Current:
    """Make device ``index`` current in this thread for a ``with`` block, then restore the previous
    one."""

    def __init__(self, hip: Hip, index: int, before: int) -> None:
        self._hip, self._index, self._before = hip, index, before

    def __enter__(self) -> None:
        self._set(self._index)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, index: int) -> None:
        self._hip.check(self._hip.calls.hipSetDevice(index), f"device {index} was not made current")
