"""Backward: sm80's tiles and every launch.

They are: delta of every row and zeros for dQ, one kernel that owns keys and adds dQ up in float32,
its rounding. ``deterministic`` makes blocks wait for their turn to add; otherwise dQ's last bits
may differ from run to run, while dK's and dV's never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call, Problem
from ..base import Gradients, RepeatBackward
from ..common import calls
from ..common.backward import finished, gradients, is_general, is_general_problem
from ..common.launch import Launch
from ..common.ready import ready_backward
from . import backward_sm90, forward_sm90, plans
from .launcher import NAMES, OFFSETS, Launcher, between

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
    arch, dtype = launch.device_at(call.q.device).arch, calls.dtype_code(call.q)
    sums, over_keys, convert = plans_for(
        arch, dim, dim_v, dtype, is_general(call), call.deterministic
    )
    call = calls.with_readable(call)
    tensors = gradients(call, calls.readable(out), lse, calls.readable(dout), dlse)

    heads, heads_k, batch = call.q.shape[-2], call.k.shape[-2], call.batch
    constants = {name: int(value) for name, value in over_keys.constants}
    block_q = constants["BLOCK_Q"]
    row_tiles = -(-call.max_seqlen_q // block_q)
    key_tiles = -(-call.max_seqlen_k // constants["BLOCK_K"])
    # A packed sequence begins at a tile of its own.
    stored = row_tiles * batch
    if call.cu_seqlens_q is not None:
        stored = call.q.shape[0] // block_q + batch
    device = call.q.device
    # row_sums begins both with 0.
    tensors["dq_accum"] = torch.empty(
        stored * heads * block_q * constants["HEAD_DIM"], dtype=torch.float32, device=device
    )
    if call.deterministic:
        tensors["counter"] = torch.empty(stored * heads, dtype=torch.int32, device=device)
    values = abi.backward_values(call, tensors)
    tensors |= calls.tensors_of(call)
    for kernel, blocks in (
        (sums, row_tiles * heads),
        (over_keys, key_tiles * heads_k),
        (convert, row_tiles * heads),
    ):
        if blocks * batch:
            launch(kernel, blocks * batch, plans.threads_of(kernel), values, tensors)
    return finished(call, tensors, dim, dim_v)


class _Noting:
    """A ``Launch`` that launches nothing."""

    def __init__(self, launcher: Launcher) -> None:
        self.plan, self.device_at = launcher.plan, launcher.device_at
        self.kernels: list[tuple[Plan, int]] = []
        self.grids: list[int] = []

    def __call__(
        self,
        plan: Plan,
        blocks: int,
        threads: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self.kernels.append((plan, threads))
        self.grids.append(blocks)
        self.values, self.tensors = values, tensors


# What each call gives anew, in the order of ``Params``. What lies between only calls with more
# tensors have.
_ANEW = (*NAMES, *OFFSETS, "dout", "dlse", "delta", "dq", "dk", "dv", "dq_accum",
         "dsinks", "counter")  # fmt: skip
_NEVER = (*between(_ANEW), "dlse", "dsinks")


def repeat(
    launch: Launcher, call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> RepeatBackward | None:
    """``RepeatingBackward.repeat_backward``: where nothing is copied.

    One packing of ``Params`` for the three kernels, and one allocation for what they share: dQ's
    sums, the counter, delta.
    """
    noting = _Noting(launch)
    made = run(noting, call, out, lse, dout, None)
    if len(noting.kernels) != 3:
        return None
    values, tensors = noting.values, noting.tensors
    given = {"q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse, "dout": dout}
    copied = any(tensors[name] is not x for name, x in given.items())
    if copied or any(values.get(name) for name in _NEVER):
        return None
    counter = 4 * tensors["dq_accum"].numel() if call.deterministic else 0
    floats = tensors["dq_accum"].numel() + (tensors["counter"].numel() if counter else 0)
    floats += -floats % 128  # delta begins at a multiple of 512 bytes, as by itself
    if not all(launch.can_prepare(plan) for plan, _ in noting.kernels):
        return None
    kernels = launch.prepare_all(noting.kernels, values, call.q.device.index, _ANEW, tensors)
    grids = tuple(noting.grids)

    def launch_all(
        q: int, k: int, v: int, out: int, lse: int, dout: int, dq: int, dk: int, dv: int, work: int,
        of_q: int = 0, of_k: int = 0,
    ) -> None:  # fmt: skip
        kernels(
            grids, q, k, v, out, lse, of_q, of_k, dout, 0, work + 4 * floats, dq, dk, dv, work, 0,
            counter and work + counter,
        )  # fmt: skip

    return ready_backward(launch_all, made, floats + tensors["delta"].numel())
