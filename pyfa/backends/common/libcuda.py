"""NVIDIA's driver library by ctypes: loading code, and launches with prepared arguments.

On the host of an H200 ``cuLaunchKernelEx`` takes 3.9 µs this way,
``cuLaunchKernel`` 4.1 to 4.6 by ctypes and 4.0 through cuda-bindings, all in one run.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from typing import Any

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


class Launch:
    """A kernel with a block of arguments, of which each call gives the leading ones anew.

    ``function``: a CUfunction on device ``index``. ``shared``: bytes of dynamic shared memory.
    ``arguments``: the kernel's parameters as they lie in memory, and ``first`` the struct format of
    what comes anew, as "5Q". Safe to use from several threads.
    """

    def __init__(
        self, function: int, index: int, threads: int, shared: int, arguments: bytes, first: str
    ) -> None:
        driver = library()
        assert driver is not None
        self._buffer = ctypes.create_string_buffer(arguments, len(arguments))
        self._pack = struct.Struct(first).pack_into
        self._size = ctypes.c_size_t(len(arguments))
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self._buffer), _SIZE, ctypes.addressof(self._size), _END
        )
        self._config = _Config((0, 1, 1), (threads, 1, 1), shared, None, None, 0)
        # ctypes converts Python's integers to 64 bits only by objects like these.
        self._arguments = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(function),
            None,
            ctypes.c_void_p(ctypes.addressof(self._extra)),
        )
        self._blocks = self._config.blocks
        self._known_blocks, self._stream = 0, 0
        self._index = index
        self._run = driver.cuLaunchKernelEx
        # The driver copies the arguments before it returns; until then they are one thread's.
        self._lock = threading.Lock()

    def __call__(self, blocks: int, *first: Any) -> None:
        """Queue ``blocks`` blocks on torch's current stream. ``RuntimeError`` where that fails."""
        stream = _current_stream(self._index)
        with self._lock:
            self._pack(self._buffer, 0, *first)
            if blocks != self._known_blocks:
                self._blocks[0] = self._known_blocks = blocks
            if stream != self._stream:
                self._config.stream = self._stream = stream
            error = self._run(*self._arguments)
        if error:
            self._recover(error, blocks, first)

    def _recover(self, error: int, blocks: int, first: tuple[Any, ...]) -> None:
        """A thread that has done nothing on its device yet has no context; else an error."""
        if error == _NO_CONTEXT and _use_primary_context(self._index):
            self(blocks, *first)
            return
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
