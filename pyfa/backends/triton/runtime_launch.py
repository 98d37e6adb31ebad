"""Launches through the CUDA driver itself: the arguments are one packed struct.

On the host of an H200 a launch of attention's 57 arguments takes 6.0 µs this way, of which 5.0 are
the driver's, where Triton's launcher took 12.0 in the same run.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from typing import Any

import torch

from .specs import Spec

_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "fp32": "f"}
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_…
_POINTER = struct.Struct("Q")
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Code:
    """A compiled kernel as the driver sees it. ``own``: how many pointers of Triton's own follow
    the arguments; the first is to ``scratch`` bytes a program, for the copy engine's descriptors.
    """

    def __init__(self, compiled: Any, layout: struct.Struct, own: int, index: int) -> None:
        self.function: int = compiled.function
        self.threads: int = 32 * compiled.metadata.num_warps
        self.shared: int = compiled.metadata.shared
        self.scratch: int = compiled.metadata.global_scratch_size
        self.layout = layout
        self.own = own
        self.index = index


class Launch:
    """A kernel with a block of arguments, of which each call gives the first ``count`` anew."""

    def __init__(self, code: Code, arguments: tuple[Any, ...], count: int) -> None:
        driver = _driver()
        assert driver is not None
        self._buffer = ctypes.create_string_buffer(code.layout.size)
        code.layout.pack_into(self._buffer, 0, *arguments, *(0,) * code.own)
        whole = count == len(arguments)
        self._pack = (code.layout if whole else struct.Struct(f"{count}Q")).pack_into
        self._own = (0,) * (code.own if whole else 0)
        self._scratch, self._scratch_at = code.scratch, code.layout.size - 8 * code.own
        self._size = ctypes.c_size_t(code.layout.size)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self._buffer), _SIZE, ctypes.addressof(self._size), _END
        )
        # ctypes converts Python's integers to 64 bits only by objects like these.
        self._where = ctypes.c_void_p(ctypes.addressof(self._extra))
        self._function, self._index = ctypes.c_void_p(code.function), code.index
        self._device = torch.device("cuda", code.index)
        self._threads, self._shared = code.threads, code.shared
        self._run = driver.cuLaunchKernel
        # The driver copies the arguments before it returns; until then they are one thread's.
        self._lock = threading.Lock()

    def __call__(self, programs: int, *first: Any) -> None:
        number = _stream_of(self._index)
        stream = ctypes.c_void_p(number) if number else None
        scratch = None
        if self._scratch:
            # Freed when this returns, and so given to nothing but what the stream runs later.
            scratch = torch.empty(programs * self._scratch, dtype=torch.int8, device=self._device)
        with self._lock:
            self._pack(self._buffer, 0, *first, *self._own)
            if scratch is not None:
                _POINTER.pack_into(self._buffer, self._scratch_at, scratch.data_ptr())
            error = self._run(
                self._function, programs, 1, 1, self._threads, 1, 1, self._shared, stream, None,
                self._where,
            )  # fmt: skip
        if error:
            self._recover(error, programs, first)

    def _recover(self, error: int, programs: int, first: tuple[Any, ...]) -> None:
        """A thread that has done nothing on its device yet has no context; else an error."""
        if error == _NO_CONTEXT and _use_primary_context(self._index):
            self(programs, *first)
            return
        raise RuntimeError(f"cuLaunchKernel failed with CUDA error {error}")


@functools.cache
def _driver() -> Any:
    """libcuda, or None where it is not there or older than CUDA 12.4."""
    if torch.version.cuda is None or not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.POINTER(ctypes.c_size_t)
        library.cuFuncGetParamInfo.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number)
    except (OSError, AttributeError):
        return None
    return library


def _use_primary_context(index: int) -> bool:
    """Make the device's primary context, which is torch's, this thread's."""
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return False
    return not driver.cuCtxSetCurrent(context)


def code_of(compiled: Any, spec: Spec, index: int | None) -> Code | None:
    """``compiled`` for direct launches, or None where only Triton's launcher knows how."""
    driver = _driver()
    metadata = compiled.metadata
    # Arguments that one variant compiles in still come with every call.
    constant = any(not name.isupper() for name in spec.constants)
    special = metadata.num_ctas != 1 or any(
        getattr(metadata, name, False)
        for name in ("launch_cooperative_grid", "launch_pdl", "profile_scratch_size")
    )  # fmt: skip
    if driver is None or index is None or constant or special:
        return None
    kinds = [kind for kind in spec.signature.values() if kind != "constexpr"]
    places = _places(driver, compiled.function)
    own = len(places) - len(kinds)
    if own < (metadata.global_scratch_size > 0):
        return None
    formats = ["Q" if kind[0] == "*" else _FORMATS[kind] for kind in kinds] + ["Q"] * own
    sizes = [struct.calcsize(each) for each in formats]
    ends = [struct.calcsize("".join(formats[: i + 1])) for i in range(len(formats))]
    if places != [(end - size, size) for end, size in zip(ends, sizes, strict=True)]:
        return None
    return Code(compiled, struct.Struct("".join(formats)), own, index)


def _places(driver: Any, function: int) -> list[tuple[int, int]]:
    """(offset, size) of each parameter, as the driver read them from the code."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver.cuFuncGetParamInfo(
        function, len(found), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append((offset.value, size.value))
    return found
