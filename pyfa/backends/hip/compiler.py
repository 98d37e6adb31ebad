"""Compile HIP source to a gfx9 code object with the pip-installed clang of ``ziglang``: no ROCm, no
GPU.

The clang in ziglang has no HIP offloading driver, so its three steps are run here: HIP to bitcode,
bitcode to object, and the linker. Only the first step accepts ``-mcode-object-version``. Bytes are
the same for the same source, options and ziglang: the source is given a fixed name, debug
information is off, and the linker writes no build id.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyfa.errors import CodeObjectError, CompileError
from pyfa.sources import keep_failed

# EI_ABIVERSION of code object v5. Version 6 needs ROCm 6.3.
ABI_VERSION = 3
# The compiler of the bundle, as the extras pin it: what version() says where that is installed.
PINNED = "ziglang 0.17.0"
SOURCE_NAME = "kernel.hip"
_TO_BITCODE = (
    "-x", "hip", "--offload-device-only", "-nogpulib", "-nogpuinc", "-fgpu-rdc", "-c",
    "-emit-llvm", "-mcode-object-version=5", "-std=c++17",
)  # fmt: skip
_TO_OBJECT = ("-target", "amdgcn-amd-amdhsa", "-nogpulib", "-c", "-x", "ir")


def zig() -> Path | None:
    """Return the path of ziglang's one binary, or None if the package is not installed."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "zig"
    return binary if binary.exists() else None


def why_unavailable() -> str | None:
    """Return why HIP kernels cannot be compiled here; None if they can."""
    if zig() is None:
        return (
            "the HIP compiler is not installed (pip install 'pyfa-attention[compile]' brings "
            "ziglang)"
        )
    return None


def version() -> str:
    """Return the compiler's name and version, which cache keys contain, such as
    ``ziglang 0.17.0``. Needs ziglang to be installed."""
    return f"ziglang {importlib.metadata.version('ziglang')}"


def compile_hip(source: str, *, arch: str, options: Sequence[str]) -> bytes:
    """Compile one flat HIP source (no includes) to a code object, version 5.

    ``options`` go to the HIP-to-bitcode step (``-D``, ``-f…``) and to the code generator where they
    start with ``-O`` or ``-mllvm=``. Raises ``CompileError`` with the compiler's log and the path
    of the source, which is kept. The caller checks spills and scratch, with ``pyfa.codeobject``.
    """
    data = _built(source, arch, options, "kernel.hsaco")
    if data[:4] != b"\x7fELF" or data[8] != ABI_VERSION:
        raise CodeObjectError(f"the compiler made EI_ABIVERSION {data[8]}, expected {ABI_VERSION}")
    return data


def assembly(source: str, *, arch: str, options: Sequence[str]) -> str:
    """Return the assembly of the same code with the place of each instruction in ``source``, as
    ``.loc`` directives. Raises ``CompileError``."""
    return _built(source, arch, options, "kernel.s").decode()


def _built(source: str, arch: str, options: Sequence[str], file: str) -> bytes:
    """Return what the compiler writes to ``file``: "kernel.hsaco", or "kernel.s" with lines."""
    binary = zig()
    if binary is None:
        raise CompileError("cannot compile HIP", why_unavailable() or "", "<memory>")
    level = [option for option in options if re.fullmatch(r"-O[0-3s]", option)] or ["-O3"]
    passes = [part for o in options if o.startswith("-mllvm=") for part in ("-mllvm", o[7:])]
    front = [o for o in options if o not in level and not o.startswith("-mllvm=")]
    lines = file == "kernel.s"
    debug = "-gline-tables-only" if lines else "-g0"
    result = ["-S", "-o", file] if lines else ["-o", "kernel.o"]
    steps = [
        ("HIP to bitcode", ["clang", *_TO_BITCODE, debug, f"--offload-arch={arch}", *level,
                            *passes, *front, SOURCE_NAME, "-o", "kernel.bc"]),
        ("bitcode to object", ["clang", *_TO_OBJECT, debug, f"-mcpu={arch}", *level, *passes,
                               "kernel.bc", *result]),
        ("linking", ["ld.lld", "-shared", "--build-id=none", "kernel.o", "-o", file]),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="pyfa-hip-") as folder:
        Path(folder, SOURCE_NAME).write_text(source, encoding="utf-8")
        for what, arguments in steps[: 2 if lines else 3]:
            done = subprocess.run(
                [str(binary), *arguments], cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise CompileError(
                    f"{what} failed for {arch}",
                    done.stderr + done.stdout,
                    keep_failed(source, ".hip"),
                )
        return Path(folder, file).read_bytes()
