"""Every kernel that a problem on an arch can use."""

from __future__ import annotations

from collections.abc import Collection

from ...plan import Plan
from ..common.calls import DTYPE_CODES
from . import decode
from .plans import COMMON_HEAD_DIMS, is_common, is_for
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
    prefill."""
    return chosen_plans(target, arch, False)


def chosen_plans(
    target: Target, arch: str, every: bool, head_dims: Collection[int] = ()
) -> list[Plan]:
    """Return ``all_plans`` if ``every``, else the common plans. If ``head_dims`` is not empty,
    leave out plans that no problem of these head dims can need."""
    found = all_plans(target, arch)
    if every:
        return [plan for plan in found if not head_dims or is_for(plan, head_dims)]
    return [plan for plan in found if is_common(plan, head_dims or COMMON_HEAD_DIMS)]
