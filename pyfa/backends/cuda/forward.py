"""Forward: tiles for every pair of head dims, the grid, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import abi, device
from ...plan import Plan
from ...problem import FEATURES as FEATURE_NAMES
from ...problem import Call, Problem
from ..base import Repeat
from ..common import calls, combine
from ..common.calls import DROPOUT, GENERAL, PLAIN
from ..common.launch import Launch
from ..common.ready import Ready
from . import plans
from .launcher import Launcher

KERNEL = "cuda/sm80/attn_fwd.cu"
FEATURES = frozenset(FEATURE_NAMES) - {"bias_grad", "backward", "dlse", "deterministic", "fp8"}


class Tiles(NamedTuple):
    """A warp owns ``rows`` query rows, and K and V pass in tiles of ``block_k`` keys, two of each.

    ``held``: the queries stay in registers. ``blocks`` are to fit on an SM.
    """

    rows: int
    warps: int
    block_k: int
    held: bool
    blocks: int


STAGES = 2  # places for a tile of K and V


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int, paged: bool) -> int:
    """Of a block: the stages, the queries where they do not pass through them, warps' notes."""
    stage = tiles.block_k * (head_dim + head_dim_v) * 2
    queries = tiles.rows * tiles.warps * head_dim * 2
    passing = tiles.held and queries <= stage
    notes = tiles.warps * (80 if paged else 64)
    return STAGES * stage + (0 if passing else queries) + notes


# 227, 163 and 99 KB of shared memory a block may have.
_CLASSES = {
    "sm_80": "sm_80",
    "sm_86": "sm_86",
    "sm_89": "sm_86",
    "sm_90": "sm_90",
    "sm_100": "sm_90",
    "sm_120": "sm_86",
}
PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def tiles_for(arch: str, pair: tuple[int, int], score: int, paged: bool) -> Tiles:
    """What is fastest without spills: a warp of 32 rows reads K and V half as often as two of 16."""
    kind = _CLASSES[arch]
    if pair == (64, 64):
        if score == DROPOUT:
            return Tiles(32, 4, 32, True, 2)
        return Tiles(32, 4, 64, not (paged and score == GENERAL), 2)
    if pair == (96, 96):
        if score != PLAIN:
            return Tiles(32, 4, 32, False, 2)
        return Tiles(32, 4, 64, kind == "sm_86", 2)
    if pair == (128, 128):
        if kind == "sm_86" or score == DROPOUT:
            return Tiles(16, 8, 64, True, 1)
        return Tiles(32, 4, 64 if kind == "sm_90" and score == PLAIN else 48, False, 2)
    if pair == (192, 128) and kind == "sm_90" and score != DROPOUT:
        return Tiles(32, 4, 32, False, 2)
    if pair[0] == 192:
        return Tiles(16, 8, 32 if kind == "sm_86" else 64, False, 1)
    return {
        "sm_90": Tiles(16, 8, 64, False, 1),
        "sm_80": Tiles(16, 8, 32, False, 1),
        "sm_86": Tiles(16, 4, 32, False, 1),
    }[kind]


# What is worth a part of its own when the keys are split: below it, merging costs more.
MIN_PART_KEYS = 256


def plan(problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    arch = plans.tiles_of(problem.arch)
    pair = calls.bucket_of(PAIRS, problem.head_dim, problem.head_dim_v)
    notes = plans.notes_of(problem, pair)
    dtype, paged = calls.DTYPE_CODES[problem.dtype], "paged" in problem.features
    score = calls.score_class(problem)
    return _plan(arch, pair, dtype, max(score, GENERAL) if paged else score, paged, notes)


def _plan(
    arch: str,
    pair: tuple[int, int],
    dtype: int,
    score: int,
    paged: bool,
    notes: Sequence[str] = (),
) -> Plan:
    tiles = tiles_for(arch, pair, score, paged)
    constants = {
        "BLOCKS": tiles.blocks,
        "BLOCK_K": tiles.block_k,
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "PAGED": int(paged),
        "Q_IN_REGISTERS": int(tiles.held),
        "ROWS": tiles.rows,
        "SCORE": score,
        "SHARED_BYTES": shared_bytes(tiles, *pair, paged),
        "STAGES": STAGES,
        "WARPS": tiles.warps,
    }
    return Plan("cuda", KERNEL, tuple(constants.items()), tuple(notes))


def all_plans(arch: str) -> list[Plan]:
    return [
        _plan(arch, pair, dtype, score, paged)
        for paged in (False, True)
        for pair in PAIRS
        for dtype in calls.DTYPE_CODES.values()
        for score in ((GENERAL, DROPOUT) if paged else (PLAIN, GENERAL, DROPOUT))
    ]


class _Grid(NamedTuple):
    blocks: int  # of one part
    threads: int
    parts: int


def _grid(plan: Plan, call: Call) -> _Grid:
    constants = {name: int(value) for name, value in plan.constants}
    rows = constants["ROWS"] * constants["WARPS"]
    blocks = -(-call.max_seqlen_q // rows) * call.q.shape[-2] * call.batch
    units = device.of(call.q.device).units * constants["BLOCKS"]
    parts = call.num_splits or splits(blocks, call.max_seqlen_k, units)
    return _Grid(blocks, 32 * constants["WARPS"], parts)


def splits(blocks: int, keys: int, places: int) -> int:
    """Parts that the keys are cut into so that ``blocks`` fill ``places`` of the device."""
    return max(1, min(places // max(blocks, 1), keys // MIN_PART_KEYS))


def run(launch: Launch, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of ``call``."""
    head_dim_v = call.v.shape[-1]
    call = calls.with_readable(call)
    out, lse = calls.results(call)
    if lse.numel() and call.batch and call.max_seqlen_q:
        blocks, threads, parts = _grid(plan, call)
        combine.launch_parts(launch, plan, blocks, threads, call, out, lse, parts)
    return out[..., :head_dim_v], lse


def repeat(launch: Launcher, plan: Plan, call: Call, with_lse: bool) -> Repeat | None:
    """``Repeating.repeat``: where nothing is copied and one launch does it all."""
    readable = calls.with_readable(call)
    if any(a is not b for a, b in zip(readable[:3], call[:3], strict=True)) or not call.q.numel():
        return None
    blocks, threads, parts = _grid(plan, call)
    if parts > 1 or not blocks:
        return None
    out, lse = calls.results(call)
    prepared = launch.prepare(
        plan, threads, abi.forward_values(call, out, lse), call.q.device.index
    )
    return Ready(prepared, blocks, out, lse if with_lse else None)
