"""Compile CUDA source to a cubin with NVRTC, through cuda-core: no nvcc, no CUDA headers, no
GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import io
import os
import re
import threading
from collections.abc import Iterator, Sequence

from ...errors import CompileError
from ...sources import keep_failed

# The versions that PyTorch's builds and the extra bring, newest first.
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
# cuda-core replaces its package while it is imported, so that a second thread may find half of it:
# "cannot import name 'Program'" (cuda-core 1.2.2).
_importing = threading.Lock()
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@functools.cache
def why_unavailable() -> str | None:
    """Return why CUDA kernels cannot be compiled here; None if they can."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return (
                f"the package {package} is not installed "
                "(pip install 'pyfa-attention[cuda]' brings it)"
            )
    if any(found.version.startswith(f"{major()}.") for found in _packages()):
        return None  # loading it, 50 ms, waits for the first key
    try:
        version()
    except Exception as error:  # cuda-pathfinder has several kinds for a library that is not there
        return (
            f"cuda-bindings {importlib.metadata.version('cuda-bindings')} needs "
            f"NVRTC {major()}, which was not found: {error}"
        )
    return None


@functools.cache
def version() -> str:
    """Return the compiler for cache keys, such as ``nvrtc 13.0.88``. Fails without NVRTC.

    The loaded library itself gives its version: several packages may be installed, and a toolkit's
    or a preloaded library may belong to none of them.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    numbers = ctypes.c_int(), ctypes.c_int()
    error = ctypes.CDLL(path).nvrtcVersion(*map(ctypes.byref, numbers))
    if error:
        raise RuntimeError(f"nvrtcVersion failed with error {error}")
    release = ".".join(str(number.value) for number in numbers)
    for found in _packages():
        if found.version.startswith(f"{release}.") and _brought(found, path):
            return f"nvrtc {found.version}"
    return f"nvrtc {release} {_build_of(path)}"


def _packages() -> Iterator[importlib.metadata.Distribution]:
    for package in _NVRTC:
        yield from importlib.metadata.distributions(name=package)


def _brought(package: importlib.metadata.Distribution, path: str) -> bool:
    """Return whether ``package`` installed the file at ``path``, of this size: one that is
    installed over another leaves both of their records."""
    there = os.stat(path)
    return any(
        file.name == os.path.basename(path)
        and file.size == there.st_size
        and os.path.realpath(file.locate()) == os.path.realpath(path)
        for file in package.files or ()
    )


def _build_of(path: str) -> str:
    """Return what tells a library from others of its release: the build id that the linker
    wrote."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.segments import NoteSegment

    with open(path, "rb") as file:
        segments = ELFFile(file).iter_segments()
        notes = (note for x in segments if isinstance(x, NoteSegment) for note in x.iter_notes())
        for note in notes:
            if note["n_type"] == "NT_GNU_BUILD_ID":
                return str(note["n_desc"])
    return f"of {os.path.getsize(path)} bytes"


def major() -> int:
    """Return the CUDA major version that a driver needs to load what is compiled here."""
    return int(importlib.metadata.version("cuda-bindings").split(".")[0])


def compile_cuda(source: str, *, arch: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compile one flat CUDA source (no includes) to a cubin for ``arch``, such as "sm_80".

    Returns the cubin with ptxas' report of registers and spills. ``options`` go to ptxas. Raises
    ``CompileError`` with the compiler's log and the path of the source, which is kept.
    """
    missing = why_unavailable()
    if missing:
        raise CompileError("cannot compile CUDA", missing, "<memory>")
    with _importing:
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    given = ProgramOptions(arch=arch, std="c++17", ptxas_options=["-v", *options])
    try:
        code = Program(source, "c++", given).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core has its own kinds for NVRTC's and its own failures
        raise CompileError(
            f"NVRTC failed for {arch}",
            f"{error}\n{log.getvalue()}".strip(),
            keep_failed(source, ".cu"),
        ) from None
    return bytes(code), log.getvalue()


def spills(report: str) -> tuple[int, int]:
    """Return (bytes of stack, bytes spilled) per thread from ptxas' report on one kernel."""
    found = [[int(n) for n in match.groups()] for match in _SPILLS.finditer(report)]
    return sum(stack for stack, _, _ in found), sum(stores + loads for _, stores, loads in found)
