"""The tiles and buffers of plans, for ``pyfa.traffic``."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel, Tiling
from ..common import splits
from .backward import group_splits, plans_for
from .plans import is_packed
from .target import Target


def kernels_of(
    target: Target, plan: Plan, problem: Problem, shape: Shape, compiled: bool
) -> list[TiledKernel]:
    """Return the kernels of ``plan`` for ``shape``."""
    made = pairs_of(target, plan, problem, shape)
    if not compiled:
        return [kernel for kernel, _ in made]
    found = []
    for kernel, one in made:
        registers, shared = target.compiled(one, problem)
        found.append(replace(kernel, registers=registers, compiled_bytes=shared))
    return found


def pairs_of(
    target: Target, plan: Plan, problem: Problem, shape: Shape
) -> list[tuple[TiledKernel, Plan]]:
    """Return the kernels of ``plan`` for ``shape``, each with the plan that is compiled for it."""
    made = [(_kernel(target, plan, problem, shape), plan)]
    if "backward" in problem.features:
        chain = plans_for(target, plan.backend, problem)
        made += [(_kernel(target, one, problem, shape), one) for one in chain]
    return [(kernel, one) for kernel, one in made if kernel is not None]


def _kernel(target: Target, plan: Plan, problem: Problem, shape: Shape) -> TiledKernel | None:
    buffers = target.buffers_of(plan, problem)
    if buffers is None:
        return None
    block, constants = target.block_of(plan), dict(plan.constants)
    rows, keys = buffers.tile or (block.rows, block.keys)
    parts, packed, of_group = 1, 1, 1
    units = target.device_of(problem).units
    if block.keys and not block.rows and "batch_invariant" not in problem.features:
        of_group = group_splits(target.device_of(problem), block, shape)
    if is_packed(plan, target.decode, target.latent):
        packed, rows = shape.group, block.lines_of(shape.group)
        blocks = -(-shape.seqlen_q * packed // rows) * shape.heads_k * shape.batch
        begin, end = shape.keys_seen(0, max(0, shape.seqlen_q - 1))
        of_v = 0 if "latent" in problem.features else problem.head_dim_v
        key_bytes = 16 // problem.unit * (problem.head_dim + of_v)
        seen = end - begin
        parts = target.decode_splits(plan, blocks, seen, units, key_bytes)
        if shape.batch > 1 and problem.features & {"varlen", "seqused"}:
            parts = target.splits_of_lengths(plan, parts, blocks, seen, units)
    elif buffers.role == "forward" and "batch_invariant" not in problem.features:
        blocks = -(-shape.seqlen_q // rows) * shape.batch_heads
        even = shape.window_left < 0 and shape.window_right < 0
        even = even and problem.features.isdisjoint(("varlen", "seqused", "chunk"))
        parts = splits.of_prefill(
            blocks,
            shape.seqlen_k,
            units * block.per_unit,
            shape.seqlen_q * shape.batch_heads,
            block.costs,
            block.rounds if even else None,
        )
    return TiledKernel(
        buffers.role,
        Tiling(rows, keys, parts, packed),
        (int(constants["HEAD_DIM"]), int(constants["HEAD_DIM_V"])),
        block.threads,
        dict(buffers.parts),
        whole_tiles=buffers.whole_tiles,
        ahead=buffers.ahead,
        group_splits=of_group,
    )
