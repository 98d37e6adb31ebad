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
    """A block owns ``block_k`` keys and takes ``block_q`` rows at a time.

    ``warps_k`` × ``warps_q`` warps share the scores, ``chunk_q`` rows at once; ``grad_warps_k``
    share the keys of dK and dV, ``dq_warps_q`` the rows of dQ, and the others the head. Rows come
    in ``stages``, P and dS go through ``buffers``; ``ahead``: fragments read before their use.
    """

    block_q: int
    block_k: int
    warps_k: int
    warps_q: int
    chunk_q: int
    grad_warps_k: int
    dq_warps_q: int
    stages: int
    buffers: int
    ahead: int
    blocks: int


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int, general: bool) -> int:
    """Of a block: its keys and values, the stages of Q and dO with their states, the buffers."""
    stage = tiles.block_q * (head_dim + head_dim_v) * 2 + 2 * tiles.block_q * 4
    buffer = tiles.block_k * tiles.block_q * 2 * (1 if tiles.warps_q == 1 else 2)
    if general:
        buffer += tiles.warps_k * tiles.block_q * 4
    keys = tiles.block_k * (head_dim + head_dim_v) * 2
    return keys + tiles.stages * stage + tiles.buffers * buffer


# Placeholder
TILES: dict[str, dict[tuple[int, int], Tiles]] = {
    "sm_90": {
        (64, 64): Tiles(64, 128, 4, 2, 32, 4, 2, 2, 1, 2, 1),
        (96, 96): Tiles(64, 128, 4, 2, 32, 4, 2, 2, 1, 2, 1),
        (128, 128): Tiles(64, 128, 4, 2, 32, 4, 2, 2, 1, 2, 1),
        (192, 128): Tiles(64, 64, 4, 2, 32, 4, 2, 2, 1, 2, 1),
        (192, 192): Tiles(64, 64, 4, 2, 32, 4, 2, 2, 1, 2, 1),
        (256, 256): Tiles(64, 64, 4, 2, 32, 4, 2, 2, 1, 2, 1),
    }
}


def why_not(problem: Problem) -> list[str]:
    """What backward lacks for ``problem``, beyond features and dtypes."""
    if "backward" not in problem.features:
        return []
    return ["backward with a page_table is not implemented"] if problem.page_size else []


def plans_of(arch: str, pair: tuple[int, int], dtype: int, general: bool) -> tuple[Plan, Plan]:
    """attn_bwd and dq_convert."""
    tiles = TILES[arch][pair]
    constants = {
        "BLOCKS_PER_SM": tiles.blocks,
        "BLOCK_K": tiles.block_k,
        "BLOCK_Q": tiles.block_q,
        "BUFFERS": tiles.buffers,
        "CHUNK_Q": tiles.chunk_q,
        "DQ_WARPS_Q": tiles.dq_warps_q,
        "DTYPE": dtype,
        "GENERAL": int(general),
        "GRAD_WARPS_K": tiles.grad_warps_k,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "LOOKAHEAD": tiles.ahead,
        "SHARED_BYTES": shared_bytes(tiles, *pair, general),
        "STAGES": tiles.stages,
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
    tiles = TILES[arch][pair]
    dtype = calls.dtype_code(call.q)
    over_keys, convert = plans_of(arch, pair, dtype, calls.is_general(call))
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


for _arch in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
    TILES[_arch] = TILES["sm_90"]
