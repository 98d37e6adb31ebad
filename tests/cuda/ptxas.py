"""What the compiler makes of a plan and says of it, kept in a code cache."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pyfa import cache, cubin
from pyfa.backends.cuda import code, plans, runtime_compiler
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


def by_turns(every: Iterable[Plan]) -> list[Plan]:
    """Of two plans that differ only in float16 and bfloat16, one, by turns: with an empty cache,
    compiling both takes nine minutes of two cores. All plans if PYFA_TEST_ALL_PLANS is 1, as in the
    nightly workflow."""
    plans = list(dict.fromkeys(every))
    if os.environ.get("PYFA_TEST_ALL_PLANS") == "1":
        return plans
    turns: dict[tuple[object, ...], int] = {}
    found = []
    for plan in plans:
        constants = dict(plan.constants)
        dtype = constants.pop("DTYPE", None)
        key = (plan.kernel, *constants.items())
        turn = turns.setdefault(key, len(turns) % 2)
        if dtype not in (0, 1) or dtype == turn:
            found.append(plan)
    return found
