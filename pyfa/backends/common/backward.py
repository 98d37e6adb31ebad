"""What backward is on every device: what it takes, and the program around its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ... import abi
from ..._torch import Like
from ...plan import Plan
from ...problem import Call, Problem, form_of, tensors_of
from ..base import Gradients, RunBackward
from . import calls, gaps
from .launch import Launcher
from .program import MOST_TOTALS, Params, Program, like, run_of

FEATURES = frozenset({"backward", "dlse", "deterministic"})


def why_not(problem: Problem) -> list[str]:
    """What backward lacks for ``problem``, beyond features and dtypes."""
    if "backward" not in problem.features:
        return []
    return ["backward with a page_table is not implemented"] if problem.page_size else []


def is_general(call: Call) -> bool:
    """Whether backward has more to do between products and softmax than scale and masks."""
    terms = (call.alibi_slopes, call.bias, call.sinks)
    return bool(call.softcap or call.dropout_p or any(x is not None for x in terms))


def is_general_problem(problem: Problem) -> bool:
    """The same of a problem."""
    return bool(problem.features & {"softcap", "alibi", "bias", "sinks", "dropout"})


class Kernel(NamedTuple):
    """A launch of backward: ``blocks`` workgroups of ``threads`` for each sequence."""

    plan: Plan
    blocks: int
    threads: int


class Kernels(NamedTuple):
    """What one pass launches, in order, and the buffers that only this device's kernels need.

    ``bias``: what makes the gradient of the bias where it is asked for; its ``blocks`` are of all
    sequences. Its Params have that gradient as ``out``.
    """

    kernels: Sequence[Kernel]
    workspace: Mapping[str, Like] = {}
    bias: Kernel | None = None


class _Given(NamedTuple):
    """What a backward reads, as it came or as the kernels can read it."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    call: Call
    dlse: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        last = () if self.dlse is None else (self.dlse,)
        return (self.dout, self.out, self.lse, *tensors_of(self.call), *last)


def _readable(given: _Given, bias_grad: bool) -> _Given:
    dout, out, lse, call, dlse = given
    if bias_grad and call.bias is not None and call.bias.numel() and 0 in call.bias.stride():
        # What has a stride of 0 is broadcast to the kernels, and its gradient a sum.
        call = call._replace(bias=call.bias.contiguous())
    return _Given(
        calls.readable(dout),
        calls.readable(out),
        whole(lse),
        calls.with_readable(call),
        None if dlse is None else dlse.contiguous(),
    )


def bind(
    launch: Launcher,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    kernels_of: Callable[[Call], Kernels],
    bias_grad: bool = False,
) -> RunBackward:
    """``Backend.bind_backward`` for the kernels that ``kernels_of`` the readable call names."""
    given = _Given(dout, out, lse, call, dlse)
    direct = _readable(given, bias_grad)
    run = _for_any_total(direct, lambda given: _bind(launch, given, kernels_of))
    copied = any(x is not y for x, y in zip(given.tensors(), direct.tensors(), strict=True))
    if not copied:
        return run
    form, dim, dim_v = form_of(call), call.q.shape[-1], call.v.shape[-1]

    def run_on_copies(
        dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Gradients:  # fmt: skip
        made = _readable(_Given(dout, out, lse, form.fill(tensors)[0], dlse), bias_grad)
        found = run(made.dout, made.dlse, made.out, made.lse, *tensors_of(made.call))
        dq, dk, dv, dbias, dsinks = found
        return Gradients(dq[..., :dim], dk[..., :dim], dv[..., :dim_v], dbias, dsinks)

    return run_on_copies


def _for_any_total(given: _Given, bind: Callable[[_Given], RunBackward]) -> RunBackward:
    """``program.for_any_total`` of a backward."""
    run, call = bind(given), given.call
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None:
        return run
    form, runs = form_of(call), {(call.q.shape[0], call.k.shape[0]): run}

    def run_any_total(
        dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Gradients:  # fmt: skip
        totals = tensors[0].shape[0], tensors[1].shape[0]
        found = runs.get(totals)
        if found is None:
            if len(runs) >= MOST_TOTALS:
                runs.clear()
            found = runs[totals] = bind(_Given(dout, out, lse, form.fill(tensors)[0], dlse))
        return found(dout, dlse, out, lse, *tensors)

    return run_any_total


def _bind(launch: Launcher, given: _Given, kernels_of: Callable[[Call], Kernels]) -> RunBackward:
    """``bind`` of what the kernels read as it lies."""
    call = given.call
    form = form_of(call)
    names = ("dout", "out", "lse", *form.names, *(("dlse",) if given.dlse is not None else ()))
    program = Program(names, call.q)
    dq, dk, dv = (like(x.shape, x.dtype) for x in call[:3])
    for name, each in (("dq", dq), ("dk", dk), ("dv", dv)):
        program.make(name, each)
    pointers = {**abi.pointers_of(call), **{name: name for name in ("dq", "dk", "dv", *names[:3])}}
    if form.shared_offsets:
        pointers["cu_seqlens_k"] = "cu_seqlens_q"
    if given.dlse is not None:
        pointers["dlse"] = "dlse"
    if call.sinks is not None:
        program.make("dsinks", like(given.lse.shape, torch.float32), fill=0.0)
        pointers["dsinks"] = "dsinks"
    kernels, workspace, of_bias = kernels_of(call)
    parts = {**workspace, "delta": like((2, *given.lse.shape), torch.float32)}
    program.make_workspace(parts, launch.APART)
    pointers |= {name: name for name in parts}
    values = abi.forward_values(call, given.out.stride(), given.lse.stride())
    values |= abi.strides_of("dout", given.dout.stride())
    for name, each in (("dq", dq), ("dk", dk), ("dv", dv)):
        values |= abi.strides_of(name, each[1])
    values["dies"] = launch.device_at(call.q.device).dies
    gaps.add_backward(launch, program, call, dq, dk, dv)
    params = Params(values, pointers)
    for plan, blocks, threads in kernels:
        program.add(plan, blocks * call.batch, threads, params)
    if of_bias is not None and call.bias is not None:
        made = like(call.bias.shape, call.bias.dtype)
        program.make("dbias", made)
        names_of_out = ("out_batch", "out_head", "out_row")
        own = {**values, **dict(zip(names_of_out, made[1][:3], strict=True))}
        program.add(*of_bias, Params(own, {**pointers, "out": "dbias"}))
    run = run_of(program, launch.launch_of(program, given.tensors()), launch.empty, aligned=6)
    rows = (0, 2) if given.lse.dim() == 3 else 1
    numbers = {name: number for number, name in enumerate(program.made)}
    dsinks_at, dbias_at = numbers.get("dsinks"), numbers.get("dbias")

    def backward(
        dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Gradients:  # fmt: skip
        last = () if dlse is None else (dlse,)
        found = run(dout, out, lse, *tensors, *last)
        dq, dk, dv = found[:3]
        dsinks = None if dsinks_at is None else found[dsinks_at].sum(rows)
        dbias = None if dbias_at is None else found[dbias_at]
        return Gradients(dq, dk, dv, dbias, dsinks)

    return backward


def whole(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and with the strides of a tensor of its own, by which kernels go.

    To ``contiguous`` the stride of a lone sequence or head is nothing: in a slice of a larger LSE
    it stays that one's, and what kernels keep of each row would lie beyond its tensor.
    """
    x = x.contiguous()
    heads, rows = (max(size, 1) for size in x.shape[-2:])
    own = (heads * rows, rows, 1)[-x.dim() :]
    return x if x.stride() == own else x.as_strided(x.shape, own)
