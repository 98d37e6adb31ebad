"""The emulator's record of a workgroup: every instruction, LDS addresses, accessed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfa.emulator import native

# The layouts of TraceEvent and TraceAccess in core/trace.h.
EVENT = np.dtype([("index", "u4"), ("wave", "u2"), ("accesses", "u2"), ("first", "u4")], align=True)
ACCESS = np.dtype([("kind", "u4"), ("bytes", "u4"), ("count", "u4"), ("first", "u4")], align=True)
LDS, MEMORY = 0, 1
LANES = 64


_COUNTS = ("events", "accesses", "lanes", "segments")


class _GroupTrace(ctypes.Structure):
    _fields_ = (
        ("workgroup", ctypes.c_uint64), ("waves", ctypes.c_uint32), ("failed", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in _COUNTS),
        *((f"room_{name}", ctypes.c_uint64) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in ("event", "access", "lane", "segment")),
    )  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """The trace of one workgroup. Events of several wavefronts are mixed; each wavefront's are in
    order.

    ``events``: EVENT records; ``index`` is the instruction's number in the code. ``accesses``:
    ACCESS records. An LDS access has 64 addresses in ``lanes`` (0xffffffff: off). A memory access
    has ``count`` different 64-byte ``segments`` for the ``bytes`` requested.
    """

    workgroup: int
    waves: int
    events: npt.NDArray[Any]
    accesses: npt.NDArray[Any]
    lanes: npt.NDArray[np.uint32]
    segments: npt.NDArray[np.uint64]


class Recorder:
    """The core's memory for the traces of some workgroups, numbered as x + y·X + z·X·Y."""

    def __init__(self, workgroups: Sequence[int]) -> None:
        self._library = native.load()
        self._library.emulator_trace_new.restype = ctypes.c_void_p
        self._library.emulator_trace_group.restype = ctypes.POINTER(_GroupTrace)
        numbers = (ctypes.c_uint64 * len(workgroups))(*workgroups)
        self.count = len(workgroups)
        self.handle = self._library.emulator_trace_new(numbers, ctypes.c_uint32(self.count))
        if not self.handle:
            raise MemoryError("no memory for a trace")

    def close(self) -> None:
        """Free the core's memory."""
        self._library.emulator_trace_free(ctypes.c_void_p(self.handle))
        self.handle = None

    def traces(self) -> tuple[Trace, ...]:
        """Return copies of the traces."""
        return tuple(self._one(n) for n in range(self.count))

    def _one(self, number: int) -> Trace:
        group = self._library.emulator_trace_group(ctypes.c_void_p(self.handle), number).contents

        if group.failed:
            raise MemoryError(f"no memory for the trace of workgroup {group.workgroup}")

        def copied(name: str, count: str, dtype: Any) -> npt.NDArray[Any]:
            address, length = getattr(group, name), int(getattr(group, count))
            size = length * np.dtype(dtype).itemsize
            raw = ctypes.string_at(address, size) if length else b""
            return np.frombuffer(raw, dtype)

        return Trace(
            int(group.workgroup),
            int(group.waves),
            copied("event", "events", EVENT),
            copied("access", "accesses", ACCESS),
            copied("lane", "lanes", np.uint32),
            copied("segment", "segments", np.uint64),
        )
