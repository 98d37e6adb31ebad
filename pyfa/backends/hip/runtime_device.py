"""Runs code objects on an AMD GPU, beside PyTorch: its HIP runtime, its devices, its streams.

A launch neither waits for the device nor allocates on it, so that it can be captured into a graph.
A code object is loaded once per device, at ``prepare`` or else at its first launch, and stays until
the process ends: graphs and launches in flight hold its function.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ... import codeobject, device, topology
from ...errors import CodeObjectError
from ...problem import Problem
from . import libamdhip64, plans
from .code import Code
from .libamdhip64 import Hip


def _public_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


# The handle of torch's current stream on a device. The private function costs 0.2 µs, the public
# one builds a Stream and costs 4 µs (pytorch #78165); Inductor and Triton call it too.
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_stream
)


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

    def prepare(self, kernel: Code, index: int) -> None:
        """Loads ``kernel`` on device ``index`` unless it is there: before a graph is captured.

        Raises ``CodeObjectError`` where the device refuses the code, ``HipError`` where the
        runtime fails, ``RuntimeError`` where there is no runtime or a capture is under way.
        """
        self._load(self._runtime(), kernel, index)

    def launch(
        self,
        kernel: Code,
        grid: tuple[int, int, int],
        threads: int,
        params: bytes,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Queues one grid on torch's current stream of the tensors' device and returns.

        Raises ``ValueError`` where ``params`` has another size than the kernel's struct, what
        ``prepare`` raises, and ``HipError`` with the kernel's name where the launch fails.
        """
        index: int = next(iter(tensors.values())).device.index
        hip = self._hip or self._runtime()
        function, params_bytes, _image = self._loaded.get((kernel.digest, index)) or self._load(
            hip, kernel, index
        )
        # The runtime reads as many bytes as the kernel takes, whatever was given.
        if len(params) != params_bytes:
            raise ValueError(
                f"{kernel.kernel.name} takes {params_bytes} bytes of parameters, got {len(params)}"
            )
        # kernelParams is the address of one pointer, to the one struct. The bytes are copied before
        # the call returns, also into a graph. Dynamic LDS is 0: kernels declare what they use.
        pointers = ctypes.byref(ctypes.c_char_p(params))
        arguments = (function, *grid, threads, 1, 1, 0, current_stream(index), pointers, None)
        before = _current_device(hip)
        if before == index:
            code = hip.calls.hipModuleLaunchKernel(*arguments)
        else:
            # Handle 0, torch's default stream, is that of whichever device is current.
            with _Current(hip, index, before):
                code = hip.calls.hipModuleLaunchKernel(*arguments)
        if code:
            raise hip.failure(
                code, f"{kernel.kernel.name} was not launched (grid {grid}, device {index})"
            )

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
        hip.calls.hipStreamIsCapturing(current_stream(index), ctypes.byref(capturing)),
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
