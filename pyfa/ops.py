"""The operators that PyTorch sees: ``torch.ops.pyfa.*`` with fakes, and gradients in one place.

``forward`` and ``backward`` take a ``Call`` spelled out, then who may run it and what needs a
gradient. Both choose from the same arguments, so a backward runs where its forward ran, on any
thread. ``append_kv`` and ``rotary`` are what a cache needs before attention, where the backend of
that does not do it itself (``backends.base.Appending``).
"""

from __future__ import annotations

from typing import Any

import torch

from .backends.base import OtherAlignment, RepeatBackward
from .backends.torch import append
from .dispatch import prepare
from .problem import Call, are_on_16
from .repeats import Repeated, fitting, is_unwatched

_LIBRARY = torch.library.Library("pyfa", "DEF")

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
    "SymInt window_right, float softcap, float dropout_p, bool deterministic, bool return_lse, "
    "int num_splits, ScalarType? out_dtype, int q_start, int k_start, int head_start, "
    "int batch_start, str backend, bool needs_grad, bool bias_grad"
)
_FIELDS = len(Call._fields)

_LIBRARY.define(f"forward({_CALL}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor start, "
    "Tensor? page_table, Tensor? cache_batch_idx) -> ()"
)
_LIBRARY.define(
    "rotary(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) -> Tensor"
)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args[:_FIELDS])
    out, lse = prepare(call, *args[_FIELDS:]).forward(call)
    return out.contiguous(), lse.contiguous()


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args[:_FIELDS])
    return (
        call.q.new_empty(call.out_shape(), dtype=call.dtype_of_out()),
        call.q.new_empty(call.lse_shape(), dtype=torch.float32),
    )


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    call = Call(*args[:_FIELDS])
    bias_grad: bool = args[-1]
    grads = prepare(call, *args[_FIELDS:]).backward(call, out, lse, dout, dlse, bias_grad)
    # An operator cannot return None: what was not asked for is an empty tensor.
    return tuple(call.q.new_empty(0) if x is None else x.contiguous() for x in grads)


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    call = Call(*args[:_FIELDS])
    bias = call.bias if args[-1] else None
    return tuple(
        call.q.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in (call.q, call.k, call.v, bias, call.sinks)
    )


_TENSORS = 17  # Call's leading fields, which are tensors or None
_RETURN_LSE = Call._fields.index("return_lse")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.backward_run = torch.ops.pyfa.backward
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.scalars = inputs[_TENSORS:]


def _gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    args = (*tensors, *ctx.scalars)
    *dqkv, dbias, dsinks = _gradients(ctx.backward_run, args, out, lse, dout, dlse)
    call, bias_grad = Call(*args[:_FIELDS]), args[-1]
    grads = [*dqkv, dbias if bias_grad else None, None, dsinks if call.sinks is not None else None]
    return (*grads, *(None,) * (_FIELDS + 3 - len(grads)))


def _gradients(
    run: Any, args: tuple[Any, ...], out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor | None, dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """``backward``'s results for ``forward``'s ``args``, of which ``out`` and ``lse`` came."""
    if dout is None:
        dout = torch.zeros_like(out)
    if torch.is_grad_enabled():
        # A graph of the gradients is asked for: by the operator, which refuses to be
        # differentiated; else straight to the backend.
        run = torch.ops.pyfa.backward
    dlse = dlse if args[_RETURN_LSE] else None
    grads: tuple[torch.Tensor, ...] = run(dout, dlse, out, lse, *args)
    return grads


class Differentiable(torch.autograd.Function):
    """``forward`` with its gradient for eager tensors, past PyTorch's operator.

    The gradient registered for the operator is the same code, and what torch.compile takes; eager
    calls of it fill in and check 35 arguments one by one, 250 µs a call (torch 2.11 and 2.13).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*args)
        _save(ctx, args, output)
        ctx.backward_run = _backward
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _gradient(ctx, *grads)


# Kinds of ``dout`` for which a call's backward is prepared: that bounds what they keep.
_MOST_BACKWARDS = 4


class DifferentiableRepeat(torch.autograd.Function):
    """``Differentiable`` for a call that comes again: at most 6 arguments where that one has 35."""

    @staticmethod
    def forward(
        ctx: Any, call: Repeated, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        *offsets: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse = call.run(q, k, v, *offsets)
        assert lse is not None
        ctx.save_for_backward(q, k, v, out, lse, *offsets)
        ctx.call = call
        if call.returns_lse:
            ctx.set_materialize_grads(False)
            return out, lse
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call: Repeated = ctx.call
        if dlse is None and dout is not None and not torch.is_grad_enabled():
            run = _repeated_backward(call, saved, dout)
            if run is not None:
                try:
                    return (None, *run(dout, *saved), *(None,) * (len(saved) - 5))
                except OtherAlignment:
                    pass
        q, k, v, out, lse, *offsets = saved
        args = (*call.call((q, k, v, *offsets)), *call.who)
        dq, dk, dv, *_ = _gradients(_backward, args, out, lse, dout, dlse)
        return None, dq, dk, dv, *(None for _ in offsets)


def _repeated_backward(
    call: Repeated, saved: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> RepeatBackward | None:
    """The shorter way for gradients as ``dout``, prepared where it is the first as this one."""
    for fits, run in call.backwards:
        if fits(dout, *saved):
            return run
    if (
        len(call.backwards) >= _MOST_BACKWARDS
        or not is_unwatched(dout, *saved)
        or not are_on_16(dout, *saved[:5])
    ):
        return None
    q, k, v, out, lse, *offsets = saved
    again = call.call((q, k, v, *offsets))
    made = prepare(again, *call.who).repeat_backward(again, out, lse, dout)
    call.backwards.append((fitting(dout, *saved), made))
    return made


# Function.apply without what it does for torch.func's transforms, which have been refused by then:
# 1.9 of 7.4 µs of a call on a CPU.
repeat_with_gradient: Any = super(torch.autograd.Function, DifferentiableRepeat).apply


def _no_second_gradient(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("attention has no second derivative: backward of backward")


def _append_fake(*args: Any) -> None:
    return None


def _rotary_fake(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotary_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    raise NotImplementedError("rotary in attention_kvcache has no gradient")


for _name, _run, _fake in (
    ("forward", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
    ("append_kv", append.append_kv, _append_fake),
    ("rotary", append.rotary, _rotary_fake),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"pyfa::{_name}", _fake, lib=_LIBRARY)

torch.library.register_autograd("pyfa::forward", _gradient, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("pyfa::backward", _no_second_gradient, lib=_LIBRARY)
torch.library.register_autograd("pyfa::rotary", _rotary_gradient, lib=_LIBRARY)
