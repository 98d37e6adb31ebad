"""The tiles and shared-memory buffers of CUDA plans, for ``pyfa.traffic``."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel, Tiling
from ..common import calls
from ..native.backward import is_general_problem
from ..native.decode import GROUP
from . import backward, code, decode, forward, plans


def kernels_of(plan: Plan, problem: Problem, shape: Shape, compiled: bool) -> list[TiledKernel]:
    """The kernels of ``plan`` as they meet ``shape``."""
    make = _decode if plan.kernel == decode.KERNEL else _forward
    made = [(make(plan, problem, shape), plan)]
    if "backward" in problem.features:
        _, over_keys, _ = backward.plans_for(
            problem.arch,
            problem.head_dim,
            problem.head_dim_v,
            calls.DTYPE_CODES[problem.dtype],
            is_general_problem(problem),
            "deterministic" in problem.features,
        )
        made.append((_backward(over_keys), over_keys))
    return [_as_compiled(*one, problem.arch) if compiled else one[0] for one in made]


def _as_compiled(kernel: TiledKernel, plan: Plan, arch: str) -> TiledKernel:
    found = code.load(plan, plans.compiled_for(arch, plan)).kernel
    shared = found.shared_bytes + plans.shared_bytes(plan)
    return replace(kernel, registers=found.registers, compiled_bytes=shared)


def _forward(plan: Plan, problem: Problem, shape: Shape) -> TiledKernel:
    values = _values(plan)
    rows, keys = forward.rows_of(values), values["BLOCK_K"]
    blocks = -(-shape.seqlen_q // rows) * shape.lines
    lines = shape.seqlen_q * shape.lines
    parts = forward.parts_of(values, blocks, shape.seqlen_k, problem.device.units, lines)
    dims = values["HEAD_DIM"], values["HEAD_DIM_V"]
    size = 16 // problem.unit
    stages = {
        "K, tiles": values["STAGES"] * keys * dims[0] * size,
        "V, tiles": values["STAGES"] * keys * dims[1] * size,
    }
    if size == 1:
        stages["V, tiles, turned"] = stages["V, tiles"]
    rest = values["SHARED_BYTES"] - sum(stages.values())
    return TiledKernel(
        "forward",
        Tiling(rows, keys, parts),
        dims,
        plans.threads_of(plan),
        stages | {"Q, and what warps tell each other": rest},
        whole_tiles=True,
    )


def _decode(plan: Plan, problem: Problem, shape: Shape) -> TiledKernel:
    values = _values(plan)
    lines = decode.LINES * values["TILES"] * values["TEAM"]
    blocks = -(-shape.seqlen_q * shape.group // lines) * shape.heads_k * shape.batch
    begin, end = shape.keys_seen(0, max(0, shape.seqlen_q - 1))
    dims = values["HEAD_DIM"], values["HEAD_DIM_V"]
    key_bytes = 16 // problem.unit * (problem.head_dim + problem.head_dim_v)
    parts = decode.splits_for(blocks, end - begin, problem.device.units, key_bytes)
    return TiledKernel(
        "forward",
        Tiling(lines, GROUP, parts, shape.group),
        dims,
        plans.threads_of(plan),
        {"rings of K and V, then sums; states": values["SHARED_BYTES"]},
    )


def _backward(plan: Plan) -> TiledKernel:
    values = _values(plan)
    rows, keys = values["BLOCK_Q"], values["BLOCK_K"]
    dims = values["HEAD_DIM"], values["HEAD_DIM_V"]
    buffers = {
        "K and V": keys * sum(dims) * 2,
        "Q and dO, two tiles": 2 * rows * sum(dims) * 2,
    }
    rest = values["SHARED_BYTES"] - sum(buffers.values())
    passed = "dS and dQ" if values.get("ROLES") == 0 else "P and dS"
    return TiledKernel(
        "gradients",
        Tiling(rows, keys),
        dims,
        plans.threads_of(plan),
        buffers | {f"{passed}, states": rest},
        whole_tiles=True,
    )


def _values(plan: Plan) -> dict[str, int]:
    return {name: int(value) for name, value in plan.constants}
