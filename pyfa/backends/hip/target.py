"""The HIP kernels as the host driver uses them: workgroups, LDS buffers, choice of backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...blocks import Tiles
from ...plan import Plan
from ...problem import Problem
from ..common import calls, splits
from ..native.plans import notes_of, values_of
from ..native.target import BackwardGrid, Block, Buffers, Target
from ..native.tiles import GROUP, Pair
from ..native.tiles.gfx942 import LINES, Decode
from . import backward, code, decode, forward, latent, plans

_TILE = 32  # rows of a tile that backward streams
_WAVES = decode.THREADS // forward.LANES  # of decode
_SUMS = _WAVES * 4 * forward.LANES * 16  # bytes of one piece of every wavefront's output


def _block_of(plan: Plan) -> Block:
    values = values_of(plan)
    if plan.kernel == forward.KERNEL:
        waves = values["WAVES"]
        threads, rows = waves * forward.LANES, forward.ROWS * waves
        rounds = _rounds(values)
        return Block(threads, rows, values["BLOCK_K"], rounds=rounds, by_length=True)
    if plan.kernel == decode.KERNEL:
        return Block(decode.THREADS, LINES * values["TILES"], GROUP)
    if plan.kernel == latent.KERNEL:
        return Block(latent.THREADS, latent.rows_of(plan), GROUP)
    if plan.kernel == backward.BIAS_GRAD:
        return Block(backward.THREADS, *backward.bias_tile(plan))
    rows, keys = backward.owned(plan)
    return Block(backward.THREADS, rows, keys, by_length=True)


def _rounds(values: Mapping[str, int]) -> splits.Rounds:
    """Return the costs of ``splits.over_rounds``, by the timing model at 1.2 GHz: 64 keys take
    4,300 clocks at head_dim 128 and 2,600 at 64, float8 0.6 of that. A block takes 10,000 to 14,000
    clocks to start and end. Each split's output is written once and read once."""
    dim, dim_v = _dims(values)
    tile_us = (dim + dim_v) * (0.0085 if values["DTYPE"] == forward.FLOAT8_CODE else 0.0145)
    return splits.Rounds(tile_us, 11.0, dim_v * 8 / 4.1e6, 5.0, dim_v * 4)


def _list_tiles(plan: Plan) -> Tiles:
    block = _block_of(plan)
    if plan.kernel != backward.KERNEL:
        return Tiles(block.rows, block.keys)
    return Tiles(block.rows, _TILE) if block.rows else Tiles(_TILE, block.keys, "keys")


def _buffers_of(plan: Plan, problem: Problem) -> Buffers | None:
    values = values_of(plan)
    if plan.kernel == forward.KERNEL:
        return _forward(values)
    if plan.kernel == decode.KERNEL:
        return _decode(values)
    if plan.kernel == latent.KERNEL:
        return Buffers("forward", {"three tiles of keys": 3 * GROUP * values["HEAD_DIM"] * 2})
    if plan.kernel == backward.KERNEL:
        return _backward(values)
    return _one_pass(plan, values) if plan.kernel == backward.ONE_PASS else None


def _compiled(plan: Plan, problem: Problem) -> tuple[int, int]:
    found = code.load(plan, plans.device_of(problem).arch).kernel
    return found.vgprs, found.lds_bytes


def _decode_tiles(arch: str, float8: bool) -> Mapping[Pair, Sequence[Decode]]:
    tiles = plans.tiles_of(arch)
    return tiles.decode_float8 if float8 else tiles.decode


def _latent_tiles(arch: str, float8: bool) -> Mapping[Pair, Sequence[Decode]]:
    tiles = plans.tiles_of(arch)
    return tiles.latent_float8 if float8 else tiles.latent


def _decode_splits(plan: Plan, blocks: int, keys: int, units: int, key_bytes: int) -> int:
    of_kernel = latent.splits_for if plan.kernel == latent.KERNEL else decode.splits_for
    return of_kernel(blocks, keys, units)


def _splits_of_lengths(plan: Plan, parts: int, blocks: int, keys: int, units: int) -> int:
    if plan.kernel == latent.KERNEL:  # its empty splits do not end early
        return parts
    return decode.splits_of_lengths(parts, blocks, keys, units)


def _backward_plans(
    backend: str,
    arch: str,
    dims: Pair,
    dtype: int,
    general: bool,
    deterministic: bool,
    mods: str,
    terms: frozenset[str] = frozenset(),
    grid: BackwardGrid | None = None,
) -> tuple[Plan, Plan, Plan]:
    """Return the plans of a backward. ``grid`` is ignored: all sizes use the same kernels."""
    pair = calls.bucket_of(plans.tiles_of(arch).two_passes, *dims)
    return backward.plans_of(backend, pair, dtype, general, deterministic, arch, mods, terms)


def _bias_grad_plan(
    backend: str, arch: str, dims: Pair, dtype: int, mods: str, terms: frozenset[str]
) -> Plan:
    pair = calls.bucket_of(plans.tiles_of(arch).two_passes, *dims)
    return backward.bias_plan(backend, pair, dtype, mods, terms)


def _forward(values: Mapping[str, int]) -> Buffers:
    keys, (dim, dim_v) = values["BLOCK_K"], _dims(values)
    size = 1 if values["DTYPE"] == forward.FLOAT8_CODE else 2
    stride = next(width for width in (64, 128, 256) if width >= dim)  # lds.h: whole lines
    parts = {"two tiles of K": 2 * keys * stride * size, "two tiles of V": 2 * keys * dim_v * size}
    return Buffers("forward", parts)


def _decode(values: Mapping[str, int]) -> Buffers:
    lines = values["TILES"] * LINES
    rows = _WAVES * 2 * values["STAGES"] * GROUP  # of K and V
    scales = {"scales of K and V": rows * 4} if "KEY_DTYPE" in values else {}
    parts = {
        "addresses of K and V": rows * 8,
        "Q, then sums of wavefronts": max(lines * values["HEAD_DIM"] * 2, _SUMS),
        "maxima and totals": 2 * _WAVES * lines * 4,
        **scales,
    }
    if "LATENT" in values:
        parts["keys on their way to values"] = _WAVES * GROUP * 256
    if "BANDED" in values:
        parts["limits of chunks"] = lines * 8
    return Buffers("forward", parts)


def _backward(values: Mapping[str, int]) -> Buffers:
    owned = backward.WAVES * 32 * values["COLUMNS"]
    keys = values["OWNS"] == backward.KEYS
    a, c = ("Q", "dO") if keys else ("K", "V")
    tile, tile_v = (_TILE * dim * 2 for dim in _dims(values))
    parts = {f"{a}, rows": tile, f"{c}, rows": tile_v, f"{a}, columns": tile}
    if keys:
        parts[f"{c}, columns"] = tile_v
    role, shape = ("dk_dv", (_TILE, owned)) if keys else ("dq", (owned, _TILE))
    return Buffers(role, parts, shape, whole_tiles=True, ahead=1)


def _one_pass(plan: Plan, values: Mapping[str, int]) -> Buffers:
    rows, (_, keys) = backward.SUM_ROWS, backward.owned(plan)
    dims = _dims(values)
    units, units_v = (_skewed_bytes(-(-dim // 64) * 2) for dim in dims)
    blocks, wide = keys // 32, dims[0] > 128
    steps, word = (2, "two") if sum(dims) > 320 else (3, "three")
    parts = {
        "Q and dO, rows, and states, two steps": 2 * (units + units_v + 2 * rows * 4),
        f"Q and dO, columns, {word} steps": steps * sum(dims) * rows * 2,
        "dS, two steps": 2 * _skewed_bytes(blocks if blocks % 4 or wide else blocks + 2),
    }
    return Buffers("gradients", parts, (rows, keys), whole_tiles=True)


def _skewed_bytes(length: int) -> int:
    """Return the bytes of a tile of 16 rows of 4 * ``length`` units (kernels/hip/bwd_step.h)."""
    return (16 * (4 * length + 1) + 3 * (2 * length % 8)) * 16


def _dims(values: Mapping[str, int]) -> Pair:
    return values["HEAD_DIM"], values["HEAD_DIM_V"]


TARGET = Target(
    name="hip",
    decode=decode.KERNEL,
    float8=forward.FLOAT8_CODE,
    device_of=plans.device_of,
    plan_of=plans.plan_of,
    passes=lambda backend, arch: [
        *forward.all_plans(backend, arch),
        *latent.all_plans(backend),
        *backward.all_plans(backend, arch),
    ],
    notes_of=notes_of,
    backward_notes=backward.notes_of,
    block_of=_block_of,
    buffers_of=_buffers_of,
    compiled=_compiled,
    takes_decode=decode.takes,
    forward_plan=forward.plan,
    decode_tiles=_decode_tiles,
    latent_tiles=_latent_tiles,
    decode_splits=_decode_splits,
    splits_of_lengths=_splits_of_lengths,
    backward_plans=_backward_plans,
    list_tiles=_list_tiles,
    bias_grad_plan=_bias_grad_plan,
    latent=latent.KERNEL,
    latent_plan=latent.plan,
)
