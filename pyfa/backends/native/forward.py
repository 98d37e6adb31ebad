"""Forward on every device: its grid, and whether its keys are split. The vendor's module makes the
plans."""

from __future__ import annotations

import torch

from ...plan import Plan
from ...problem import Append, Call, form_of, tensors_of
from ...sizes import Extent
from ..base import Run
from ..common import calls, splits
from . import append as appending
from . import attend
from .launch import Launcher
from .plans import is_packed
from .target import blocks_of_head


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """Implement ``Backend.bind``."""
    if _has_lone_rows(call) and not is_packed(plan):
        return _bind_lone_rows(launch, plan, call, append, with_lse)
    return _bind(launch, plan, call, append, with_lse)


def _has_lone_rows(call: Call) -> bool:
    """Return whether each sequence has one row, so that all heads of a group may share a block.

    This applies only if decode does not take the call. The heads then become rows of one head and
    see the same keys, so there must be no window and nothing that differs between heads.
    """
    alone = call.cu_seqlens_q is None and call.max_seqlen_q == 1 and call.seqused_q is None
    cut = call.window_left >= 0 or call.window_right > 0 or call.q_start != call.k_start
    cut = cut or call.window_shift != 0 or call.attention_chunk > 0
    terms = (call.alibi_slopes, call.bias, call.sinks)
    alike = all(x is None for x in terms) and not call.dropout_p and not call.mods
    grouped = call.q.shape[-2] > call.k.shape[-2] > 0
    return call.batch_invariant and alone and grouped and alike and not cut


def _bind_lone_rows(
    launch: Launcher, plan: Plan, call: Call, append: Append | None, with_lse: bool
) -> Run:
    """Bind with the heads of a group as rows, so that keys are read once for all of them."""
    form, run = form_of(call, append), None
    ready = None
    if append is not None:
        ready = appending.bind(launch, *appending.readable(call, append))

    def run_grouped(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal run
        given, new = form.fill(tensors)
        if ready is not None and new is not None:
            given = ready(*appending.readable(given, new))
        heads_k = given.k.shape[-2]
        rows = given.q.unflatten(2, (heads_k, -1)).squeeze(1).transpose(1, 2)
        grouped = given._replace(q=rows, max_seqlen_q=rows.shape[1], window_right=-1)
        if run is None:
            run = _bind(launch, plan, grouped, None, with_lse)
        out, *rest = run(*tensors_of(grouped))
        out = out.transpose(1, 2).reshape(given.out_shape())
        lse = rest[: int(with_lse or launch.NEEDS_LSE)]  # buffers of the call follow it
        return [out, *(x.reshape(given.lse_shape()) for x in lse)]

    return run_grouped


def _is_even(call: Call) -> bool:
    """Return whether every row sees every key, and all sequences have equal lengths."""
    lengths = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    cut = call.window_left >= 0 or call.window_right >= 0 or call.attention_chunk > 0
    return not cut and all(one is None for one in lengths)


def _bind(launch: Launcher, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
    block = launch.target.block_of(plan)

    def grid_of(call: Call) -> attend.Grid:
        blocks = attend.blocks_of(launch.target, plan, call)
        launched: Extent = blocks
        if block.by_length and call.cu_seqlens_q is not None:
            launched = blocks_of_head(call, block) * call.q.shape[-2]
        if block.chunk and call.max_seqlen_k > block.chunk:
            # The bits do not depend on which kernel merges the chunks.
            places = launch.device_at(call.q.device).units * block.per_unit
            lines = call.max_seqlen_q * (call.q.shape[-2] // call.k.shape[-2])
            if splits.are_apart(blocks, places, lines):
                chunks = -(-call.max_seqlen_k // block.chunk)
                return attend.Grid(blocks, block.threads, chunks, True)
            return attend.Grid(blocks, block.threads, 1, True, min(blocks, places) * block.kept)
        # There are at most as many splits as tiles.
        num_splits = min(call.num_splits, max(1, -(-call.max_seqlen_k // block.keys)))
        if not num_splits:
            places = launch.device_at(call.q.device).units * block.per_unit
            rows = call.max_seqlen_q * call.q.shape[-2] * call.batch
            rounds = block.rounds if _is_even(call) else None
            num_splits = splits.of_prefill(
                blocks, call.max_seqlen_k, places, rows, block.costs, rounds
            )
        return attend.Grid(launched, block.threads, num_splits)

    return attend.bind(launch, plan, call, append, with_lse, calls.with_readable, grid_of)
