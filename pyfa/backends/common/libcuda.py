"""NVIDIA's driver library by ctypes: loading code, and launches with prepared arguments.

On the host of an H200 ``cuLaunchKernelEx`` takes 3.9 µs this way,
``cuLaunchKernel`` 4.1 to 4.6 by ctypes and 4.0 through cuda-bindings, all in one run.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import CodeObjectError
from ...sizes import Extent, Size
from . import arguments
from .arguments import Calls, Layout

_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_…
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# The errors of cuModuleLoadData for code of another device, and for data that is not code.
_BAD_CODE = {200: "invalid image", 209: "no binary for this GPU", 218: "invalid PTX"}
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Config(ctypes.Structure):
    """The struct CUlaunchConfig."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute; its value is as large as the largest attribute."""

    _fields_ = (("name", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16))


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_AHEAD = _Attribute(6, 0, (ctypes.c_int * 16)(1))


@functools.cache
def library() -> Any:
    """Return libcuda, or None if it is missing or older than CUDA 12.4."""
    if torch.version.cuda is None or not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL("libcuda.so.1")
        number = ctypes.POINTER(ctypes.c_size_t)
        found.cuFuncGetParamInfo.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number)
    except (OSError, AttributeError):
        return None
    return found


@functools.cache
def version() -> tuple[int, int]:
    """Return the CUDA version that the driver supports, as (12, 8); (0, 0) without a driver."""
    number = ctypes.c_int()
    if library() is None or library().cuDriverGetVersion(ctypes.byref(number)):
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


class Kernel(NamedTuple):
    """A CUfunction, its threads per block and its bytes of dynamic shared memory.

    ``struct``: the kernel takes one struct, which begins where the arguments begin and may be
    shorter. The driver places it: a struct aligned to 64 bytes, such as one with tensor maps, is 48
    bytes after the start of the parameters. Without ``struct`` the arguments are the kernel's
    parameters in memory order. ``ahead``: the kernel may start while the previous kernel on the
    stream still runs, once that kernel allows it, and waits by itself for that kernel's results
    (kernels/cuda/ahead.h; Hopper and later).
    """

    function: int
    threads: int
    shared: int
    struct: bool = False
    ahead: bool = False


class Launch(NamedTuple):
    """A kernel, its number of blocks, and the offset of its arguments among those of all kernels
    that are launched together."""

    kernel: Kernel
    blocks: Extent
    start: int = 0


def launcher(
    index: int,
    launches: Sequence[Launch],
    layout: Layout,
    taken: Sequence[tuple[int, Callable[[], int]]] = (),
) -> arguments.Start:
    """Return a function that starts kernels on device ``index`` in sequence; see
    ``arguments.launcher``."""
    driver = library()
    assert driver is not None
    run, size = driver.cuLaunchKernelEx, len(layout.data)

    def calls_of(address: int) -> Calls:
        return _calls(launches, address, size)

    def recover(error: int, step: int, call: tuple[Any, ...]) -> None:
        _recover(error, index, functools.partial(run, *call))

    blocks = [each.blocks for each in launches]
    return arguments.launcher(layout, index, run, calls_of, recover, taken, blocks)


def _calls(launches: Sequence[Launch], address: int, size: int) -> Calls:
    """Return the arguments of ``cuLaunchKernelEx`` for each of ``launches``, with kernel arguments
    at ``address``."""
    calls: list[tuple[Any, ...]] = []
    configs: list[_Config] = []
    kept: list[Any] = []
    for kernel, blocks, start in launches:
        known = 0 if isinstance(blocks, Size) else blocks
        config = _Config(
            (known, 1, 1), (kernel.threads, 1, 1), kernel.shared, None, *_attributes(kernel)
        )
        configs.append(config)
        parameters = extra = None
        if kernel.struct:
            parameters = (ctypes.c_void_p * 1)(address + start)
        else:
            count = ctypes.c_size_t(size)
            extra = (ctypes.c_void_p * 5)(_BUFFER, address, _SIZE, ctypes.addressof(count), _END)
            kept.append(count)
        # ctypes passes references as they are, and looks up the type of a number each time.
        function = ctypes.c_char.from_address(kernel.function)
        calls.append(tuple(map(_reference, (config, function, parameters, extra))))

    def set_stream(stream: int) -> None:
        for config in configs:
            config.stream = stream

    grids = [config.blocks for config in configs]  # views: each access makes one

    def set_blocks(found: Iterable[tuple[int, int]]) -> None:
        for step, blocks in found:
            grids[step][0] = blocks

    set_stream.kept = kept  # type: ignore[attr-defined]  # as long as the calls are
    return Calls(calls, set_stream, set_blocks)


def _reference(x: Any) -> Any:
    """Return the address of ``x``, which lives as long as the result, as an argument."""
    return None if x is None else ctypes.byref(x)


def _attributes(kernel: Kernel) -> tuple[int | None, int]:
    return (ctypes.addressof(_AHEAD), 1) if kernel.ahead else (None, 0)


def _recover(error: int, index: int, again: Callable[[], int]) -> None:
    """Give this thread a context if it has none, and retry; raise any other error."""
    if error == NO_CONTEXT and use_primary_context(index):
        error = again()
    if error:
        raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {error}")


def load(code: bytes, name: str, index: int, shared: int) -> int:
    """Load the CUfunction ``name`` of a cubin on device ``index``, where it stays until the process
    ends.

    ``shared``: the dynamic shared memory that it will be launched with. Raises ``CodeObjectError``
    where the device refuses the code, ``RuntimeError`` where the driver fails or a graph is being
    captured on torch's current stream.
    """
    driver = library()
    if driver is None:
        raise RuntimeError("there is no CUDA driver")
    with torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise RuntimeError(
                f"{name} is not loaded on device {index} and cannot be while a graph is captured: "
                "run the same attention once before the capture"
            )
        torch.cuda.current_stream(index).synchronize()  # makes the context of a fresh process
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        error = driver.cuModuleLoadData(ctypes.byref(module), code)
        if error == NO_CONTEXT and use_primary_context(index):
            error = driver.cuModuleLoadData(ctypes.byref(module), code)
        if error in _BAD_CODE:
            raise CodeObjectError(f"device {index} refuses {name}: {_BAD_CODE[error]}")
        _check(error, f"{name} was not loaded")
        error = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _check(error, f"no kernel {name} in its code")
        _check(
            driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared),
            f"{name} was not given {shared} bytes of shared memory",
        )
    return function.value or 0


def _check(error: int, what: str) -> None:
    if error:
        raise RuntimeError(f"{what}: CUDA error {error}")


def use_primary_context(index: int) -> bool:
    """Make the device's primary context, which torch uses, current in this thread."""
    driver = library()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return False
    return not driver.cuCtxSetCurrent(context)
