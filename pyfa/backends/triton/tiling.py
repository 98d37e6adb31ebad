"""The tiles and shared-memory buffers of Triton plans, for ``pyfa.traffic``."""

from __future__ import annotations

from typing import Any

from ...plan import Plan
from ...problem import Problem
from ...traffic import Shape, TiledKernel, Tiling
from . import plans

_LANES = 32
# The plan's name of a kernel to its role; "dk" makes dV too where no kernel of its own does.
_ROLES = {"fwd": "forward", "dk": "dk", "dv": "dv", "dq": "dq"}


def kernels_of(plan: Plan, problem: Problem, shape: Shape, compiled: bool) -> list[TiledKernel]:
    """Return the kernels of ``plan`` for ``shape``."""
    values: dict[str, Any] = dict(plan.constants)
    made = []
    for name, role in _ROLES.items():
        if f"{name}_block_m" not in values:
            continue
        if name == "dk" and "dv_block_m" not in values:
            role = "dk_dv"
        made.append(_kernel(values, name, role, problem, shape, compiled))
    return made


def _kernel(
    values: dict[str, Any], name: str, role: str, problem: Problem, shape: Shape, compiled: bool
) -> TiledKernel:
    rows, keys = values[f"{name}_block_m"], values[f"{name}_block_n"]
    dims = values["block_d"] + values["block_e"], values["block_dv"]
    packed, splits = 1, 1
    if role == "forward":
        packed = shape.group if values["pack"] else 1
        if not values["ordered"]:  # batch_invariant
            splits = _splits(values, shape, rows, keys, packed)
    lanes = problem.device.limits.lanes if problem.device.limits else _LANES
    registers, compiled_bytes = _compiled(values, name, problem, splits) if compiled else (0, 0)
    return TiledKernel(
        role,
        Tiling(rows, keys, splits, packed),
        dims,
        values[f"{name}_warps"] * lanes,
        _buffers(values, name, role, problem),
        whole_tiles=True,
        registers=registers,
        compiled_bytes=compiled_bytes,
    )


def _buffers(values: dict[str, Any], name: str, role: str, problem: Problem) -> dict[str, int]:
    """Return the buffers that the loop keeps in shared memory, as Triton 3.9 lays them out. Space
    for layout changes is additional, and known only after compilation.

    Hopper's matrix unit reads all its operands from shared memory, with as many tiles as there are
    stages. With fewer than 64 held rows, and on other archs, one tile less suffices. On AMD the
    stages reuse the memory of the held operands, which are moved to registers before the loop.
    """
    rows, keys, stages = (values[f"{name}_{x}"] for x in ("block_m", "block_n", "stages"))
    size, size_k = plans.BYTES[values["dtype"]], plans.BYTES[values["dtype_k"]]
    dim = values["block_d"] + values["block_e"]
    of_rows = {"Q": dim, "dO": values["block_dv"]}
    of_keys = {"K": dim} if values["shared_v"] else {"K": dim, "V": values["block_dv"]}
    if role in ("forward", "dq"):
        streamed, walked, kept = of_keys, keys, rows
        held = of_rows if role == "dq" else {"Q": of_rows["Q"]}
    else:
        streamed, walked, held, kept = of_rows, rows, of_keys, keys
        if role == "dv":
            held = {"K": of_keys["K"]}
    tiles = stages if values["ahead"] and kept >= 64 else max(1, stages - 1)
    size_streamed = size_k if streamed is of_keys else size
    buffers = {
        f"{x}, {tiles} tiles": tiles * walked * wide * size_streamed for x, wide in streamed.items()
    }
    kept_bytes = {x: kept * wide * size for x, wide in held.items()}
    if problem.device.vendor != "amd":
        return buffers | kept_bytes
    # A single stage is not double-buffered: the streamed tiles take turns too.
    loop = sum(buffers.values()) if stages > 1 else max(buffers.values())
    return {"K, V, Q and dO in turn": max(loop, *kept_bytes.values())}


def _splits(values: dict[str, Any], shape: Shape, rows: int, keys: int, packed: int) -> int:
    programs = -(-shape.seqlen_q * packed // rows) * shape.batch_heads // packed
    seen = shape.seqlen_k
    if shape.window_left >= 0 and shape.window_right >= 0:
        seen = min(seen, shape.window_left + shape.window_right + rows)
    if not programs:
        return 1
    return plans.splits_for(
        programs, -(-seen // keys), values["slots"], values["part_tiles"], values["streams"]
    )


def _compiled(values: dict[str, Any], name: str, problem: Problem, splits: int) -> tuple[int, int]:
    """Return registers per lane and shared bytes of a block, compiled ahead of time for the
    arch."""
    from . import resources, specs

    variant = specs.Variant(general=values["general"])
    if name == "fwd":
        spec = specs.forward_spec(values, variant, splits > 1)
    elif name == "dq":
        spec = specs.rows_spec(values, variant)
    else:
        spec = specs.keys_spec(values, variant, name)
    found = resources.measure(spec, problem.arch)
    return found.registers, found.shared_bytes
