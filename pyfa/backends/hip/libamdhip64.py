"""The HIP runtime that torch has mapped: find it, open it without a second copy, check its calls.

Two copies of libamdhip64 in a process are two runtimes, and a kernel of one fails on every stream
of the other but the default (error 709). So this module does not search the disk: it opens the one
copy in ``/proc/self/maps`` by its path with ``RTLD_NOLOAD``, which never maps another.

ctypes binds it, whatever is installed. ``runtime_hip_python`` launches instead where it can.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..common.arguments import Calls

NO_DEVICE = 100
# The errors of hipModuleLoadData for an image that it cannot read or that is for another GPU:
# InvalidImage, NoBinaryForGpu, InvalidKernelFile, SharedObjectInitFailed.
BAD_IMAGE = frozenset({200, 209, 218, 303})
NOT_FOUND = 500
FOREIGN_STREAM = 709

_MAPS = Path("/proc/self/maps")
# libamdhip64.so, libamdhip64.so.7, and what auditwheel makes of them: libamdhip64-1a2b3c4d.so.7.
_NAME = re.compile(r"libamdhip64(-[0-9a-f]+)?\.so[.0-9]*")

_INT, _UINT, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "hipGetDeviceCount": (_POINTER,),
    "hipGetDevice": (_POINTER,),
    "hipSetDevice": (_INT,),
    "hipDeviceGetAttribute": (_POINTER, _INT, _INT),
    "hipRuntimeGetVersion": (_POINTER,),
    "hipModuleLoadData": (_POINTER, ctypes.c_char_p),
    "hipModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "hipModuleLaunchKernel": (_POINTER, *(_UINT,) * 7, _POINTER, _POINTER, _POINTER),
    "hipStreamIsCapturing": (_POINTER, _POINTER),
    "hipGetLastError": (),
    "hipPeekAtLastError": (),
    "hipGetErrorName": (_INT,),
    "hipGetErrorString": (_INT,),
}

_AFTER_A_FAULT = (
    "an earlier kernel failed and the device is lost to this process; AMD_SERIALIZE_KERNEL=3 makes "
    "each kernel report its own failure"
)
_HINTS = {
    2: "device memory is full; torch.cuda.empty_cache() returns the part that torch holds",
    NO_DEVICE: "check that /dev/kfd exists, that this user may open it (groups render and video), "
    "and the values of HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
    700: _AFTER_A_FAULT,
    FOREIGN_STREAM: "a stream of another HIP runtime: check that only one libamdhip64 is loaded",
    719: _AFTER_A_FAULT,
    **dict.fromkeys(range(900, 909), "not allowed while a stream is captured into a graph"),
}


class HipError(RuntimeError):
    """A call of the HIP runtime failed. ``code`` is its ``hipError_t``."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


def copies(maps: Iterable[str] | None = None) -> list[str]:
    """Return the paths of the different files named libamdhip64 that this process has mapped.

    ``maps`` are lines of ``/proc/self/maps``, read now if not given. Files are compared by device
    and inode, so one file with two names counts once. Raises ``OSError`` if the list cannot be
    read.
    """
    if maps is None:
        with _MAPS.open(encoding="utf-8", errors="surrogateescape") as lines:
            return copies(lines)
    found: dict[tuple[str, str], str] = {}
    for line in maps:
        if "libamdhip64" not in line:
            continue
        _addresses, _rights, _offset, device, inode, path = line.rstrip("\n").split(None, 5)
        # A file that a package manager has replaced on disk still runs in this process.
        path = path.removesuffix(" (deleted)")
        if _NAME.fullmatch(os.path.basename(path)):
            found.setdefault((device, inode), path)
    return list(found.values())


def the_copy() -> str:
    """Return the path of the only libamdhip64 that is mapped.

    Raises ``OSError`` as ``copies`` does, and ``RuntimeError`` if there are several copies or none.
    """
    paths = copies()
    if not paths:
        raise RuntimeError(
            f"no libamdhip64 is loaded, though torch is a ROCm {torch.version.hip} build"
        )
    if len(paths) > 1:
        raise RuntimeError(
            f"{len(paths)} HIP runtimes are loaded, {' and '.join(paths)}: kernels of one fail on "
            "the streams of another (error 709). Keep only torch's: check LD_LIBRARY_PATH, "
            "LD_PRELOAD and the imported packages"
        )
    return paths[0]


class Hip:
    """The functions of one mapped copy, ``calls``, and the meaning of their return codes.

    Raises ``OSError`` if ``path`` is not mapped, and ``AttributeError`` if a function is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_LOCAL
        self.calls = ctypes.CDLL(path, mode=flags)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.calls, name)
            function.argtypes = arguments
            function.restype = _INT
        self.calls.hipGetErrorName.restype = ctypes.c_char_p
        self.calls.hipGetErrorString.restype = ctypes.c_char_p

    def error(self, code: int) -> str:
        """Return ``code`` in words: ``hipErrorNoDevice (100), no ROCm-capable device is
        detected``."""
        name, text = self.calls.hipGetErrorName(code), self.calls.hipGetErrorString(code)
        words = f"{(name or b'unknown error').decode()} ({code})"
        return f"{words}, {text.decode()}" if text and text != name else words

    def check(self, code: int, what: str) -> None:
        """Raise ``HipError`` unless ``code`` is success. The message begins with ``what``."""
        if code:
            raise self.failure(code, what)

    def failure(self, code: int, what: str) -> HipError:
        """Return the error for ``code``, which is not success."""
        # The runtime keeps the last error of a thread: torch's next check would report ours.
        self.calls.hipGetLastError()
        message = f"{what}: {self.error(code)}"
        if code in _HINTS:
            message += f"; {_HINTS[code]}"
        if code == FOREIGN_STREAM:
            message += f" (used: {self.path}; loaded: {', '.join(copies())})"
        return HipError(message, code)

    def device_count(self) -> int:
        """Return the number of GPUs. Raises ``HipError``, also if there is none."""
        count = _INT()
        self.check(self.calls.hipGetDeviceCount(ctypes.byref(count)), "the HIP runtime has no GPU")
        return count.value

    def version(self) -> str:
        """Return the runtime's version, such as ``7.0.51831``. Raises ``HipError``."""
        number = _INT()
        self.check(
            self.calls.hipRuntimeGetVersion(ctypes.byref(number)),
            "the HIP runtime does not report its version",
        )
        major, rest = divmod(number.value, 10_000_000)
        minor, patch = divmod(rest, 100_000)
        return f"{major}.{minor}.{patch}"


_ONE, _NONE = _UINT(1), _UINT(0)


class Ctypes:
    """Launches through ctypes. ``name`` is for reports: it says why hip-python does not launch."""

    def __init__(self, hip: Hip, why: str) -> None:
        self.name = f"ctypes: {why}"
        self.run = hip.calls.hipModuleLaunchKernel

    @staticmethod
    def calls_of(steps: Sequence[tuple[int, int, int, int]], address: int) -> Calls:
        """Return the arguments of ``run`` for each (function, blocks, threads, start of its
        arguments), with all arguments at ``address``."""
        handle, grids = _POINTER(), [_UINT(blocks) for _, blocks, *_ in steps]
        calls = []
        for (function, _, threads, start), blocks in zip(steps, grids, strict=True):
            # kernelParams is the address of one pointer, to the one struct. The bytes are copied
            # before the call returns, also into a graph. Dynamic LDS is 0: kernels declare what
            # they use.
            pointers = (_POINTER * 1)(address + start)
            grid = (blocks, _ONE, _ONE, _UINT(threads), _ONE, _ONE, _NONE)
            calls.append((_POINTER(function), *grid, handle, pointers, None))

        def set_stream(stream: int) -> None:
            handle.value = stream

        def set_blocks(found: Iterable[tuple[int, int]]) -> None:
            for step, blocks in found:
                grids[step].value = blocks

        return Calls(calls, set_stream, set_blocks)
