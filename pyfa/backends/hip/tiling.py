"""The tiles and LDS buffers of HIP plans, for ``pyfa.traffic``."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel, Tiling
from ..common import calls
from ..common.backward import is_general_problem
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
        dtype = calls.DTYPE_CODES[problem.dtype]
        general, deterministic = is_general_problem(problem), "deterministic" in problem.features
        chain = backward.plans_of(plan.backend, pair, dtype, general, deterministic)
        made += [(_one_pass(one, pair), one) for one in chain if one.kernel == backward.ONE_PASS]
        made += [(_backward(one, pair), one) for one in chain if one.kernel == backward.KERNEL]
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


def _one_pass(plan: Plan, pair: tuple[int, int]) -> TiledKernel:
    rows, (_, keys) = backward.SUM_ROWS, backward.owned(plan)
    units, units_v = (_skewed_bytes(-(-dim // 64) * 2) for dim in pair)
    blocks, wide = keys // 32, pair[0] > 128
    swap = blocks if blocks % 4 or wide else blocks + 2
    steps = 2 if sum(pair) > 320 else 3
    return TiledKernel(
        "gradients",
        Tiling(rows, keys),
        pair,
        backward.THREADS,
        {
            "Q and dO, rows, and states, two steps": 2 * (units + units_v + 2 * rows * 4),
            f"Q and dO, columns, {'two' if steps == 2 else 'three'} steps": (
                steps * sum(pair) * rows * 2
            ),
            "dS, two steps": 2 * _skewed_bytes(swap),
        },
        whole_tiles=True,
    )


def _skewed_bytes(length: int) -> int:
    """Of a tile of 16 rows of 4 * ``length`` units (kernels/hip/bwd_step.h)."""
    return (16 * (4 * length + 1) + 3 * (2 * length % 8)) * 16
