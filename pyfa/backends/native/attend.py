"""Bind a forward or decode: the program around its kernel, as a function of a call's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import abi, sizes
from ...plan import Plan
from ...problem import (
    Append,
    Call,
    are_on_16,
    bias_fours,
    form_of,
    has_bias_tiles,
    tensors_of,
)
from ...sizes import Extent, Totals
from ..base import OtherAlignment, Run
from ..common.program import Params, Program, count, for_any_total, like, run_of
from . import append as appending
from . import combine, gaps, lists
from .launch import Launcher
from .plans import is_packed
from .target import Target


class Grid(NamedTuple):
    """``blocks`` workgroups of ``threads`` for each of ``num_splits`` splits of the keys.

    ``chunked``: the keys have more than one chunk (``target.Block``). Either each chunk is a split,
    or each workgroup goes through all chunks itself and keeps its state between chunks in memory:
    ``kept`` floats for the whole launch."""

    blocks: Extent
    threads: int
    num_splits: int
    chunked: bool = False
    kept: int = 0


def blocks_of(target: Target, plan: Plan, call: Call) -> int:
    """Return the workgroups of ``plan``'s kernel for ``call``, for one split of the keys."""
    block, rows, heads = target.block_of(plan), call.max_seqlen_q, call.q.shape[-2]
    if not is_packed(plan, target.decode, target.latent):
        return -(-rows // block.rows) * heads * call.batch
    heads_k = call.k.shape[-2]
    group = heads // heads_k
    return -(-rows * group // block.lines_of(group)) * heads_k * call.batch


def bind(
    launch: Launcher,
    plan: Plan,
    call: Call,
    append: Append | None,
    with_lse: bool,
    readable: Callable[[Call], Call],
    grid_of: Callable[[Call], Grid],
) -> Run:
    """Bind ``plan``'s kernel as a function of the tensors of ``call`` and ``append``, or others
    like them, that returns out and, if requested, LSE.

    ``readable`` copies tensors whose layout the kernel cannot read. The function raises
    ``OtherAlignment`` if the 16-byte alignment of q, k or v differs from that of ``call``.
    """
    direct = readable(call)
    before, prepared = (call, None) if append is None else appending.readable(call, append)

    def bind_readable(call: Call, append: Append | None) -> Run:
        form = form_of(call, append)

        def bind_kind(*tensors: torch.Tensor) -> Callable[[Totals | None], Run]:
            return _bind(launch, plan, *form.fill(tensors), with_lse, grid_of)

        return for_any_total(call, tensors_of(call, append), bind_kind)

    if _same(tensors_of(call, append), tensors_of(direct, prepared)):
        return bind_readable(call, append)
    form, aligned, dim_v = form_of(call, append), are_on_16(*call[:3]), call.v.shape[-1]
    ready = None if prepared is None else appending.bind(launch, before, prepared)
    run = None if ready is not None else bind_readable(direct, None)

    def run_on_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal run
        if are_on_16(*tensors[:3]) is not aligned:
            raise OtherAlignment
        given, new = form.fill(tensors)
        if ready is not None and new is not None:
            # The append writes to the cache itself. Attention then reads a copy of the cache.
            given = ready(*appending.readable(given, new))
        given = readable(given)
        if run is None:
            run = bind_readable(given, None)
        out, *rest = run(*tensors_of(given))
        return [out[..., :dim_v], *rest]

    return run_on_copies


def _same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


def _bind(
    launch: Launcher,
    plan: Plan,
    call: Call,
    append: Append | None,
    with_lse: bool,
    grid_of: Callable[[Call], Grid],
) -> Callable[[Totals | None], Run]:
    """Bind a call whose tensors the kernels can read without a copy, for any totals of its kind
    (``for_any_total``)."""
    form, inputs = form_of(call, append), tensors_of(call, append)
    by_list = lists.Lists(launch, (plan,))
    program = Program((*form.names, *by_list.names), call.q)
    out = like(sizes.out_shape(call), call.dtype_of_out())
    lse = like(sizes.lse_shape(call), torch.float32)
    program.make("out", out)
    has_lse = with_lse or launch.NEEDS_LSE
    if has_lse:
        program.make("lse", lse)
    pointers = abi.pointers_of(call)
    if form.shared_offsets:
        pointers["cu_seqlens_k"] = "cu_seqlens_q"
    if append is not None:
        pointers |= appending.add(launch, program, call, append)
        if append.cos is not None:
            # The rotated queries are contiguous, whatever the strides of q are.
            call = call._replace(q=torch.empty_like(call.q, memory_format=torch.contiguous_format))
    if count(lse[0]) and call.batch and call.max_seqlen_q:
        grid = grid_of(call)
        if grid.blocks:
            _add(launch, program, plan, call, grid, pointers, has_lse, by_list)
    elif count(out[0]) or count(lse[0]):
        gaps.add_forward(launch, program, call, out, lse if has_lse else None)
    started = launch.launch_of(program, (*inputs, *by_list.of(call)))
    # A bias that is copied in tiles or loaded in fours is the next input and must be aligned, too.
    # Other kernels that read a bias may rely on this.
    of_units = has_bias_tiles(call) or bias_fours(call)
    runs = run_of(program, started, launch.empty, 4 if of_units else 3)
    if not by_list.names:
        return runs
    lists_of = by_list.bound(call, form)

    def sized(totals: Totals | None) -> Run:
        run = runs(totals)
        return lambda *tensors: run(*tensors, *lists_of(tensors))

    return sized


def _add(
    launch: Launcher, program: Program, plan: Plan, call: Call, grid: Grid,
    pointers: dict[str, str], has_lse: bool, by_list: lists.Lists,
) -> None:  # fmt: skip
    """Add the kernel, a step before it that clears rows of no sequence, and one after it that
    combines splits."""
    out, lse = program.likes[0], like(sizes.lse_shape(call), torch.float32)
    written = lse if has_lse else None
    splits = grid.num_splits
    values = abi.forward_values(call, out[1], lse[1])
    values |= {"dies": launch.device_at(call.q.device).dies, "num_splits": splits}
    values |= launch.target.order_of(plan, values, grid.blocks)
    if splits > 1:
        parts = combine.partials(call, splits, grid.chunked)
        program.make_workspace(parts, launch.APART)
        pointers |= {name: name for name in parts}
    else:
        pointers["out"] = "out"
        if has_lse:
            pointers["lse"] = "lse"
        if grid.kept:
            program.make_workspace({"partial_out": like((grid.kept,), torch.float32)}, launch.APART)
            pointers["partial_out"] = "partial_out"
    if call.has_spare_q and splits == 1:
        gaps.add_forward(launch, program, call, out, written)
    params = by_list.params_of(plan, call, Params(values, pointers))
    program.add(plan, grid.blocks * splits, grid.threads, params)
    if splits > 1:
        combine.add(launch, program, call, out, written, splits, grid.chunked)
