"""Backward on the host: delta, dK and dV, dQ, and gradients that only some calls need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ... import sizes
from ...problem import Call, Form, are_on_16, form_of
from ...sizes import Shape, Totals
from ..base import Gradients, RunBackward, Saved
from ..common.program import Like, Program, for_any_total, like, run_of
from . import runtime, specs
from .kernel import Kernel, Launch, Slot, no_float
from .runtime import Given, Runner
from .runtime_lists import ByLists
from .specs import INTERPRETED


def bind(runner: Runner, given: Saved, bias_grad: bool) -> RunBackward:
    """Implement ``Backend.bind_backward``."""
    call, divisor, fill = given.call, runner.constants["div_dv"], given.filling()
    direct = _all_readable(given, divisor)
    run, moods = _bind(runner, direct, bias_grad), _moods(runner, direct)
    copied = any(x is not y for x, y in zip(given.tensors(), direct.tensors(), strict=True))
    if not copied and call.bias is None and not runner.tf32:
        return run

    def run_on_copies(*tensors: torch.Tensor) -> Gradients:
        now = _all_readable(fill(*tensors), divisor)
        again = run if _moods(runner, now) == moods else _bind(runner, now, bias_grad)
        return again(*now.tensors())

    return run_on_copies


def _bind(runner: Runner, given: Saved, bias_grad: bool) -> RunBackward:
    """Bind a call whose tensors the kernels can read without a copy."""
    fill, on_16 = given.filling(), _are_on_16(given)

    def bind_kind(*tensors: torch.Tensor) -> Callable[[Totals | None], RunBackward]:
        saved = fill(*tensors)
        with runtime.on(saved.call.q):
            return _Passes(runner, saved, bias_grad).bind(on_16)

    return for_any_total(given.call, given.tensors(), bind_kind, 3)


def _all_readable(given: Saved, divisor: int) -> Saved:
    """Return the tensors as the kernels read them."""
    return Saved(
        runtime.readable(given.call),
        _readable(given.out, divisor),
        given.lse.contiguous(),
        _readable(given.dout, divisor),
        None if given.dlse is None else given.dlse.contiguous(),
    )


def _are_on_16(given: Saved) -> bool:
    """Return whether dO, out, LSE, q, k and v are aligned to 16 bytes."""
    return are_on_16(given.dout, given.out, given.lse, *given.call[:3])


def _moods(runner: Runner, given: Saved) -> tuple[object, ...]:
    """Return what the kernels depend on besides shapes, strides and dtypes."""
    return (*runner.moods(given.call), _are_on_16(given))


def _readable(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return ``x`` with contiguous rows and the alignment that the kernels were compiled for."""
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % 16 or any(stride % divisor for stride in strides):
        # ``contiguous()`` would keep a misaligned base address.
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x


class _Passes:
    """The kernels of one backward, and the buffers between them."""

    def __init__(self, runner: Runner, given: Saved, bias_grad: bool) -> None:
        call = given.call
        heads = call.q.shape[-2]
        self.runner, self.saved, self.call = runner, given, call
        self.bias_grad = bias_grad and call.bias is not None
        self.given: Given = runner.given(call)
        self.form: Form = form_of(call)
        names = ("dout", "out", "lse", *self.form.names)
        names = (*names, *(("dlse",) if given.dlse is not None else ()))
        empty = not (call.batch and heads and call.max_seqlen_q and call.max_seqlen_k)
        self.by_lists = ByLists(runner, call, () if empty else (*runner.keys_roles, "dq"))
        self.program = Program((*names, *self.by_lists.names), call.q)
        self.sizes = (call.batch, heads, heads // call.k.shape[-2], call.q.shape[-1],
                      call.v.shape[-1], call.max_seqlen_q, call.max_seqlen_k,
                      self.given.page_size)  # fmt: skip
        self.steps: list[tuple[Kernel, int, tuple[Any, ...]]] = []
        self.index = call.q.device.index

    def bind(self, on_16: bool) -> Callable[[Totals | None], RunBackward]:
        call, program = self.call, self.program
        dq, dk, dv = self._make_gradients()
        self._row_state()
        self._grad_keys(dk, dv)
        has_sinks, bias_grad = call.sinks is not None, self.bias_grad
        if has_sinks:
            program.make("dots", like(sizes.lse_shape(call), torch.float32))
        self._grad_rows(dq)
        if bias_grad:
            self._grad_bias()
        numbers = runtime.numbers_of(program, self.form)
        steps: list[Launch] = [
            kernel.bind(programs, arguments, numbers) for kernel, programs, arguments in self.steps
        ]
        empty = runtime.EMPTY[call.q.device.type]
        runs = run_of(program, runtime.launching(steps), empty, 6, on_16)
        made = {name: number for number, name in enumerate(program.made)}
        fill, paged = self.saved.filling(), call.page_table is not None
        lists_of = self.by_lists.bound(call, self.form)
        of_call = slice(3, 3 + len(self.form.names))

        def sized(totals: Totals | None) -> RunBackward:
            run = runs(totals)

            def backward(*tensors: torch.Tensor) -> Gradients:
                found = run(*tensors, *lists_of(tensors[of_call]))
                dq, dk, dv = found[:3]
                if not (paged or has_sinks or bias_grad):
                    return Gradients(dq, dk, dv)
                call, _, lse, _, dlse = fill(*tensors)
                if paged:
                    dk, dv = _to_pages(call, call.k, dk), _to_pages(call, call.v, dv)
                dsinks = dbias = None
                if call.sinks is not None and has_sinks:
                    dots = found[made["dots"]]
                    dsinks = _grad_sinks(call.sinks, lse, dots if dlse is None else dots - dlse)
                if bias_grad:
                    dbias = found[made["dbias"]]
                return Gradients(dq, dk, dv, dbias, dsinks)

            return backward

        return sized

    def _make_gradients(self) -> tuple[Like, Like, Like]:
        """Make the gradients, filled with 0 if no program writes some of their rows: rows beyond a
        sequence's length, or of no sequence. Gradients of pages are dense in float32 at first."""
        call = self.call
        paged = call.page_table is not None
        gaps_k = call.has_spare_k or paged or call.cache_leftpad is not None
        shapes = [sizes.shape_of(call, name) for name in ("q", "k", "v")]
        dtype = call.k.dtype
        if paged:
            batch, heads, group, *_ = self.sizes
            longest = call.max_seqlen_k
            shapes[1:] = [(batch, longest, heads // group, x.shape[-1]) for x in call[1:3]]
            dtype = torch.float32
        likes = like(shapes[0], call.q.dtype), like(shapes[1], dtype), like(shapes[2], dtype)
        for name, each, gaps in zip(("dq", "dk", "dv"), likes, (call.has_spare_q, *(gaps_k,) * 2)):  # noqa: B905
            self.program.make(name, each, 0.0 if gaps else None)
        return likes

    def _row_state(self) -> None:
        """Compute ``base`` and ``delta`` of every row."""
        call, saved, runner = self.call, self.saved, self.runner
        heads, rows = call.q.shape[-2], sizes.shape_of(call, "q")[-3]
        out_strides: tuple[int, ...] = saved.out.stride()[:-1]
        strides: tuple[int, ...] = saved.dout.stride()[:-1]
        if call.cu_seqlens_q is not None:
            padded = (rows // 4 + call.batch) * 4
            shape: Shape = (heads, padded)
            self.state_strides: Shape = (0, padded)
            self.lse_strides: Shape = (0, rows)
            out_strides, strides = (0, *out_strides), (0, *strides)
        else:
            padded = -(-rows // 4) * 4
            shape = (call.batch * heads, padded)
            self.state_strides, self.lse_strides = (heads * padded, padded), (heads * rows, rows)
        self.dout_strides = strides
        state = like(shape, torch.float32)
        self.program.make_workspace({"base": state, "delta": state}, apart=INTERPRETED)
        blocks = -(-call.max_seqlen_q // specs.state_lines(runner.constants))
        programs = blocks * heads * call.batch
        if not programs:
            return
        kernel = runner.kernel(("state", self.index), lambda: specs.state_spec(runner.constants))
        options, has_dlse = self.given.options, saved.dlse is not None
        arguments = (
            Slot("out"), Slot("dout"), Slot("lse"), Slot("dlse") if has_dlse else no_float,
            Slot("base"), Slot("delta"), options[4], options[6], options[11], *out_strides,
            *strides, *self.lse_strides, *self.state_strides, call.batch, heads,
            saved.out.shape[-1], call.max_seqlen_q, blocks, int(has_dlse),
        )  # fmt: skip
        self.steps.append((kernel, programs, arguments))

    def _grad_keys(self, dk: Like, dv: Like) -> None:
        call, runner, given = self.call, self.runner, self.given
        batch, heads, group, *_ = self.sizes
        heads_k, longest = heads // group, call.max_seqlen_k
        strides = [(0, *x[1][:2]) if len(x[0]) == 3 else x[1][:3] for x in (dk, dv)]
        elements = call.max_seqlen_q * group * (self.sizes[3] + self.sizes[4])
        section = runner.section(elements, 1, batch * heads_k)
        for role in runner.keys_roles:
            block = runner.constants[f"{role}_block_n"]
            blocks = -(-longest // block)
            programs = blocks * heads_k * batch
            if not programs:
                continue
            variant = runner.variant(call, given, max(block, runner.constants[f"{role}_block_m"]))
            listed = role in self.by_lists
            key = (role, variant, listed, self.index)
            make = partial(specs.keys_spec, runner.constants, variant, role, listed)
            kernel = runner.kernel(key, make)
            arguments = (
                Slot("q"), Slot("k"), Slot("v"), Slot("dout"), Slot("dk"), Slot("dv"), Slot("base"),
                Slot("delta"), *given.options, *given.strides, *self.dout_strides, *strides[0],
                *strides[1], *self.state_strides, *given.more_strides, batch, heads_k,
                *self.sizes[2:], blocks, section, 0, *given.numbers,
                *self.by_lists.arguments(role, call), *given.captured,
            )  # fmt: skip
            self.steps.append((kernel, programs, arguments))

    def _grad_rows(self, dq: Like) -> None:
        call, runner, given = self.call, self.runner, self.given
        batch, heads, group, dim, dim_v, rows, longest, _ = self.sizes
        strides = (0, *dq[1][:2]) if len(dq[0]) == 3 else dq[1][:3]
        blocks = -(-rows // runner.constants["dq_block_m"])
        programs = blocks * heads * batch
        if not programs:
            return
        variant = runner.variant(call, given, runner.constants["dq_block_n"])
        has_dots, listed = call.sinks is not None, "dq" in self.by_lists
        kernel = runner.kernel(
            ("dq", variant, has_dots, listed, self.index),
            lambda: specs.rows_spec(runner.constants, variant, has_dots, listed),
        )
        section = runner.section(longest * (dim + dim_v), group, heads * batch)
        arguments = (
            Slot("q"), Slot("k"), Slot("v"), Slot("dout"), Slot("dq"), Slot("base"), Slot("delta"),
            Slot("dots") if has_dots else no_float, *given.options, *given.strides,
            *self.dout_strides, *strides, *self.state_strides, *self.lse_strides,
            *given.more_strides, *self.sizes, blocks, section, int(runner.reversed),
            *given.numbers, *self.by_lists.arguments("dq", call), *given.captured,
        )  # fmt: skip
        self.steps.append((kernel, programs, arguments))

    def _grad_bias(self) -> None:
        call, runner, given, bias = self.call, self.runner, self.given, self.call.bias
        assert bias is not None
        self.program.make("dbias", like(bias.shape, bias.dtype))
        all_rows = bias.shape[2] < call.max_seqlen_q
        all_keys = bias.shape[3] < call.max_seqlen_k
        tiles = 1 if all_rows else -(-bias.shape[2] // specs.BIAS_TILE)
        tiles *= 1 if all_keys else -(-bias.shape[3] // specs.BIAS_TILE)
        programs = bias.shape[0] * bias.shape[1] * tiles
        if not programs:
            return
        variant = runner.variant(call, given, specs.BIAS_TILE)
        kernel = runner.kernel(
            ("bias", variant, all_rows, all_keys, self.index),
            lambda: specs.bias_spec(runner.constants, variant, all_rows, all_keys),
        )
        arguments = (
            Slot("q"), Slot("k"), Slot("v"), Slot("dout"), Slot("dbias"), Slot("base"),
            Slot("delta"), *given.options, *given.strides, *self.dout_strides, *self.state_strides,
            *given.more_strides, *self.sizes, *bias.shape, *given.numbers, *given.captured,
        )  # fmt: skip
        self.steps.append((kernel, programs, arguments))


def _grad_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return −Σ p_sink · delta over all rows of a head; fully masked rows add nothing.

    ``delta`` is computed from P∘dP. From the rounded O, the error of the sum over rows would be
    three times that of naive attention.
    """
    column = (-1, 1, 1) if lse.dim() == 3 else (-1, 1)
    p = torch.exp(sinks.view(column if lse.dim() == 2 else (1, -1, 1)) - lse)
    parts = torch.where(lse != -torch.inf, p * delta, 0.0)
    return -parts.sum((0, 2) if lse.dim() == 3 else 1)


def _to_pages(call: Call, like: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of each sequence's keys into the pages that hold them."""
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
