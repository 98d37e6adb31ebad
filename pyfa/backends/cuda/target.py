"""The CUDA kernels as the host driver uses them: blocks, shared memory, choice of backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...blocks import Tiles
from ...plan import Plan
from ...problem import Problem
from ..common.calls import DTYPE_CODES
from ..common.splits import Costs
from ..native.combine import chunked
from ..native.plans import values_of
from ..native.target import Block, Buffers, Target
from ..native.tiles import GROUP, Pair, sm90
from ..native.tiles.sm80 import LINES, Decode
from . import (
    backward,
    backward_grid,
    code,
    decode,
    forward,
    forward_sm90,
    forward_sm90_fp8,
    latent_sm90,
    plans,
)

# Costs on an H200. ``tile_us``: 64 keys of a block of 128 rows (8 heads of 8,192 rows and keys,
# causal, took 351 µs; the longest block has 128 such tiles). ``row_us``: a row of one head in
# ``combine`` (16,384 rows took 54 µs). ``combine_us``: the delay before ``combine`` starts.
# Hopper's own kernel reaches 650 TFLOP/s on 132 SMs, with one block on each.
_COSTS = Costs(tile_us=2.7, row_us=0.0033, combine_us=3.0)
_SM90_COSTS = _COSTS._replace(tile_us=0.85)


def _block_of(plan: Plan) -> Block:
    values, threads = values_of(plan), plans.threads_of(plan)
    if plan.kernel == forward_sm90.KERNEL:
        rows = sm90.ROWS * values["GROUPS"] // values.get("HALVES", 1)
        of_whole = sm90.ROWS if "PACKED" in values else 0
        fit = values.get("BLOCKS", 1)
        block = Block(threads, rows, values["BLOCK_K"], fit, _SM90_COSTS, of_whole=of_whole)
        if "CHUNK_TILES" not in values:
            return block
        chunk = values["CHUNK_TILES"] * values["BLOCK_K"]
        # In global memory: the output and the states of a row, once for each of its four lanes.
        kept = 0 if "CHUNK_SHARED" in values else rows * (values["HEAD_DIM_V"] + 8)
        return block._replace(chunk=chunk, kept=kept)
    if plan.kernel == latent_sm90.KERNEL:
        return Block(threads, sm90.ROWS, values["BLOCK_K"])
    if plan.kernel == forward.KERNEL:
        rows = values["ROWS"] * values["WARPS"]
        return Block(threads, rows, values["BLOCK_K"], values["BLOCKS"], _COSTS)
    if plan.kernel == decode.KERNEL:
        return Block(threads, LINES * values["TILES"] * values["TEAM"], GROUP)
    if plan.kernel == backward.SM90:
        parts = backward_grid.costs_of_parts(values["ROLES"])
        return Block(threads, keys=values["BLOCK_K"], parts=parts, by_length=True, table=True)
    if "BLOCK_K" in values:
        return Block(threads, keys=values["BLOCK_K"])
    return Block(threads, rows=values["BLOCK_Q"], by_length=True)


def _list_tiles(plan: Plan) -> Tiles:
    values = values_of(plan)
    if plan.kernel in (backward.KERNEL, backward.SM90):
        return Tiles(values["BLOCK_Q"], values["BLOCK_K"], "keys")
    block = _block_of(plan)
    return Tiles(block.rows, block.keys)


def _buffers_of(plan: Plan, problem: Problem) -> Buffers | None:
    values = values_of(plan)
    if plan.kernel == decode.KERNEL:
        parts = {"rings of K and V, then sums; states": values["SHARED_BYTES"]}
        return Buffers("forward", parts)
    if plan.kernel == latent_sm90.KERNEL:
        return _latent(values)
    if plan.kernel in (backward.KERNEL, backward.SM90):
        return _backward(values)
    if plan.kernel in (forward.KERNEL, forward_sm90.KERNEL):
        return _forward(values, 16 // problem.unit)
    return None


def _compiled(plan: Plan, problem: Problem) -> tuple[int, int]:
    found = code.load(plan, plans.compiled_for(problem.arch, plan)).kernel
    return found.registers, found.shared_bytes + plans.shared_bytes(plan)


def _decode_tiles(arch: str, float8: bool) -> Mapping[Pair, Sequence[Decode]]:
    tiles = plans.tiles_of(arch)
    if not float8:
        return tiles.decode
    return tiles.decode_float8 if plans.widens_float8(arch) else {}


def _latent_tiles(arch: str, float8: bool) -> Mapping[Pair, Sequence[Decode]]:
    tiles = plans.tiles_of(arch)
    if not float8:
        return tiles.latent
    return tiles.latent_float8 if plans.widens_float8(arch) else {}


def _forward(values: Mapping[str, int], size: int) -> Buffers:
    keys, stages = values["BLOCK_K"], values["STAGES"]
    parts = {
        "K, tiles": stages * keys * values["HEAD_DIM"] * size,
        "V, tiles": stages * keys * values["HEAD_DIM_V"] * size,
    }
    if size == 1:
        parts["V, tiles, turned"] = parts["V, tiles"]
    parts["Q, and what warps tell each other"] = values["SHARED_BYTES"] - sum(parts.values())
    return Buffers("forward", parts, whole_tiles=True)


def _latent(values: Mapping[str, int]) -> Buffers:
    parts = {"K, tiles": values["STAGES"] * values["BLOCK_K"] * values["HEAD_DIM"] * 2}
    parts["Q, and what warps tell each other"] = values["SHARED_BYTES"] - sum(parts.values())
    return Buffers("forward", parts, whole_tiles=True)


def _notes_of(problem: Problem, pair: Pair) -> list[str]:
    of_latent = "latent" in problem.features and plans.runs_sm90(problem.arch)
    left = latent_sm90.why_not(problem) if of_latent else []
    return left + plans.notes_of(problem, pair)


def _latent_plan(problem: Problem) -> Plan | None:
    return latent_sm90.plan(problem) if latent_sm90.takes(problem) else None


def _backward(values: Mapping[str, int]) -> Buffers:
    rows, keys = values["BLOCK_Q"], values["BLOCK_K"]
    both = values["HEAD_DIM"] + values["HEAD_DIM_V"]
    parts = {"K and V": keys * both * 2, "two tiles of Q and dO": 2 * rows * both * 2}
    passed = "dS and dQ" if values.get("ROLES") == 0 else "P and dS"
    parts[f"{passed}, states"] = values["SHARED_BYTES"] - sum(parts.values())
    return Buffers("gradients", parts, (rows, keys), whole_tiles=True)


def _passes(backend: str, arch: str) -> list[Plan]:
    found = [*forward.all_plans(arch), *backward.all_plans(arch)]
    if plans.runs_sm90(arch):
        found += [chunked(plans.plan_of("combine", dtype)) for dtype in DTYPE_CODES.values()]
    return found


TARGET = Target(
    name="cuda",
    decode=decode.KERNEL,
    float8=forward_sm90_fp8.CODE,
    device_of=lambda problem: problem.device,
    plan_of=lambda backend, kernel, dtype: plans.plan_of(kernel, dtype),
    passes=_passes,
    notes_of=_notes_of,
    backward_notes=backward.notes_of,
    block_of=_block_of,
    buffers_of=_buffers_of,
    compiled=_compiled,
    takes_decode=decode.takes,
    forward_plan=lambda backend, problem: forward.plan(problem),
    decode_tiles=_decode_tiles,
    latent_tiles=_latent_tiles,
    decode_splits=decode.splits_for,
    backward_plans=lambda backend, *asked: backward.plans_for(*asked),
    list_tiles=_list_tiles,
    order_of=plans.order_of,
    latent=latent_sm90.KERNEL,
    latent_plan=_latent_plan,
)
