"""Backward on the host: delta, dK and dV, dQ, then what only some calls ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...problem import Call
from ..base import Gradients, RepeatBackward
from ..common.ready import ready_backward
from . import specs
from .kernel import Kernel, address, no_float

if TYPE_CHECKING:
    from .runtime import Given, Runner


# A kernel, the number of its programs and its arguments.
Launch = Callable[..., None]


def _launch(kernel: Kernel, programs: int, *arguments: Any) -> None:
    kernel(programs, *arguments)


class _Saved(NamedTuple):
    """What came in and what ``row_state`` made of it, with strides in the kernels' order."""

    dout: torch.Tensor
    base: torch.Tensor
    delta: torch.Tensor
    dout_strides: tuple[int, ...]
    state_strides: tuple[int, int]
    lse_strides: tuple[int, int]


def backward(
    runner: Runner,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
    launch: Launch = _launch,
) -> Gradients:
    """``Backend.backward``; its kernels but the bias's go to ``launch``."""
    given = runner.given(call)
    heads = call.q.shape[-2]
    out, dout = (_readable(x, runner.constants["div_dv"]) for x in (out, dout))
    lse = lse.contiguous()
    saved = _row_state(runner, call, given, out, lse, dout, dlse, launch)
    sizes = (call.batch, heads, heads // call.k.shape[-2], call.q.shape[-1], call.v.shape[-1],
             call.max_seqlen_q, call.max_seqlen_k, given.page_size)  # fmt: skip
    dk, dv = _grad_keys(runner, call, given, saved, sizes, launch)
    dots = torch.empty_like(lse) if call.sinks is not None else None
    dq = _grad_rows(runner, call, given, saved, sizes, launch, dots)
    dsinks = dbias = None
    if call.sinks is not None and dots is not None:
        dsinks = _grad_sinks(call.sinks, lse, dots if dlse is None else dots - dlse)
    if bias_grad and call.bias is not None:
        dbias = _grad_bias(runner, call, given, saved, sizes)
    return Gradients(dq, dk, dv, dbias, dsinks)


def repeat(
    runner: Runner, call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> RepeatBackward | None:
    """``RepeatingBackward.repeat_backward`` of a plain call, where nothing is copied.

    The kernels get what ``backward`` gives them, with other addresses: these lead their arguments.
    """
    given = runner.given(call)
    copied = any(x is not y for x, y in zip(given[:3], call[:3], strict=True))
    copied |= any(_readable(x, runner.constants["div_dv"]) is not x for x in (out, dout))
    if copied or not lse.is_contiguous():
        return None
    noted: list[tuple[Kernel, int, tuple[Any, ...]]] = []

    def note(kernel: Kernel, programs: int, *args: Any) -> None:
        noted.append((kernel, programs, args))

    made = backward(runner, call, out, lse, dout, None, False, note)
    if len(noted) != 2 + len(runner.keys_roles):
        return None
    *_, base, delta = noted[0][2][:6]
    behind = delta - base
    counts = (6, *(8,) * (len(noted) - 1))
    state, *over_keys, over_rows = (
        partial(kernel.prepared(count, args[count:]), (programs,))
        for count, (kernel, programs, args) in zip(counts, noted, strict=True)
    )

    def launch(
        q: int, k: int, v: int, out: int, lse: int, dout: int, dq: int, dk: int, dv: int, base: int
    ) -> None:
        delta = base + behind
        state(out, dout, lse, 0, base, delta)
        for each in over_keys:
            each(q, k, v, dout, dk, dv, base, delta)
        over_rows(q, k, v, dout, dq, base, delta, 0)

    return ready_backward(launch, made, behind // 2)


def _readable(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """``x`` with contiguous rows and the alignment that the kernels were compiled for."""
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % 16 or any(stride % divisor for stride in strides):
        # Not contiguous(), which leaves a misaligned base where it is.
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x


def _row_state(
    runner: Runner, call: Call, given: Given, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None, launch: Launch,
) -> _Saved:  # fmt: skip
    heads, rows = call.q.shape[-2], call.q.shape[-3]
    out_strides, strides = out.stride()[:-1], dout.stride()[:-1]
    if call.cu_seqlens_q is not None:
        shape = (heads, (rows // 4 + call.batch) * 4)
        state_strides, lse_strides = (0, shape[-1]), (0, rows)
        out_strides, strides = (0, *out_strides), (0, *strides)
    else:
        padded = -(-rows // 4) * 4
        shape = (call.batch * heads, padded)
        state_strides, lse_strides = (heads * padded, padded), (heads * rows, rows)
    base, delta = torch.empty((2, *shape), dtype=torch.float32, device=lse.device).unbind()
    saved = _Saved(dout, base, delta, strides, state_strides, lse_strides)
    dlse = dlse.contiguous() if dlse is not None else None
    blocks = -(-call.max_seqlen_q // specs.state_lines(runner.constants))
    programs = blocks * heads * call.batch
    if programs:
        key = ("state", out.device.index)
        kernel = runner.kernel(key, lambda: specs.state_spec(runner.constants))
        options = given.options
        launch(
            kernel, programs, address(out), address(dout), address(lse),
            no_float if dlse is None else address(dlse), address(base), address(delta),
            options[4], options[6], options[11], *out_strides, *strides, *lse_strides,
            *state_strides, call.batch, heads, out.shape[-1], call.max_seqlen_q, blocks,
            0 if dlse is None else 1,
        )  # fmt: skip
    return saved


def _grad_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """−Σ p_sink · delta over all rows of a head; nothing from rows that see nothing.

    ``delta`` from P∘dP: from the rounded O the sum over rows is three times as far off as naive
    attention's.
    """
    column = (-1, 1, 1) if lse.dim() == 3 else (-1, 1)
    p = torch.exp(sinks.view(column if lse.dim() == 2 else (1, -1, 1)) - lse)
    parts = torch.where(lse > -torch.inf, p * delta, 0.0)
    return -parts.sum((0, 2) if lse.dim() == 3 else 1)


def _grad_keys(
    runner: Runner, call: Call, given: Given, saved: _Saved, sizes: tuple[int, ...], launch: Launch
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, group, *_ = sizes
    k, v = given.k, given.v
    heads_k, longest = heads // group, call.max_seqlen_k
    paged = call.page_table is not None
    kinds = (k, v)
    shapes = [tuple(x.shape) for x in kinds]
    dtype = k.dtype
    if paged:
        shapes = [(batch, longest, heads_k, x.shape[-1]) for x in kinds]
        dtype = torch.float32
    # Rows that no program writes: beyond a sequence's length, or of no sequence.
    gaps = call.cu_seqlens_k is not None or call.seqused_k is not None or paged
    make = torch.zeros if gaps or call.cache_leftpad is not None else torch.empty
    dk, dv = (make(shape, dtype=dtype, device=k.device) for shape in shapes)
    strides = [(0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3] for x in (dk, dv)]
    elements = call.max_seqlen_q * group * (sizes[3] + sizes[4])
    section = runner.section(elements, 1, batch * heads_k)
    for role in runner.keys_roles:
        block = runner.constants[f"{role}_block_n"]
        blocks = -(-longest // block)
        programs = blocks * heads_k * batch
        if not programs:
            continue
        variant = runner.variant(call, given, max(block, runner.constants[f"{role}_block_m"]))
        key = (role, variant, k.device.index)
        kernel = runner.kernel(key, partial(specs.keys_spec, runner.constants, variant, role))
        launch(
            kernel, programs, address(given.q), address(k), address(v), address(saved.dout),
            address(dk), address(dv), address(saved.base), address(saved.delta), *given.options,
            *given.strides, *saved.dout_strides, *strides[0], *strides[1], *saved.state_strides,
            *given.more_strides, batch, heads_k, *sizes[2:], blocks, section, 0, *given.numbers,
        )  # fmt: skip
    if not paged:
        return dk, dv
    return _to_pages(call, k, dk), _to_pages(call, v, dv)


def _to_pages(call: Call, like: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Sums the gradient of each sequence's keys into the pages that hold them."""
    table, used = call.page_table, call.seqused_k
    assert table is not None
    page_size, longest = like.shape[1], dense.shape[1]
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    position = torch.arange(longest, device=like.device)
    if call.cache_leftpad is not None:
        position = position + call.cache_leftpad[:, None]
    else:
        position = position[None, :].expand(table.shape[0], -1)
    stored = table.shape[1] * page_size if used is None else used[:, None]
    exists = position < stored
    position = position.clamp(max=table.shape[1] * page_size - 1)
    sequence = torch.arange(table.shape[0], device=like.device)[:, None]
    # Table entries beyond the used pages may hold anything; what lands on page 0 there is 0.
    page = torch.where(exists, table[sequence, position // page_size], 0).long()
    # Sums duplicates (pages that sequences share) by sorting: the same bits on every run.
    total.index_put_((page, position % page_size), dense, accumulate=True)
    return total.to(like.dtype)


def _grad_rows(
    runner: Runner, call: Call, given: Given, saved: _Saved, sizes: tuple[int, ...],
    launch: Launch, dots: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    batch, heads, group, dim, dim_v, rows, longest, _ = sizes
    q = given.q
    gaps = call.cu_seqlens_q is not None or call.seqused_q is not None
    dq = (torch.zeros if gaps else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
    strides = (0, *dq.stride()[:2]) if dq.dim() == 3 else dq.stride()[:3]
    blocks = -(-rows // runner.constants["dq_block_m"])
    programs = blocks * heads * batch
    if programs:
        variant = runner.variant(call, given, runner.constants["dq_block_n"])
        key = ("dq", variant, dots is not None, q.device.index)
        kernel = runner.kernel(
            key, lambda: specs.rows_spec(runner.constants, variant, dots is not None)
        )
        section = runner.section(longest * (dim + dim_v), group, heads * batch)
        launch(
            kernel, programs, address(q), address(given.k), address(given.v), address(saved.dout),
            address(dq), address(saved.base), address(saved.delta),
            no_float if dots is None else address(dots), *given.options, *given.strides,
            *saved.dout_strides, *strides, *saved.state_strides, *saved.lse_strides,
            *given.more_strides, *sizes,
            blocks, section, int(runner.reversed), *given.numbers,
        )  # fmt: skip
    return dq


def _grad_bias(
    runner: Runner, call: Call, given: Given, saved: _Saved, sizes: tuple[int, ...]
) -> torch.Tensor:
    bias = given.kept[0]
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    all_rows = bias.shape[2] < call.max_seqlen_q
    all_keys = bias.shape[3] < call.max_seqlen_k
    tiles = 1 if all_rows else -(-bias.shape[2] // specs.BIAS_TILE)
    tiles *= 1 if all_keys else -(-bias.shape[3] // specs.BIAS_TILE)
    programs = bias.shape[0] * bias.shape[1] * tiles
    if programs:
        variant = runner.variant(call, given, specs.BIAS_TILE)
        key = ("bias", variant, all_rows, all_keys, bias.device.index)
        kernel = runner.kernel(
            key, lambda: specs.bias_spec(runner.constants, variant, all_rows, all_keys)
        )
        kernel(
            programs, address(given.q), address(given.k), address(given.v), address(saved.dout),
            address(dbias), address(saved.base), address(saved.delta), *given.options,
            *given.strides, *saved.dout_strides, *saved.state_strides, *given.more_strides, *sizes,
            *bias.shape, *given.numbers,
        )  # fmt: skip
    return dbias.to(call.bias.dtype) if call.bias is not None else dbias
