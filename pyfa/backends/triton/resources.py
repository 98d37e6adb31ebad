"""The resources of a kernel on an arch, compiled ahead of time without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

from ... import codeobject
from ...arch import ARCHS
from . import specs
from .specs import Spec


class Resources(NamedTuple):
    """The resources of a compiled kernel. ``spill_bytes``: memory per lane for spilled registers.
    ``shared_bytes``: LDS or shared memory of a block."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    block_limit: int


def measure(spec: Spec, arch: str) -> Resources:
    """Compile ``spec`` for ``arch`` and read the resources from the code object."""
    compiled = specs.compile_for(spec, specs.target_of(arch))
    limits = ARCHS.get(arch)
    limit = limits.shared_bytes_per_block if limits else 0
    if arch.startswith("gfx"):
        kernel = next(iter(codeobject.parse(compiled.asm["hsaco"]).kernels.values()))
        return Resources(
            kernel.vgprs,
            kernel.scratch_bytes,
            compiled.metadata.shared,  # dynamic: the code object itself says 0
            limit,
        )
    registers, stack = _cubin(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared, limit)


def _cubin(data: Any) -> tuple[int, int]:
    """Return (registers, stack bytes) of a cubin, by the disassembler in Triton's wheel."""
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    tool = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if tool is None:
        return 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
