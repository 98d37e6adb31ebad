"""Every kernel that a problem on an arch can use."""

from __future__ import annotations

from ...plan import Plan
from ..common.calls import DTYPE_CODES
from . import decode
from .plans import is_common
from .target import Target


def all_plans(target: Target, arch: str, backend: str = "") -> list[Plan]:
    """Return all plans that a problem on a device with the tiles of ``arch`` can get."""
    backend = backend or target.name
    found = [*target.passes(backend, arch), *decode.all_plans(target, backend, arch)]
    for kernel in ("combine", "append"):
        found += [target.plan_of(backend, kernel, code) for code in DTYPE_CODES.values()]
    return [*found, target.plan_of(backend, "gaps", None)]


def common_plans(target: Target, arch: str) -> list[Plan]:
    """Return the plans that most problems need: head_dim 64 and 128, no dropout, no pages in
    prefill. Those of gfx942 are in the wheel."""
    return [plan for plan in all_plans(target, arch) if is_common(plan)]
