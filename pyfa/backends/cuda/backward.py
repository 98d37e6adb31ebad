"""Backward: delta of every row, one kernel that owns keys and adds dQ up in float32, its rounding.

``deterministic`` makes blocks wait for their turn to add; otherwise dQ's last bits may differ from
run to run, while dK's and dV's never do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call, Problem
from ..base import Gradients
from ..common import calls
from ..common.launch import Launch
from . import plans

KERNEL = "cuda/sm80/attn_bwd.cu"
FEATURES = frozenset({"backward", "dlse", "deterministic"})
SUM_ROWS = 16  # rows of a block of row_sums


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
# plain tiles of 64, 128 and 256 are the fastest of those in kernels/README.md; the others are the
# first of the same kind that spill nothing and fit the shared memory. What is wide (192 and more)
# has two warps for the same keys, each with half of the rows.
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


def why_not(problem: Problem) -> list[str]:
    """What backward lacks for ``problem``, beyond features and dtypes."""
    if "backward" not in problem.features:
        return []
    return ["backward with a page_table is not implemented"] if problem.page_size else []


def plans_of(arch: str, pair: tuple[int, int], dtype: int, general: bool) -> tuple[Plan, Plan]:
    """attn_bwd and dq_convert."""
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
    of_convert = {name: constants[name] for name in ("BLOCK_Q", "DTYPE", "HEAD_DIM")}
    return (
        Plan("cuda", KERNEL, tuple(constants.items())),
        Plan("cuda", "cuda/sm80/dq_convert.cu", tuple(of_convert.items())),
    )


def all_plans(arch: str) -> list[Plan]:
    found = [
        plan
        for pair in TILES[arch]
        for dtype in calls.DTYPE_CODES.values()
        for general in (False, True)
        for plan in plans_of(arch, pair, dtype, general)
    ]
    return list(dict.fromkeys(found))


def run(
    launch: Launch,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """The gradients of ``call``, whose forward made ``out`` and ``lse``."""
    dim, dim_v = call.q.shape[-1], call.v.shape[-1]
    arch = plans.tiles_of(launch.device_at(call.q.device).arch)
    pair = calls.bucket_of(TILES[arch], dim, dim_v)
    dtype, general = calls.dtype_code(call.q), calls.is_general(call)
    tiles = TILES[arch][pair][general]
    over_keys, convert = plans_of(arch, pair, dtype, general)
    call = calls.with_readable(call)
    tensors = calls.gradients(call, calls.readable(out), lse, calls.readable(dout), dlse)

    heads, heads_k, batch = call.q.shape[-2], call.k.shape[-2], call.batch
    row_tiles = -(-call.max_seqlen_q // tiles.block_q)
    key_tiles = -(-call.max_seqlen_k // tiles.block_k)
    # A packed sequence begins at a tile of its own.
    stored = row_tiles * batch
    if call.cu_seqlens_q is not None:
        stored = call.q.shape[0] // tiles.block_q + batch
    device = call.q.device
    tensors["dq_accum"] = torch.zeros(
        stored * heads * tiles.block_q * pair[0], dtype=torch.float32, device=device
    )
    if call.deterministic:
        tensors["counter"] = torch.zeros(stored * heads, dtype=torch.int32, device=device)
    values = abi.backward_values(call, tensors)
    tensors |= calls.tensors_of(call)
    for kernel, blocks in (
        (plans.plan_of("row_sums", dtype), -(-call.max_seqlen_q // SUM_ROWS) * heads),
        (over_keys, key_tiles * heads_k),
        (convert, row_tiles * heads),
    ):
        if blocks * batch:
            launch(kernel, blocks * batch, plans.threads_of(kernel), values, tensors)
    return calls.finished(call, tensors, dim, dim_v)
