"""What the compiler makes of a plan and says of it, kept in a code cache."""

from __future__ import annotations

from collections.abc import Iterable

import turns

from pyfa import cache, cubin
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import backward, code, plans, runtime_compiler
from pyfa.plan import Plan


def compiled(plan: Plan, arch: str) -> tuple[cubin.Cubin, str]:
    """The cubin of ``plan`` and ptxas' report. The library keeps cubins alone, hence entries of
    another name."""
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
    report, magic, data = entry.code.partition(b"\x7fELF")
    return cubin.parse(magic + data), report.decode()


def of_hopper(plan: Plan) -> bool:
    """Whether the tests of Hopper's forward and backward compile it and read its report."""
    bfloat16 = dict(plan.constants).get("DTYPE") == DTYPE_CODES["bfloat16"]
    return plan.kernel == backward.SM90 or (plan.kernel.startswith("cuda/sm90/") and bfloat16)


def by_turns(every: Iterable[Plan]) -> list[Plan]:
    """Of the plans of each kernel one in 32; all at night."""
    return turns.some(every, 32, kind=lambda plan: plan.kernel, name=str)
