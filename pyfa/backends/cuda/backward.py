"""Backward: sm80's tiles and every launch.

They are: delta of every row and zeros for dQ, one kernel that owns keys and adds dQ up in float32,
its rounding. ``deterministic`` makes blocks wait for their turn to add; otherwise dQ's last bits
may differ from run to run, while dK's and dV's never do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...plan import Plan
from ...problem import Call, Problem
from ..base import RunBackward
from ..common import calls
from ..common.program import like
from ..native import backward as common
from ..native.backward import Kernel, Kernels, is_general, is_general_problem
from ..native.launch import Launcher
from . import backward_sm90, forward_sm90, plans

KERNEL = "cuda/sm80/attn_bwd.cu"


class Tiles(NamedTuple):
    """A block owns ``block_k`` keys and takes ``block_q`` rows at a time, with two kinds of warps.

    ``warps_k`` × ``warps_q`` warps make S, P and dV, as many dP, dS and dK, ``chunk_q`` rows at
    once (0: all of a warp's). ``dq_warps_q`` of them all share the rows of dQ, the others the head.
    dS goes through ``buffers``; ``ahead``: fragments that are read before their use. ``blocks`` are
    to fit on an SM.
    """

    block_q: int
    block_k: int
    warps_k: int
    warps_q: int = 1
    chunk_q: int = 0
    dq_warps_q: int = 2
    buffers: int = 2
    ahead: int = 2
    blocks: int = 1


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int, general: bool) -> int:
    """Of a block: its keys and values, two stages of Q and dO with their states, P and dS."""
    q, k = tiles.block_q, tiles.block_k
    stage = q * (head_dim + head_dim_v) * 2 + 2 * q * 4
    scores = k * q * 2
    buffer = scores + (tiles.warps_k * q * 4 if general else 0)
    kept = scores * (1 + general) + tiles.buffers * buffer
    return k * (head_dim + head_dim_v) * 2 + 2 * stage + kept


# By head dims: of plain scores, then of general ones, which keep more of P for dS. On an H200 the
# plain tiles of 64, 128 and 256 are the fastest of those in kernels/cuda/README.md; the others are
# the first of the same kind that spill nothing and fit the shared memory. What is wide (192 and
# more) has two warps for the same keys, each with half of the rows.
_LARGE: dict[tuple[int, int], tuple[Tiles, Tiles]] = {
    (64, 64): (Tiles(64, 128, 2, 1, 32, ahead=3, blocks=2), Tiles(64, 128, 4, 1, 32)),
    (96, 96): (Tiles(64, 128, 4, 1, 64, 4), Tiles(64, 128, 4, 1, 32, 4)),
    (128, 128): (Tiles(64, 128, 4, 1, 64, ahead=3), Tiles(64, 128, 4, 1, 32)),
    (192, 128): (Tiles(64, 64, 2, 2, ahead=4), Tiles(64, 64, 2, 2)),
    (192, 192): (Tiles(64, 64, 2, 2, ahead=4), Tiles(64, 64, 2, 2)),
    (256, 256): (Tiles(64, 64, 2, 2), Tiles(64, 64, 2, 2)),
}
_AMPERE: dict[tuple[int, int], tuple[Tiles, Tiles]] = {
    (64, 64): (Tiles(128, 128, 4, 1, 64, 4, buffers=1), Tiles(64, 128, 4, 1, 32)),
    (96, 96): (Tiles(64, 128, 4, 1, 64, 4), Tiles(64, 128, 4, 1, 32, 4, buffers=1)),
    (128, 128): (Tiles(64, 128, 4, 1, 64, buffers=1, ahead=4),
                 Tiles(32, 128, 4, 1, 32, buffers=1)),
    (192, 128): (Tiles(64, 64, 2, 2, ahead=4), Tiles(64, 64, 2, 2)),
    (192, 192): (Tiles(64, 64, 2, 2, buffers=1, ahead=4), Tiles(32, 64, 2, 2)),
    (256, 256): (Tiles(32, 64, 2, 2), Tiles(32, 64, 2, 2)),
}  # fmt: skip
_SMALL: dict[tuple[int, int], tuple[Tiles, Tiles]] = {
    (64, 64): (Tiles(64, 128, 4, 1, 64, buffers=1), Tiles(64, 64, 4, 1, 32)),
    (96, 96): (Tiles(64, 64, 4, 1, 64, 4, buffers=1), Tiles(64, 64, 4, 1, 32, 4, buffers=1)),
    (128, 128): (Tiles(32, 64, 4, 1, 32), Tiles(32, 64, 4, 1, 32)),
    (192, 128): (Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2)),
    (192, 192): (Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2)),
    (256, 256): (Tiles(32, 16, 1, 2), Tiles(32, 16, 1, 2)),
}
# By how much shared memory a block may have: 227, 163 or 99 KB.
TILES = {
    "sm_80": _AMPERE,
    "sm_86": _SMALL,
    "sm_89": _SMALL,
    "sm_90": _LARGE,
    "sm_100": _LARGE,
    "sm_120": _SMALL,
}


def plans_of(
    arch: str, pair: tuple[int, int], dtype: int, general: bool
) -> tuple[Plan, Plan, Plan]:
    """row_sums, attn_bwd and dq_convert."""
    tiles = TILES[arch][pair][general]
    constants = {
        "BLOCKS_PER_SM": tiles.blocks,
        "BLOCK_K": tiles.block_k,
        "BLOCK_Q": tiles.block_q,
        "BUFFERS": tiles.buffers,
        "CHUNK_Q": tiles.chunk_q or tiles.block_q // tiles.warps_q,
        "DQ_WARPS_Q": tiles.dq_warps_q,
        "DTYPE": dtype,
        "GENERAL": int(general),
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "LOOKAHEAD": tiles.ahead,
        "SHARED_BYTES": shared_bytes(tiles, *pair, general),
        "WARPS_K": tiles.warps_k,
        "WARPS_Q": tiles.warps_q,
    }
    return around(Plan("cuda", KERNEL, tuple(constants.items())), transposed=False)


def around(over_keys: Plan, transposed: bool) -> tuple[Plan, Plan, Plan]:
    """attn_bwd with what runs before and behind it, by tiles of as many rows."""
    constants = dict(over_keys.constants)
    tile = tuple((name, constants[name]) for name in ("BLOCK_Q", "DTYPE", "HEAD_DIM"))
    of_sums = (*tile, ("HEAD_DIM_V", constants["HEAD_DIM_V"]))
    return (
        Plan("cuda", "cuda/row_sums.cu", of_sums),
        over_keys,
        Plan("cuda", "cuda/sm80/dq_convert.cu", (*tile, ("TRANSPOSED", int(transposed)))),
    )


def sm90_plans_of(
    pair: tuple[int, int], dtype: int, deterministic: bool
) -> tuple[Plan, Plan, Plan]:
    """The same of Hopper's own."""
    return around(backward_sm90.plan_of(pair, dtype, deterministic), transposed=True)


def is_sm90(arch: str, general: bool) -> bool:
    """Whether the kernels are Hopper's own."""
    return forward_sm90.runs_on(arch) and not general


def plans_for(
    arch: str, head_dim: int, head_dim_v: int, dtype: int, general: bool, deterministic: bool
) -> tuple[Plan, Plan, Plan]:
    """row_sums, attn_bwd and dq_convert for these heads on a device of ``arch``."""
    if is_sm90(arch, general):
        pair = calls.bucket_of(backward_sm90.TILES, head_dim, head_dim_v)
        return sm90_plans_of(pair, dtype, deterministic)
    tiles = plans.tiles_of(arch)
    pair = calls.bucket_of(TILES[tiles], head_dim, head_dim_v)
    return plans_of(tiles, pair, dtype, general)


def notes_of(problem: Problem) -> list[str]:
    """What ``explain`` adds to the plan of a problem with a backward."""
    if "backward" not in problem.features or not forward_sm90.runs_on(problem.arch):
        return []
    if not is_general_problem(problem):
        return []
    return ["backward is sm80's kernel: sm90's has no score terms, sinks or dropout"]


def all_plans(arch: str) -> list[Plan]:
    found: list[Plan] = []
    for dtype in calls.DTYPE_CODES.values():
        for general in (False, True):
            if is_sm90(arch, general):
                for pair in backward_sm90.TILES:
                    for deterministic in (False, True):
                        found += sm90_plans_of(pair, dtype, deterministic)
            else:
                for pair in TILES[arch]:
                    found += plans_of(arch, pair, dtype, general)
    return list(dict.fromkeys(found))


def bind(
    launch: Launcher,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> RunBackward:
    """``Backend.bind_backward``."""
    arch, dtype = launch.device_at(call.q.device).arch, calls.dtype_code(call.q)
    dims = call.q.shape[-1], call.v.shape[-1]
    sums, over_keys, convert = plans_for(arch, *dims, dtype, is_general(call), call.deterministic)

    def kernels_of(call: Call) -> Kernels:
        heads, heads_k = call.q.shape[-2], call.k.shape[-2]
        constants = {name: int(value) for name, value in over_keys.constants}
        block_q = constants["BLOCK_Q"]
        row_tiles = -(-call.max_seqlen_q // block_q)
        key_tiles = -(-call.max_seqlen_k // constants["BLOCK_K"])
        # A packed sequence begins at a tile of its own.
        stored = row_tiles * call.batch
        if call.cu_seqlens_q is not None:
            stored = call.q.shape[0] // block_q + call.batch
        # row_sums begins both with 0.
        sizes = stored * heads * block_q * constants["HEAD_DIM"]
        workspace = {"dq_accum": like((sizes,), torch.float32)}
        if call.deterministic:
            workspace["counter"] = like((stored * heads,), torch.int32)
        return Kernels(
            [
                Kernel(sums, row_tiles * heads, plans.threads_of(sums)),
                Kernel(over_keys, key_tiles * heads_k, plans.threads_of(over_keys)),
                Kernel(convert, row_tiles * heads, plans.threads_of(convert)),
            ],
            workspace,
        )

    return common.bind(launch, call, out, lse, dout, dlse, kernels_of)
