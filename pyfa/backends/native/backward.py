"""Backward on every device: what it supports, and the program around its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ... import abi, mods, sizes
from ...device import Device
from ...plan import Plan
from ...problem import (
    STEPS,
    TERMS,
    Call,
    Problem,
    band_of,
    bucket,
    features_of,
    form_of,
    has_bias_tiles,
    is_banded,
    is_square,
    steps_of,
    window_of,
)
from ...shape import Shape
from ...sizes import Extent, Totals
from ..base import Gradients, RunBackward, Saved, gradients_of
from ..common import calls, splits
from ..common.program import Like, Params, Program, count, for_any_total, like, run_of
from . import gaps, lists
from .launch import Launcher
from .plans import banded, name_of, values_of
from .target import BackwardGrid, Block, Target, blocks_of_head


def why_not(problem: Problem) -> list[str]:
    """Return what backward lacks for ``problem``, which has one, beyond features and dtypes."""
    if not problem.page_size:
        return []
    return [
        "backward with a page_table is not implemented: sequences may share a page, and a "
        "workgroup stores the gradients of its keys once"
    ]


def is_general(call: Call) -> bool:
    """Return whether backward computes more than scale and masks between products and softmax."""
    terms = (call.alibi_slopes, call.bias, call.sinks)
    return bool(call.softcap or call.dropout_p or call.mods or any(x is not None for x in terms))


def is_general_problem(problem: Problem) -> bool:
    """Return ``is_general`` for a problem."""
    return bool(problem.features & TERMS)


# A kernel for softcap alone may compute tanh with an error of 2^-22, times the softcap. Beyond this
# softcap the general one computes it, to 2 ulp.
MOST_SOFTCAP = 512.0


def _terms_of(call: Call) -> frozenset[str]:
    """Return the score terms of ``call`` on which the choice of a kernel depends, by feature
    name."""
    found = mods.of(call.mods) if call.mods else None
    given = {
        "softcap": bool(call.softcap),
        "large_softcap": call.softcap > MOST_SOFTCAP,
        "alibi": call.alibi_slopes is not None,
        "bias": call.bias is not None,
        "bias_tiles": has_bias_tiles(call),
        **_kind_of_bias(call.bias, call.q),
        "dropout": call.dropout_p > 0.0,
        "sinks": call.sinks is not None,
        "score_mod": found is not None and found.score is not None,
    }
    return frozenset(name for name, is_given in given.items() if is_given)


def _kind_of_bias(bias: torch.Tensor | None, q: torch.Tensor) -> dict[str, bool]:
    """Return what HIP's kernels for a bias alone ask: whether it has the dtype of q and the keys of
    a row side by side, as one of these names if not."""
    if bias is None:
        return {}
    in_lines = bias.shape[-1] > 1 and bias.stride(-1) == 1
    kinds = {q.dtype: "bias", torch.float32: "float32_bias", torch.bool: "bool_bias"}
    return {kinds.get(bias.dtype, "other_bias") if in_lines else "other_bias": True}


def _readable(given: Saved, bias_grad: bool) -> Saved:
    call, out, lse, dout, dlse = given
    if call.bias is not None and max(call.bias.stride()[-2:], default=0) >= calls.MAX_ROW_STRIDE:
        call = call._replace(bias=call.bias.contiguous())  # offsets inside a tile are 32-bit
    if bias_grad and call.bias is not None and call.bias.numel() and 0 in call.bias.stride():
        # Contiguous, because kernels treat stride 0 as broadcast and sum its gradient.
        call = call._replace(bias=call.bias.contiguous())
    return Saved(
        calls.with_readable(call),
        calls.readable(out),
        whole(lse),
        calls.readable(dout),
        None if dlse is None else dlse.contiguous(),
    )


def bind(launch: Launcher, given: Saved, bias_grad: bool = False) -> RunBackward:
    """Implement ``Backend.bind_backward``."""
    call, direct = given.call, _readable(given, bias_grad)
    fill_direct = direct.filling()

    def bind_kind(*tensors: torch.Tensor) -> Callable[[Totals | None], RunBackward]:
        return _bind(launch, fill_direct(*tensors), bias_grad)

    parts_of = _group_splits_of(launch, direct.call)
    run = for_any_total(direct.call, direct.tensors(), bind_kind, 3, lambda q, k: parts_of(k))
    copied = any(x is not y for x, y in zip(given.tensors(), direct.tensors(), strict=True))
    if not copied:
        return run
    fill, dim, dim_v = given.filling(), call.q.shape[-1], call.v.shape[-1]

    def run_on_copies(*tensors: torch.Tensor) -> Gradients:
        found = run(*_readable(fill(*tensors), bias_grad).tensors())
        dq, dk, dv = found.dq[..., :dim], found.dk[..., :dim], found.dv[..., :dim_v]
        return found._replace(dq=dq, dk=dk, dv=dv)

    return run_on_copies


def _bind(
    launch: Launcher, given: Saved, bias_grad: bool
) -> Callable[[Totals | None], RunBackward]:
    """Bind a call whose tensors the kernels can read without a copy, for any totals of its kind
    (``for_any_total``)."""
    call = given.call
    form = form_of(call)
    names = ("dout", "out", "lse", *form.names, *(("dlse",) if given.dlse is not None else ()))
    chain = _chain(launch, call)
    by_list = lists.Lists(launch, chain)
    program = Program((*names, *by_list.names), call.q)
    parts_of_group = _group_splits_of(launch, call)(call.k.shape[0])
    heads_k = parts_of_group * call.k.shape[-2]
    shapes = (sizes.shape_of(call, name) for name in ("k", "v"))
    dq = like(sizes.shape_of(call, "q"), call.q.dtype)
    dk, dv = (like((*x[:-2], heads_k, x[-1]), call.k.dtype) for x in shapes)
    lse_shape, lse_strides, _ = like(sizes.lse_shape(call), torch.float32)
    for name, each in (("dq", dq), ("dk", dk), ("dv", dv)):
        program.make(name, each)
    pointers = {**abi.pointers_of(call), **{name: name for name in ("dq", "dk", "dv", *names[:3])}}
    if form.shared_offsets:
        pointers["cu_seqlens_k"] = "cu_seqlens_q"
    if given.dlse is not None:
        pointers["dlse"] = "dlse"
    if call.sinks is not None:
        # First the share of each row, then the sums of the blocks that own keys.
        size = count(lse_shape) + call.batch * call.q.shape[-2] * _sink_sums(call, chain)
        program.make("dsinks", like((size,), torch.float32), fill=0.0)
        pointers["dsinks"] = "dsinks"
    # Counted as in the kernels, also for 0 packed rows, whose strides are 1.
    states_of = lse_strides[0] * (call.batch if len(lse_shape) == 3 else call.q.shape[-2])
    states = 2 * states_of + _work_floats(launch, call, chain, heads_k)
    parts = {**sums_of(launch, call, chain), "delta": like((states,), torch.float32)}
    program.make_workspace(parts, launch.APART)
    pointers |= {name: name for name in parts}
    values = abi.forward_values(call, given.out.stride(), lse_strides)
    values |= abi.strides_of("dout", given.dout.stride())
    for name, each in (("dq", dq), ("dk", dk), ("dv", dv)):
        values |= abi.strides_of(name, each[1])
    values["dies"] = launch.device_at(call.q.device).dies
    values |= {"heads_k": heads_k, "num_splits": parts_of_group}
    gaps.add_backward(launch, program, call, dq, dk, dv)
    launches = []
    for plan in chain:
        block = launch.target.block_of(plan)
        heads = call.q.shape[-2] if block.rows else heads_k
        blocks = blocks_of_head(call, block) * heads
        values |= launch.target.order_of(plan, values, blocks)
        launches.append((plan, blocks, block.threads))
    params = Params(values, pointers)
    for plan, blocks, threads in launches:
        own = by_list.params_of(plan, call, params)
        program.add(plan, blocks, threads, own)
    if bias_grad and call.bias is not None:
        _add_bias_grad(launch, program, call, call.bias, params)
    started = launch.launch_of(program, (*given.tensors(), *by_list.of(call)))
    lists_of, of_call = by_list.bound(call, form), slice(3, 3 + len(form.names))
    aligned, rows = 7 if has_bias_tiles(call) else 6, (0, 2) if given.lse.dim() == 3 else 1
    numbers = {name: number for number, name in enumerate(program.made)}
    dsinks_at, dbias_at = numbers.get("dsinks"), numbers.get("dbias")
    runs = run_of(program, started, launch.empty, aligned)

    def sized(totals: Totals | None) -> RunBackward:
        run = runs(totals)

        def backward(*tensors: torch.Tensor) -> Gradients:
            of_lists = lists_of(tensors[of_call]) if by_list.names else ()
            found = run(*tensors, *of_lists)
            dq, dk, dv = found[:3]
            if parts_of_group > 1:
                # The sum is computed in float32 and rounded again. ``dtype`` is given, because
                # under autocast the result would otherwise stay in float32.
                parted = (x.unflatten(-2, (-1, parts_of_group)) for x in (dk, dv))
                dk, dv = (x.sum(-2, dtype=x.dtype) for x in parted)
            dsinks = None
            if dsinks_at is not None:
                lse = tensors[2]
                dsinks = found[dsinks_at][: lse.numel()].view(lse.shape).sum(rows)
            dbias = None if dbias_at is None else found[dbias_at]
            return gradients_of((dq, dk, dv, dbias, dsinks, ()))

        return backward

    return sized


def _work_floats(launch: Launcher, call: Call, chain: Sequence[Plan], heads_k: int) -> Extent:
    """Return the size of the counter of work tiles and of the table with the keys of each work
    tile, or 0 without a table (``kernels/cuda/bwd_work.h``). They follow the row states, in whole
    units of 16 bytes."""
    block = next(x for x in map(launch.target.block_of, chain) if x.keys)
    if not block.table:
        return 0
    tiles = blocks_of_head(call, block) * heads_k if call.has_spare_k else 0
    return 3 + 4 + 4 * tiles


def _add_bias_grad(
    launch: Launcher, program: Program, call: Call, bias: torch.Tensor, params: Params
) -> None:
    """Add the kernel of the gradient of the bias, which is ``out`` in its Params."""
    make = launch.target.bias_grad_plan
    assert make is not None, "FEATURES has the gradient of bias"
    arch = launch.device_at(call.q.device).arch
    dims = call.q.shape[-1], call.v.shape[-1]
    dtype = calls.dtype_code(call.q)
    plan = make(launch.target.name, arch, dims, dtype, call.mods, _terms_of(call))
    if _is_banded(call):
        plan = banded(plan)
    block = launch.target.block_of(plan)
    made = like(bias.shape, bias.dtype)
    program.make("dbias", made)
    strides = dict(zip(("out_batch", "out_head", "out_row"), made[1][:3], strict=True))
    own = Params({**params.values, **strides}, {**params.pointers, "out": "dbias"})
    batches, heads, rows, keys = bias.shape
    # If the bias has only one row or one key, one block covers all rows or all keys.
    blocks = batches * heads * -(-rows // block.rows) * -(-keys // block.keys)
    program.add(plan, blocks, block.threads, own)


def bias_plan_for(target: Target, backend: str, problem: Problem) -> Plan:
    """Return the plan of a problem's gradient of bias."""
    assert target.bias_grad_plan is not None
    arch, dims = target.device_of(problem).arch, (problem.head_dim, problem.head_dim_v)
    dtype = calls.DTYPE_CODES[problem.dtype]
    terms = problem.features & TERMS
    plan = target.bias_grad_plan(backend, arch, dims, dtype, problem.mods, terms)
    return banded(plan) if is_banded(problem.features) else plan


# Features with which the tiles do not depend on the grid.
_OF_ANY_GRID = frozenset({"batch_invariant", "chunk", "negative_edge"})


def _grid_of(
    device: Device, features: frozenset[str], square: bool, window: int, shape: Shape
) -> BackwardGrid | None:
    """Return the properties by which the tiles of a backward are chosen, or None if the tiles must
    not depend on sizes. ``window``: the number of keys in a row's window, 0 if it has no bound on
    one side."""
    masked = not features.isdisjoint({"causal", "window"})
    open_window = "window" in features and not window
    if features & _OF_ANY_GRID or open_window or (masked and not square):
        return None
    steps = steps_of(features)
    left, right = bucket(window, STEPS) - 1, 0 if masked else -1
    return BackwardGrid(
        shape._replace(
            batch=bucket(shape.batch, steps),
            seqlen_q=bucket(shape.seqlen_q, steps),
            seqlen_k=bucket(shape.seqlen_k, steps),
            window_left=left,
            window_right=right,
        ),
        device,
    )


def plans_for(target: Target, backend: str, problem: Problem) -> tuple[Plan, ...]:
    """Return the plans of a problem's backward."""
    device = target.device_of(problem)
    shape = Shape(
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_k,
        problem.head_dim,
        problem.head_dim_v,
    )
    plans = target.backward_plans(
        backend,
        device.arch,
        (problem.head_dim, problem.head_dim_v),
        calls.DTYPE_CODES[problem.dtype],
        is_general_problem(problem),
        "deterministic" in problem.features,
        problem.mods,
        problem.features & TERMS,
        _grid_of(device, problem.features, problem.square, problem.window, shape),
    )
    return tuple(map(banded, plans)) if is_banded(problem.features) else plans


def _chain(launch: Launcher, call: Call) -> tuple[Plan, ...]:
    """Return the launches of one pass, in order."""
    device, features = launch.device_at(call.q.device), features_of(call, True, False)
    sums, first, last = launch.target.backward_plans(
        launch.target.name,
        device.arch,
        (call.q.shape[-1], call.v.shape[-1]),
        calls.dtype_code(call.q),
        is_general(call),
        call.deterministic,
        call.mods,
        _terms_of(call),
        _grid_of(device, features, is_square(call), window_of(call), _shape_of(call)),
    )
    return (sums, banded(first), banded(last)) if _is_banded(call) else (sums, first, last)


def _sink_sums(call: Call, chain: Sequence[Plan]) -> int:
    """Return the number of sums for the gradient of each sink that the kernel over keys leaves:
    one per 16 keys (``kernels/common/row_sums.h``)."""
    leaves = "TERMS" in values_of(chain[1]) or name_of(chain[1]) == "attn_bwd_onepass"
    return -(-call.max_seqlen_k // 128) * 8 if leaves else 0


def _is_banded(call: Call) -> bool:
    band = band_of(call)
    return bool(band.window_shift or band.attention_chunk)


def _group_splits_of(launch: Launcher, call: Call) -> Callable[[int], int]:
    """Return a function of the total of packed keys: into how many parts the query heads of each
    group are divided."""
    if call.batch_invariant or call.q.shape[-2] <= call.k.shape[-2]:
        return lambda total: 1  # with batch_invariant, because the bits of dK depend on it
    chain = _chain(launch, call)
    block = next(x for x in map(launch.target.block_of, chain) if x.keys)
    packed, shape = call.cu_seqlens_k is not None, _shape_of(call)
    device = launch.device_at(call.q.device)
    return lambda total: group_splits(device, block, shape, total if packed else None)


def _shape_of(call: Call) -> Shape:
    return Shape(
        call.batch,
        call.max_seqlen_q,
        call.max_seqlen_k,
        call.q.shape[-2],
        call.k.shape[-2],
        call.q.shape[-1],
        call.v.shape[-1],
        call.window_left,
        call.window_right,
    )


def group_splits(device: Device, block: Block, shape: Shape, packed_k: int | None = None) -> int:
    """Return into how many parts to divide the query heads of each group, if workgroups like
    ``block`` own keys. ``packed_k``: the total of packed keys."""
    group = shape.heads_q // max(1, shape.heads_k)
    if group <= 1:
        return 1
    of_sequence = max(1, -(-shape.seqlen_k // block.keys))
    tiles = of_sequence * shape.batch
    if packed_k is not None:
        tiles = min(tiles, packed_k // block.keys + shape.batch)
    rows, (left, right) = shape.seqlen_q, (shape.window_left, shape.window_right)
    if left >= 0 and right >= 0:
        rows = min(rows, left + right + block.keys)
    uneven = (left >= 0) is not (right >= 0)
    # Of Q and dO, and the float32 of dQ.
    row_bytes = 2 * (shape.head_dim + shape.head_dim_v) + 4 * shape.head_dim
    l2_share = rows * group * row_bytes / of_sequence / device.l2_bytes if device.l2_bytes else 0.0
    visited = splits.Visited(tiles * shape.heads_k, rows * group, uneven, l2_share)
    return splits.of_group(group, visited, device.units, block.parts)


def sums_of(launch: Launcher, call: Call, chain: Sequence[Plan]) -> dict[str, Like]:
    """Return the float32 accumulator of dQ for blocks that own keys and, if gradients are
    deterministic, the counter that orders their additions."""
    if name_of(chain[-1]) != "dq_convert":
        return {}
    rows, heads = launch.target.block_of(chain[0]).rows, call.q.shape[-2]
    # Each packed sequence begins at a new tile.
    tiles: Extent = -(-call.max_seqlen_q // rows) * call.batch
    if call.cu_seqlens_q is not None:
        tiles = sizes.shape_of(call, "q")[0] // rows + call.batch
    values = values_of(chain[-1])
    # The states of the tiles follow their sums (kernels/cuda/sm80/bwd_dq.h).
    states = 0 if call.deterministic else values.get("DQ_UNSET", 0)
    floats = rows * values["HEAD_DIM"] + states
    found = {"dq_accum": like((tiles * heads * floats,), torch.float32)}
    if call.deterministic:
        found["counter"] = like((tiles * heads,), torch.int32)
    return found


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the strides of a tensor of its own, which kernels rely on.

    ``contiguous`` ignores the stride of a dimension of size 1. In a slice of a larger LSE that
    stride would be the larger tensor's, and kernels would write their row states beyond the tensor.
    """
    x = x.contiguous()
    heads, rows = (max(size, 1) for size in x.shape[-2:])
    own = (heads * rows, rows, 1)[-x.dim() :]
    return x if x.stride() == own else x.as_strided(x.shape, own)
