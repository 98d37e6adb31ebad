"""Names the kernels that a machine without a compiler lacks, because its bundle does not have
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...plan import Plan
from ..base import MachineReason
from .plans import name_of


def why_missing(
    wanted: Sequence[Plan], has: Callable[[Plan], bool], no_compiler: str
) -> MachineReason | None:
    """Return why some of ``wanted`` are not available; None if each is bundled.

    ``has`` returns whether the bundle has a plan. ``no_compiler`` is why there is no compiler.
    """
    lacking = [name_of(plan) for plan in wanted if not has(plan)]
    if not lacking:
        return None
    return MachineReason(
        f"no code for this problem is bundled ({', '.join(lacking)}), and {no_compiler}"
    )
