"""The tiles and LDS buffers of HIP plans, for ``pyfa.traffic``."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel, Tiling
from ..common import calls
from ..common.decode import GROUP
from . import backward, code, decode, forward, plans

_TILE = 32  # rows of a tile that backward streams
_WAVES = decode.THREADS // forward.LANES  # of decode
_SUMS = _WAVES * 4 * forward.LANES * 16  # bytes of one piece of every wavefront's output


def kernels_of(plan: Plan, problem: Problem, shape: Shape, compiled: bool) -> list[TiledKernel]:
    """The kernels of ``plan`` as they meet ``shape``."""
    made = pairs_of(plan, problem, shape)
    return [_as_compiled(*one) if compiled else one[0] for one in made]


def pairs_of(plan: Plan, problem: Problem, shape: Shape) -> list[tuple[TiledKernel, Plan]]:
    """The kernels of ``plan`` as they meet ``shape``, each with the plan that is compiled for
    it."""
    make = _decode if plan.kernel == decode.KERNEL else _forward
    made = [(make(plan, problem, shape), plan)]
    if "backward" in problem.features:
        pair = calls.bucket_of(backward.TILES, problem.head_dim, problem.head_dim_v)
        general = bool(problem.features & {"softcap", "alibi", "bias", "sinks", "dropout"})
        dtype = calls.DTYPE_CODES[problem.dtype]
        _, *both = backward.plans_of(plan.backend, pair, dtype, general)
        made += [(_backward(one, pair), one) for one in both]
    return made


def _as_compiled(kernel: TiledKernel, plan: Plan) -> TiledKernel:
    found = code.load(plan, plans.ARCHS[0]).kernel
    return replace(kernel, registers=found.vgprs, compiled_bytes=found.lds_bytes)


def _forward(plan: Plan, problem: Problem, shape: Shape) -> TiledKernel:
    values = {name: int(value) for name, value in plan.constants}
    rows, keys = forward.ROWS * values["WAVES"], values["BLOCK_K"]
    groups = -(-shape.seqlen_q // rows) * shape.lines
    parts = forward.splits(groups, shape.seqlen_k, plans.device_of(problem).units)
    dims = values["HEAD_DIM"], values["HEAD_DIM_V"]
    size = 1 if values["DTYPE"] == forward.FLOAT8_CODE else 2
    stride = next(width for width in (64, 128, 256) if width >= dims[0])  # lds.h: whole lines
    return TiledKernel(
        "forward",
        Tiling(rows, keys, parts),
        dims,
        values["WAVES"] * forward.LANES,
        {"K, two tiles": 2 * keys * stride * size, "V, two tiles": 2 * keys * dims[1] * size},
    )


def _decode(plan: Plan, problem: Problem, shape: Shape) -> TiledKernel:
    values = {name: int(value) for name, value in plan.constants}
    lines = values["TILES"] * decode.COLUMNS
    groups = -(-shape.seqlen_q * shape.group // lines) * shape.heads_k * shape.batch
    begin, end = shape.keys_seen(0, max(0, shape.seqlen_q - 1))
    parts = decode.splits_for(groups, end - begin, plans.device_of(problem).units)
    dims = values["HEAD_DIM"], values["HEAD_DIM_V"]
    rows = _WAVES * 2 * values["STAGES"] * GROUP  # of K and V
    scales = {"scales of K and V": rows * 4} if "KEY_DTYPE" in values else {}
    return TiledKernel(
        "forward",
        Tiling(lines, GROUP, parts, shape.group),
        dims,
        decode.THREADS,
        {
            "addresses of K and V": rows * 8,
            "Q, then sums of wavefronts": max(lines * dims[0] * 2, _SUMS),
            "maxima and totals": 2 * _WAVES * lines * 4,
            **scales,
        },
    )


def _backward(plan: Plan, pair: tuple[int, int]) -> TiledKernel:
    values = {name: int(value) for name, value in plan.constants}
    owned = backward.WAVES * 32 * values["COLUMNS"]
    keys = values["OWNS"] == backward.KEYS
    a, c = ("Q", "dO") if keys else ("K", "V")
    tile, tile_v = _TILE * pair[0] * 2, _TILE * pair[1] * 2
    buffers = {f"{a}, rows": tile, f"{c}, rows": tile_v, f"{a}, columns": tile}
    if keys:
        buffers[f"{c}, columns"] = tile_v
    return TiledKernel(
        "dk_dv" if keys else "dq",
        Tiling(_TILE, owned) if keys else Tiling(owned, _TILE),
        pair,
        backward.THREADS,
        buffers,
        whole_tiles=True,
        ahead=1,
    )
