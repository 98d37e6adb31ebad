"""What the compiler makes of a plan and says of it, kept in a code cache."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import triton
import turns

from pyfa import cache, cubin
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import backward, code, plans, runtime_compiler
from pyfa.plan import Plan


class Compiled(NamedTuple):
    """A plan's cubin, and what it and ptxas' report say of the kernel."""

    kernel: cubin.Cubin
    report: str
    data: bytes


def compiled(plan: Plan, arch: str) -> Compiled:
    """The library keeps cubins alone, hence entries of another name."""
    source, target = code.source_of(plan), plans.compiled_for(arch, plan)

    def build() -> bytes:
        data, report = runtime_compiler.compile_cuda(source, arch=target)
        return report.encode() + data

    entry = cache.get_or_build(
        "reported",
        cache.key(source, (), runtime_compiler.version(), target),
        suffix=".cubin",
        source=source,
        meta={"arch": target, "plan": str(plan)},
        build=build,
    )
    report, magic, rest = entry.code.partition(b"\x7fELF")
    return Compiled(cubin.parse(magic + rest), report.decode(), magic + rest)


def moves_of_registers(data: bytes) -> list[str]:
    """The setmaxnreg instructions of a cubin, by nvdisasm of Triton's package. All warps of a
    warpgroup have to execute the same one: where the compiler copies it into branches, each warp
    waits for the others forever."""
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        command = [str(nvdisasm), "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted(re.findall(r"USETMAXREG\.(\w+)", text))


def of_hopper(plan: Plan) -> bool:
    """Whether the tests of Hopper's forward and backward compile it and read its report."""
    bfloat16 = dict(plan.constants).get("DTYPE") == DTYPE_CODES["bfloat16"]
    return plan.kernel == backward.SM90 or (plan.kernel.startswith("cuda/sm90/") and bfloat16)


def by_turns(every: Iterable[Plan]) -> list[Plan]:
    """Of the plans of each kernel one in 64; all at night."""
    return turns.some(every, 64, kind=lambda plan: plan.kernel, name=str)
