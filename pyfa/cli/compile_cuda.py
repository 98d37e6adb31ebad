"""The NVIDIA half of ``pyfa compile``: compiles cubins for an arch into the cache."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from .console import progress

if TYPE_CHECKING:
    from ..plan import Plan

COLUMNS = {
    "registers": "registers",
    "stack_bytes": "stack B",
    "shared_bytes": "shared B",
    "blocks_per_sm": "blocks/SM",
}


def build(arch: str, every: bool, head_dims: Collection[int] = ()) -> list[dict[str, Any]]:
    """Build every plan of ``arch``, or only the common ones, of ``head_dims`` if given; return a
    row for each."""
    from ..backends.cuda.target import TARGET
    from ..backends.native import catalog

    wanted = catalog.chosen_plans(TARGET, arch, every, head_dims)
    rows = []
    # NVRTC compiles one program at a time in a process.
    spawning = multiprocessing.get_context("spawn")
    with (
        progress("compiling") as show,
        ProcessPoolExecutor(os.cpu_count(), mp_context=spawning) as pool,
    ):
        for done, made in enumerate(pool.map(partial(row, arch), wanted)):
            show(done + 1, len(wanted), made["plan"])
            rows.append(made)
    return rows


def row(arch: str, plan: Plan) -> dict[str, Any]:
    """Return the resources of ``plan`` on ``arch``."""
    from ..backends.cuda import code, plans, runtime_compiler

    target = plans.compiled_for(arch, plan)
    made = code.compiled(plan, target)
    shared = made.kernel.shared_bytes + plans.shared_bytes(plan)
    return {
        "kernel": made.kernel.name,
        "constants": dict(plan.constants),
        "plan": str(plan),
        "arch": arch,
        "registers": made.kernel.registers,
        "stack_bytes": made.kernel.stack_bytes,
        "shared_bytes": shared,
        "blocks_per_sm": plans.blocks_per_sm(plan, arch, made.kernel.registers, shared),
        "sha256": made.digest,
        "key": code.key_of(plan, target),
        "data": made.data,
        "bundled": {"arch": target, "compiler": runtime_compiler.version()},
    }
