"""Launches through hip-python, bound to the HIP runtime that torch has mapped.

At its first call hip-python opens the libamdhip64 that its own search finds: in its package, by
rocm_sdk, ROCM_PATH or the loader. If torch brings its runtime with it, that maps a second copy,
and launches of one copy fail on streams of the other (error 709). Therefore the search returns the
mapped path during that one call, and ``HipPython`` launches only after a proof that hip-python
calls the runtime of torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..common import arguments
from .libamdhip64 import Hip

_NO_ATTRIBUTE = -1
_UNKNOWN = 999  # hipErrorUnknown


class Refused(RuntimeError):
    """Says why hip-python does not launch, as part of a sentence."""


class HipPython:
    """Launches through hip-python. ``name`` is for reports.

    Raises ``Refused`` if hip-python is missing, is too old, or is bound to another runtime than
    ``hip``.
    """

    def __init__(self, hip: Hip) -> None:
        try:
            self._hip = importlib.import_module("rocm.bindings.hip")
            search: Any = importlib.import_module("rocm.bindings.util.paths")
            theirs = search.get_library_path
            types = importlib.import_module("rocm.bindings.util.types")
            helpers = importlib.import_module("rocm.bindings._hip_helpers")
            version: str = importlib.import_module("rocm.version").ROCM_VERSION_NAME
            self._pointers, self._extra = types.ListOfPointer, helpers.HipModuleLaunchKernel_extra
        except ModuleNotFoundError as error:
            raise Refused(f"hip-python 10 is not installed (no module {error.name})") from None
        except Exception as error:
            raise Refused(f"hip-python cannot be imported: {error}") from None

        def mapped(shortname: str, *rest: Any, **named: Any) -> bytes:
            if shortname == "amdhip64":
                return os.fsencode(hip.path)
            found: bytes = theirs(shortname, *rest, **named)
            return found

        search.get_library_path = mapped
        try:
            self._hip.hipRuntimeGetVersion()
        except Exception as error:
            raise Refused(f"hip-python did not open {hip.path}: {error}") from None
        finally:
            search.get_library_path = theirs
        if not self._is_bound_to(hip):
            raise Refused("hip-python is bound to another HIP runtime than torch's")
        self.name = f"hip-python {version}"
        self._launch = self._hip.hipModuleLaunchKernel
        self._last_error = hip.calls.hipPeekAtLastError

    def _is_bound_to(self, hip: Hip) -> bool:
        """Return whether an error made by one of the two is the other's last error, too: each
        runtime has its own."""
        pending = hip.calls.hipPeekAtLastError()
        if not pending:
            hip.calls.hipDeviceGetAttribute(ctypes.byref(ctypes.c_int()), _NO_ATTRIBUTE, 0)
        made = hip.calls.hipPeekAtLastError()
        (seen,) = self._hip.hipPeekAtLastError()
        if not pending:
            hip.calls.hipGetLastError()
        return bool(made) and int(seen) == made

    def run(self, *call: Any) -> int:
        """Call ``hipModuleLaunchKernel`` with the result of ``calls_of``; return its
        ``hipError_t``."""
        try:
            code: int = self._launch(*call)[0]
        except ValueError:  # a code that came after hip-python's list of them
            return self._last_error() or _UNKNOWN
        return code

    def calls_of(self, steps: Sequence[tuple[int, int, int, int]], address: int) -> arguments.Calls:
        """Implement ``libamdhip64.Ctypes.calls_of``."""
        hip, none = self._hip, self._extra(None)
        calls: list[tuple[Any, ...]] = []

        def set_stream(stream: int) -> None:
            handle = hip.ihipStream_t(stream)
            calls[:] = [(*call[:8], handle, *call[9:]) for call in calls]

        def set_blocks(found: Iterable[tuple[int, int]]) -> None:
            for step, blocks in found:
                function, _, *rest = calls[step]
                calls[step] = (function, blocks, *rest)

        for function, blocks, threads, start in steps:
            grid = (blocks, 1, 1, threads, 1, 1, 0)
            pointers = self._pointers([address + start])
            calls.append((hip.ihipModuleSymbol_t(function), *grid, None, pointers, none))
        return arguments.Calls(calls, set_stream, set_blocks)
