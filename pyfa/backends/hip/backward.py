"""Backward: delta of every row, then one kernel twice, owning keys (dK, dV) and owning rows (dQ).

No atomics: the same bits on every run, for two more matrix products a tile than one pass needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call, Problem
from ..base import Gradients
from . import plans
from .launcher import Launcher

KERNEL = "hip/attn_bwd.hip"
FEATURES = frozenset({"backward", "dlse", "deterministic"})
KEYS, ROWS = 0, 1
THREADS = 256
WAVES = THREADS // 64
SUM_ROWS = 16  # rows of a workgroup of row_sums


class Columns(NamedTuple):
    """What a wavefront owns, in 32 keys or rows, and wavefronts on a SIMD."""

    columns: int
    per_simd: int


# By head dims: of plain scores owning keys and rows, then of general ones. Two columns read LDS
# half as often; two wavefronts on a SIMD hide each other's vector instructions. The rest spills.
TILES: dict[tuple[int, int], tuple[Columns, Columns, Columns, Columns]] = {
    (64, 64): (Columns(1, 2), Columns(1, 2), Columns(1, 1), Columns(1, 2)),
    (96, 96): (Columns(2, 1), Columns(1, 2), Columns(1, 1), Columns(1, 2)),
    (128, 128): (Columns(2, 1), Columns(1, 2), Columns(1, 1), Columns(1, 1)),
    (192, 128): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
    (192, 192): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
    (256, 256): (Columns(1, 1), Columns(1, 1), Columns(1, 1), Columns(1, 1)),
}


def why_not(problem: Problem) -> list[str]:
    """What backward lacks for ``problem``, beyond features and dtypes."""
    if "backward" not in problem.features:
        return []
    return ["backward with a page_table is not implemented"] if problem.page_size else []


def plans_of(
    backend: str, pair: tuple[int, int], dtype: int, general: bool
) -> tuple[Plan, Plan, Plan]:
    """row_sums, and attn_bwd owning keys and owning rows."""
    sums = Plan(backend, "hip/row_sums.hip", (("DTYPE", dtype),))
    keys, rows = (_plan(backend, pair, dtype, owner, int(general)) for owner in (KEYS, ROWS))
    return sums, keys, rows


def _plan(backend: str, pair: tuple[int, int], dtype: int, owner: int, general: int) -> Plan:
    tiles = TILES[pair][2 * general + owner]
    constants = {
        "COLUMNS": tiles.columns,
        "DTYPE": dtype,
        "GENERAL": general,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "OWNS": owner,
        "PER_SIMD": tiles.per_simd,
    }
    return Plan(backend, KERNEL, tuple(constants.items()))


def all_plans(backend: str) -> list[Plan]:
    found = [
        plan
        for pair in TILES
        for dtype in plans.DTYPE_CODES.values()
        for general in (False, True)
        for plan in plans_of(backend, pair, dtype, general)
    ]
    return list(dict.fromkeys(found))


def run(
    launch: Launcher,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """The gradients of ``call``, whose forward made ``out`` and ``lse``."""
    dim, dim_v = call.q.shape[-1], call.v.shape[-1]
    pair = plans.bucket_of(TILES, dim, dim_v)
    general = bool(
        call.softcap or call.dropout_p
        or any(x is not None for x in (call.alibi_slopes, call.bias, call.sinks))
    )  # fmt: skip
    sums, over_keys, over_rows = plans_of("hip", pair, plans.dtype_code(call.q), general)
    call = plans.with_readable(call)
    out, dout, lse = plans.readable(out), plans.readable(dout), lse.contiguous()
    # Rows that nobody writes: of no sequence, or beyond a sequence's length.
    gaps_q = call.cu_seqlens_q is not None or call.seqused_q is not None
    gaps_k = call.cu_seqlens_k is not None or call.seqused_k is not None
    dq, dk, dv = _like(call.q, gaps_q), _like(call.k, gaps_k), _like(call.v, gaps_k)
    tensors = {"out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    tensors["delta"] = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    if dlse is not None:
        tensors["dlse"] = dlse.contiguous()
    if call.sinks is not None:
        tensors["dsinks"] = torch.zeros_like(lse)
    values = abi.backward_values(call, tensors)
    values["dies"] = plans.device_at(call.q.device).dies
    tensors |= plans.tensors_of(call)
    heads, heads_k = call.q.shape[-2], call.k.shape[-2]
    for kernel, length, per_block, width in (
        (sums, call.max_seqlen_q, SUM_ROWS, heads),
        (over_keys, call.max_seqlen_k, _owned(over_keys), heads_k),
        (over_rows, call.max_seqlen_q, _owned(over_rows), heads),
    ):
        groups = -(-length // per_block) * width * call.batch
        if groups:
            launch(kernel, (groups, 1, 1), THREADS, values, tensors)
    dsinks = None
    if call.sinks is not None:
        dsinks = tensors["dsinks"].sum((0, 2) if lse.dim() == 3 else 1)
    return Gradients(dq[..., :dim], dk[..., :dim], dv[..., :dim_v], None, dsinks)


def _owned(plan: Plan) -> int:
    """Keys or rows of a workgroup."""
    return WAVES * 32 * int(dict(plan.constants)["COLUMNS"])


def _like(x: torch.Tensor, gaps: bool) -> torch.Tensor:
    """Contiguous, and 0 where there are gaps."""
    make = torch.zeros if gaps else torch.empty
    return make(x.shape, dtype=x.dtype, device=x.device)
