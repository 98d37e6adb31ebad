"""NVIDIA's driver library by ctypes: loading code, and launches with prepared arguments.

On the host of an H200 ``cuLaunchKernelEx`` takes 3.9 µs this way,
``cuLaunchKernel`` 4.1 to 4.6 by ctypes and 4.0 through cuda-bindings, all in one run.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import CodeObjectError

_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_…
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# What cuModuleLoadData says of code that is not for this device, or not code.
_BAD_CODE = {200: "invalid image", 209: "no binary for this GPU", 218: "invalid PTX"}
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value has the size of the largest."""

    _fields_ = (("name", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16))


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_AHEAD = _Attribute(6, 0, (ctypes.c_int * 16)(1))


@functools.cache
def library() -> Any:
    """libcuda, or None where it is not there or older than CUDA 12.4."""
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
    """The CUDA version that the driver supports, as (12, 8); (0, 0) without a driver."""
    number = ctypes.c_int()
    if library() is None or library().cuDriverGetVersion(ctypes.byref(number)):
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


class Kernel(NamedTuple):
    """A CUfunction, the threads of its blocks, their bytes of dynamic shared memory.

    ``struct``: it takes one struct, which begins where the arguments do and may be shorter. The
    driver places it: a struct aligned to 64 bytes, as one with tensor maps, lies 48 bytes behind
    the start of the parameters. Otherwise the arguments are all of its parameters, as they lie.
    ``ahead``: it starts while the kernel in front of it on the stream still runs, once that one
    allows it, and waits by itself for what that one writes: kernels/cuda/ahead.h. Hopper and later.
    """

    function: int
    threads: int
    shared: int
    struct: bool = False
    ahead: bool = False


class _Block:
    """Arguments and launch configurations of some kernels, for one thread at a time."""

    __slots__ = ("_configs", "_kept", "buffer", "grids", "launches", "stream")

    def __init__(self, kernels: Sequence[Kernel], arguments: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(arguments, len(arguments))
        size = ctypes.c_size_t(len(arguments))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self.buffer), _SIZE, ctypes.addressof(size), _END
        )
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self._kept = size, extra, parameters
        self._configs = [
            _Config((0, 1, 1), (each.threads, 1, 1), each.shared, None, *_attributes(each))
            for each in kernels
        ]
        # ctypes converts Python's integers to 64 bits only by objects like these.
        self.launches = tuple(
            (
                ctypes.c_void_p(ctypes.addressof(config)),
                ctypes.c_void_p(each.function),
                ctypes.c_void_p(ctypes.addressof(parameters)) if each.struct else None,
                None if each.struct else ctypes.c_void_p(ctypes.addressof(extra)),
            )
            for config, each in zip(self._configs, kernels, strict=True)
        )
        self.grids: tuple[int, ...] = ()
        self.stream = 0

    def set_grids(self, grids: tuple[int, ...]) -> None:
        for config, blocks in zip(self._configs, grids, strict=True):
            config.blocks[0] = blocks
        self.grids = grids

    def set_stream(self, stream: int) -> None:
        for config in self._configs:
            config.stream = stream
        self.stream = stream


def _attributes(kernel: Kernel) -> tuple[int | None, int]:
    return (ctypes.addressof(_AHEAD), 1) if kernel.ahead else (None, 0)


def launcher(
    index: int,
    kernels: Sequence[Kernel],
    arguments: bytes,
    first: str,
    again: Sequence[tuple[int, int]] = (),
    taken: Sequence[tuple[int, Callable[[], int]]] = (),
) -> Callable[..., None]:
    """Kernels on device ``index`` with one block of arguments, which start one behind the other.

    The result takes the number of blocks of each, as a tuple, and the leading arguments anew; it
    queues them on torch's current stream, from any thread. ``arguments`` are the parameters as they
    lie in memory, of which each kernel takes as many as it has, and ``first`` the struct format of
    what comes anew, as "5Q". ``again``: bytes at which an address lies once more, each with its
    number among what comes anew. ``taken``: the same of addresses that a function gives at each
    launch.
    """
    driver = library()
    assert driver is not None
    run, pack = driver.cuLaunchKernelEx, struct.Struct(first).pack_into
    pack_address = struct.Struct("<Q").pack_into
    # The driver copies the arguments before it returns; until then they are one thread's. Taking
    # the last of a list and putting it back are atomic, need no lock (0.2 µs where these take 0.02)
    # and let a signal's handler launch in between. What raises is not put back.
    free: list[_Block] = []

    def launch(grids: tuple[int, ...], *first: Any) -> None:
        stream = _current_stream(index)
        try:
            block = free.pop()
        except IndexError:
            block = _Block(kernels, arguments)
        pack(block.buffer, 0, *first)
        for at, number in again:
            pack_address(block.buffer, at, first[number])
        for at, take in taken:
            pack_address(block.buffer, at, take())
        if grids is not block.grids:
            block.set_grids(grids)
        if stream != block.stream:
            block.set_stream(stream)
        for how in block.launches:
            error = run(*how)
            if error:
                _recover(error, index, functools.partial(run, *how))
        free.append(block)

    return launch


def _recover(error: int, index: int, again: Callable[[], int]) -> None:
    """A thread that has done nothing on its device yet has no context; else an error."""
    if error == _NO_CONTEXT and _use_primary_context(index):
        error = again()
    if error:
        raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {error}")


def load(code: bytes, name: str, index: int, shared: int) -> int:
    """The CUfunction ``name`` of a cubin, loaded on device ``index`` for good.

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
        if error == _NO_CONTEXT and _use_primary_context(index):
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


def _use_primary_context(index: int) -> bool:
    """Make the device's primary context, which is torch's, this thread's."""
    driver = library()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return False
    return not driver.cuCtxSetCurrent(context)
