"""Decode: tiles, the number of parts, and the launch. What it takes: ``common/decode.py``."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...plan import Plan
from ...problem import Call, Problem, is_aligned
from ..common import calls, combine
from ..common.decode import GROUP, forced_parts, keys_seen, lines
from ..common.launch import Launch
from . import plans

KERNEL = "cuda/sm80/attn_decode.cu"
LINES = 8  # of a matrix product: a line is a query row of one head
MOST_PARTS = 512


class Tiles(NamedTuple):
    """A warp has ``products`` of 8 lines; ``team`` warps share keys and differ in lines.

    Of the ``warps`` of a block, each team has ``stages`` slots of 16 keys.
    """

    products: int
    team: int
    warps: int
    stages: int
    blocks: int


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int) -> int:
    """Of a block: page offsets, rows' states, and the rings, where the teams' sums meet."""
    teams, rows = tiles.warps // tiles.team, LINES * tiles.products * tiles.team
    ring = teams * tiles.stages * GROUP * (2 * head_dim + 2 * head_dim_v + 32)
    sums = teams * rows * (head_dim_v + 4) * 4
    return tiles.warps * 512 + rows * 12 + 2 * teams * rows * 4 + max(ring, sums)


# (head_dim, head_dim_v) to tiles by lines, fewest first. TO MEASURE
TILES: dict[tuple[int, int], tuple[Tiles, ...]] = {
    pair: (
        Tiles(1, 1, 4, 4, 1),
        Tiles(2, 1, 4, 4, 1),
        Tiles(2, 2, 4, 4, 1),
        Tiles(2, 4, 8, 4, 1),
    )
    for pair in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
}


def plan(problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    pair = calls.bucket_of(TILES, problem.head_dim, problem.head_dim_v)
    fitting = (tiles for tiles in TILES[pair] if _rows(tiles) >= lines(problem))
    tiles = next(fitting, TILES[pair][-1])
    dtype = calls.DTYPE_CODES[problem.dtype]
    return _plan(pair, dtype, tiles, plans.notes_of(problem, pair))


def _rows(tiles: Tiles) -> int:
    """Lines of a block."""
    return LINES * tiles.products * tiles.team


def _plan(pair: tuple[int, int], dtype: int, tiles: Tiles, notes: list[str] | None = None) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "OCCUPANCY": tiles.blocks,
        "SHARED_BYTES": shared_bytes(tiles, *pair),
        "STAGES": tiles.stages,
        "TEAM": tiles.team,
        "TILES": tiles.products,
        "WARPS": tiles.warps,
    }
    return Plan("cuda", KERNEL, tuple(constants.items()), tuple(notes or ()))


def all_plans(arch: str) -> list[Plan]:
    """Of every arch: the tiles are as small as the smallest one's shared memory."""
    return [
        _plan(pair, dtype, tiles)
        for pair, sizes in TILES.items()
        for tiles in sizes
        for dtype in calls.DTYPE_CODES.values()
    ]


def run(launch: Launch, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of ``call``."""
    if not is_aligned(call):  # a plan is for aligned tensors, but for those of an empty call
        call = calls.with_readable(call)
    out, lse = calls.results(call)
    heads_k = call.k.shape[-2]
    rows = call.max_seqlen_q * call.q.shape[-2] // heads_k
    constants = {name: int(value) for name, value in plan.constants}
    of_block = LINES * constants["TILES"] * constants["TEAM"]
    blocks = -(-rows // of_block) * heads_k * call.batch
    if blocks:
        places = launch.device_at(call.q.device).units * constants["OCCUPANCY"]
        parts = forced_parts(call) or splits_for(blocks, keys_seen(call), places)
        threads = 32 * constants["WARPS"]
        combine.launch_parts(launch, plan, blocks, threads, call, out, lse, parts)
    return out, lse


@functools.lru_cache(4096)
def splits_for(blocks: int, keys: int, places: int) -> int:
    """Into how many parts to cut ``keys`` so that ``blocks`` busy ``places`` for blocks."""
    groups = -(-keys // GROUP)
    return max(1, min(MOST_PARTS, -(-groups // 4), places // max(1, blocks)))
