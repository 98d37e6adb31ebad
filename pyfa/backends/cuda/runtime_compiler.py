"""Compile CUDA source to a cubin with NVRTC, through cuda-core: no nvcc, no CUDA headers, no
GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import re
from collections.abc import Sequence

from ...errors import CompileError
from ...sources import keep_failed

# The versions that PyTorch's builds and the extra bring, newest first.
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
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
    try:
        version()
    except Exception as error:  # cuda-bindings has several kinds for a library that is not there
        return (
            f"cuda-bindings {importlib.metadata.version('cuda-bindings')} needs "
            f"NVRTC {major()}, which was not found: {error}"
        )
    return None


@functools.cache
def version() -> str:
    """Return the compiler for cache keys, such as ``nvrtc 13.0.88``. Fails without NVRTC."""
    for package in _NVRTC:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if int(found.split(".")[0]) == major():
            return f"nvrtc {found}"
    from cuda.bindings import nvrtc  # a toolkit's own: asking it takes 50 ms

    error, *numbers = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion failed with error {int(error)}")
    return "nvrtc " + ".".join(str(number) for number in numbers)


def major() -> int:
    """Return the CUDA major version that a driver needs to load what is compiled here."""
    return int(importlib.metadata.version("cuda-bindings").split(".")[0])


def compile_cuda(source: str, *, arch: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compile one flat CUDA source (no includes) to a cubin for ``arch``, such as "sm_80".

    Returns it with ptxas' report of registers and spills. ``options`` go to ptxas. Raises
    ``CompileError`` with the compiler's log and the path of the source, which is kept.
    """
    missing = why_unavailable()
    if missing:
        raise CompileError("cannot compile CUDA", missing, "<memory>")
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
