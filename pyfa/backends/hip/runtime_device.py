"""Runs code objects on an AMD GPU, beside PyTorch: its HIP runtime, its devices, its streams.

A launch neither waits for the device nor allocates on it, so that it can be captured into a graph.
A code object is loaded once per device, when the first program with it is bound, and stays until
the process ends: graphs and launches in flight hold its function.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import _torch, codeobject, device, topology
from ..._torch import Empty
from ...errors import CodeObjectError
from ...problem import Problem
from ..common import arguments
from ..common.program import Launch, Program
from . import libamdhip64, plans
from .code import Code
from .libamdhip64 import Hip


class Loaded(NamedTuple):
    """A kernel on one device: its ``hipFunction_t``, the bytes of its parameters, its image.

    ``image`` is kept because the runtime may read it for as long as the module lives: CLR's
    FatBinaryInfo holds the pointer that it was given and makes no copy.
    """

    function: int
    params_bytes: int
    image: bytes


class Shape(NamedTuple):
    """What of a device a grid is fitted to; 0 where nobody tells."""

    units: int
    dies: int


class DeviceRuntime:
    """The runtime of the ``hip`` backend. Safe to use from several threads."""

    APART = False

    def __init__(self) -> None:
        self._hip: Hip | None = None
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._lock = threading.Lock()

    def why_unavailable(self) -> str | None:
        """Why nothing can be launched from this process; None where it can.

        Asked again until it is None, since a HIP runtime may be loaded later, and never afterwards.
        """
        with self._lock:
            if self._hip is not None:
                return None
            reason, self._hip = _open()
            return reason

    def why_not(self, problem: Problem) -> str | None:
        """Why the problem's device is not one that the kernels are compiled for."""
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
        """``program`` as one launch on torch's current stream, of the code of each of its steps.

        Loads what is not on the device yet. Raises ``CodeObjectError`` where the device refuses the
        code, ``HipError`` where the runtime fails, ``RuntimeError`` where there is no runtime or a
        graph is being captured, ``ValueError`` where a kernel takes other parameters.
        """
        hip, layout = self._runtime(), arguments.layout_of(program, lambda _: ())
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
        steps = [
            (loaded.function, step.blocks, step.threads, start)
            for loaded, step, start in zip(functions, program.steps, layout.starts, strict=True)
        ]

        def calls_of(address: int) -> arguments.Calls:
            return _calls(steps, address)

        def recover(error: int, step: int, call: object) -> None:
            name, blocks = kernels[step].kernel.name, program.steps[step].blocks
            raise hip.failure(
                error, f"{name} was not launched (grid {(blocks, 1, 1)}, device {index})"
            )

        run = hip.calls.hipModuleLaunchKernel
        return arguments.launcher(layout, index, run, calls_of, recover)

    def shape(self, index: int) -> Shape:
        """CUs and XCDs of device ``index`` in its partition mode.

        Raises ``RuntimeError`` where there is no runtime and ``HipError`` where it fails.
        """
        hip = self._runtime()
        units = hip.attribute(libamdhip64.MULTIPROCESSOR_COUNT, index) or 0
        dies = hip.attribute(libamdhip64.NUMBER_OF_XCCS, index)
        return Shape(units, dies or topology.dies(hip.bus_id(index)) or 0)

    def describe(self) -> str:
        """The runtime in use, for reports: ``HIP 7.0.51831, /…/libamdhip64.so.7``.

        Raises ``RuntimeError`` where there is none.
        """
        hip = self._runtime()
        return f"HIP {hip.version()}, {hip.path}"

    def _runtime(self) -> Hip:
        reason = self.why_unavailable()
        if self._hip is None:
            raise RuntimeError(reason)
        return self._hip

    def _load(self, hip: Hip, kernel: Code, index: int) -> Loaded:
        with self._lock:
            found = self._loaded.get((kernel.digest, index))
            if found is None:
                with _Current(hip, index, _current_device(hip)):
                    found = _load_module(hip, kernel, index)
                self._loaded[kernel.digest, index] = found
        return found


def _calls(steps: Sequence[tuple[int, int, int, int]], address: int) -> arguments.Calls:
    """What ``hipModuleLaunchKernel`` takes for each (function, blocks, threads, start of its
    arguments), with all arguments at ``address``."""
    handle = ctypes.c_void_p()
    calls = []
    for function, blocks, threads, start in steps:
        # kernelParams is the address of one pointer, to the one struct. The bytes are copied before
        # the call returns, also into a graph. Dynamic LDS is 0: kernels declare what they use.
        pointers = (ctypes.c_void_p * 1)(address + start)
        grid = (ctypes.c_uint(blocks), _ONE, _ONE, ctypes.c_uint(threads), _ONE, _ONE, _NONE)
        calls.append((ctypes.c_void_p(function), *grid, handle, pointers, None))

    def set_stream(stream: int) -> None:
        handle.value = stream

    return calls, set_stream


_ONE, _NONE = ctypes.c_uint(1), ctypes.c_uint(0)


def _open() -> tuple[str | None, Hip | None]:
    """torch's HIP runtime, or the reason why there is none."""
    if torch.version.hip is None:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        return f"torch has no HIP runtime loaded: this is a {build} build of torch", None
    try:
        paths = libamdhip64.copies()
    except OSError as error:
        return f"torch's HIP runtime cannot be found: no list of what is loaded ({error})", None
    if not paths:
        return f"no libamdhip64 is loaded, though torch is a ROCm {torch.version.hip} build", None
    if len(paths) > 1:
        return (
            f"{len(paths)} HIP runtimes are loaded, {' and '.join(paths)}: kernels of one fail on "
            "the streams of another (error 709). Keep torch's: see what LD_LIBRARY_PATH and "
            "LD_PRELOAD name, and what was imported"
        ), None
    try:
        hip = Hip(paths[0])
        hip.device_count()
    except (OSError, AttributeError) as error:
        return f"{paths[0]} cannot be used: {error}", None
    except libamdhip64.HipError as error:
        return str(error), None
    return None, hip


def _load_module(hip: Hip, kernel: Code, index: int) -> Loaded:
    """Loads ``kernel`` on the current device, ``index``. Raises what ``prepare`` says."""
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
        raise hip.failure(code, "the HIP runtime does not tell the current device")
    return index.value


class _Current:
    """Makes device ``index`` current in this thread for a ``with`` block, then ``before`` again."""

    def __init__(self, hip: Hip, index: int, before: int) -> None:
        self._hip, self._index, self._before = hip, index, before

    def __enter__(self) -> None:
        self._set(self._index)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, index: int) -> None:
        self._hip.check(self._hip.calls.hipSetDevice(index), f"device {index} was not made current")
