"""Forward on every device: its grid, and whether its keys are split. Plans are the vendor's."""

from __future__ import annotations

from ...plan import Plan
from ...problem import Append, Call
from ..base import Run
from ..common import calls, splits
from . import attend
from .launch import Launcher


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """``Backend.bind``."""
    block = launch.target.block_of(plan)

    def grid_of(call: Call) -> attend.Grid:
        heads = call.q.shape[-2] * call.batch
        blocks = -(-call.max_seqlen_q // block.rows) * heads
        num_splits = call.num_splits
        if not num_splits:
            places = launch.device_at(call.q.device).units * block.per_unit
            rows = call.max_seqlen_q * heads
            num_splits = splits.within_a_round(blocks, call.max_seqlen_k, places, rows, block.costs)
        return attend.Grid(blocks, block.threads, num_splits)

    return attend.bind(launch, plan, call, append, with_lse, calls.with_readable, grid_of)
