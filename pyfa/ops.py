"""The operators registered with PyTorch: ``torch.ops.pyfa.*``, with fakes and gradients.

``forward`` and ``backward`` take the fields of a ``Call``, then the backends that may run it and
which inputs need a gradient. Both choose from the same arguments, so a backward uses the backend of
its forward, on any thread. ``append_kv`` and ``rotary`` prepare a cache before attention, if the
backend does not do this itself (``backends.base.Appending``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch

from . import _torch, mods
from .backends.base import Gradients, OtherAlignment, Saved
from .backends.torch import append
from .blocks import kept
from .bound import Bound, Fitting, bound_of, picking
from .dispatch import prepare
from .problem import TENSORS, Call, tensors_of

_NOTHING = contextlib.nullcontext()
_LIBRARY = torch.library.Library("pyfa", "DEF")

# How the schema of an operator writes what ``Call`` is annotated with.
_SCHEMA: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype | None: "ScalarType?",
}
_CALL = ", ".join(
    (
        *(f"{_SCHEMA[kind]} {name}" for name, kind in get_type_hints(Call).items()),
        "str backend, bool needs_grad, bool bias_grad",
    )
)
_FIELDS = len(Call._fields)

_LIBRARY.define(f"forward({_CALL}) -> (Tensor, Tensor)")
_LIBRARY.define(
    # One result for each tensor that may be captured, because vmap does not support a list of
    # tensors.
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}) "
    f"-> ({', '.join(['Tensor'] * (5 + mods.MOST_CAPTURED))})"
)
_LIBRARY.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor start, "
    "Tensor? page_table, Tensor? cache_batch_idx) -> ()"
)
_LIBRARY.define(
    "rotary(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) -> Tensor"
)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, who = Call(*args[:_FIELDS]), args[_FIELDS:]
    with kept.uncounted() if call.mods else _NOTHING:
        out, lse, *_ = bound_of(call, None, who, True).run(*tensors_of(call))
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
    call, who = Call(*args[:_FIELDS]), args[_FIELDS:]
    given = Saved(call, out, lse, dout, dlse).tensors()
    with kept.uncounted() if call.mods else _NOTHING:
        bound = bound_of(call, None, who, True)
        grads = _gradients(bound, given, dlse is not None)
    *own, captured = grads
    found = (*own, *captured, *(None,) * (mods.MOST_CAPTURED - len(captured)))
    # An operator cannot return None: what was not asked for is an empty tensor.
    return tuple(call.q.new_empty(0) if x is None else x.contiguous() for x in found)


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    call = Call(*args[:_FIELDS])
    bias = call.bias if args[-1] else None
    wanted = mods.of(call.mods).wanted if call.mods else frozenset()
    captured: list[torch.Tensor | None] = [None] * mods.MOST_CAPTURED
    for slot in wanted:
        captured[slot] = call.captured[slot]
    return tuple(
        call.q.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in (call.q, call.k, call.v, bias, call.sinks, *captured)
    )


def _gathered(call: Call, grads: Sequence[torch.Tensor]) -> Gradients:
    """Return the gradients that the operator returned, in a backend's form."""
    wanted = mods.of(call.mods).wanted if call.mods else frozenset()
    captured = [x if slot in wanted else None for slot, x in enumerate(grads[5:])]
    return Gradients(grads[0], grads[1], grads[2], grads[3], grads[4], captured)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.scalars = inputs[TENSORS:]


def _gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    call, bias_grad = Call(*tensors, *ctx.scalars[: _FIELDS - TENSORS]), ctx.scalars[-1]
    if dout is None:
        dout = torch.zeros_like(out)
    dlse = dlse if call.return_lse else None
    given = torch.ops.pyfa.backward(dout, dlse, out, lse, *tensors, *ctx.scalars)
    grads = _gathered(call, given)
    if not bias_grad:
        grads = grads._replace(dbias=None)
    if call.sinks is None:
        grads = grads._replace(dsinks=None)
    # None for the three arguments behind the call.
    pick = picking((*Call._fields, "", "", ""), call.mods)
    found: tuple[Any, ...] = pick((*grads, None, *grads.captured))
    return found


# Kinds of ``dout`` for which a call's backward is kept: that bounds what they hold.
_MOST_BACKWARDS = 4


def _gradients(bound: Bound, given: tuple[torch.Tensor, ...], with_dlse: bool) -> Gradients:
    """Return the gradients of a call that ``bound`` ran, by a bound backward. ``given``: see
    ``Saved.tensors``."""
    backwards = bound.backwards[with_dlse]
    for fitting, run in backwards:
        if fitting.fits(*given):
            try:
                return run(*given)
            except OtherAlignment:
                continue
    saved = _saved(bound, given, with_dlse)
    call, out, lse, dout, dlse = saved
    if not all(_torch.has_storage(x) for x in (dout, dlse) if x is not None):
        # Many gradients at once (``is_grads_batched``, ``jacobian(vectorize=True)``): PyTorch calls
        # an operator for one after the other.
        return _by_operator(bound, saved)
    # A gradient that flows back through a complex number may have the negative bit, which kernels
    # would ignore, because they read from the address.
    dout, dlse = dout.resolve_neg(), None if dlse is None else dlse.resolve_neg()
    saved = Saved(call, out, lse, dout, dlse)
    run = prepare(call, *bound.who).bind_backward(saved, bound.who[2])
    if len(backwards) < _MOST_BACKWARDS and _torch.is_unwatched(*given):
        backwards.append((_fitting(given, bound, with_dlse), run))
    return run(*saved.tensors())


def _saved(bound: Bound, given: tuple[torch.Tensor, ...], with_dlse: bool) -> Saved:
    dout, out, lse, *tensors = given
    dlse = tensors.pop() if with_dlse else None
    return Saved(bound.form.fill(tensors)[0], out, lse, dout, dlse)


def _by_operator(bound: Bound, saved: Saved) -> Gradients:
    call, out, lse, dout, dlse = saved
    return _gathered(call, torch.ops.pyfa.backward(dout, dlse, out, lse, *call, *bound.who))


def _fitting(given: Sequence[torch.Tensor], bound: Bound, with_dlse: bool) -> Fitting:
    """Return what a backward was bound for."""
    free = {3 + number: at for number, at in bound.free.items()}
    alike = {4: (5,)} if 1 in bound.free else {}
    if 0 in bound.free:
        # LSE is (heads, rows), out (rows, heads, head_dim).
        of_rows = (0, 1, 2, *((len(given) - 1,) if with_dlse else ()))
        free |= {number: int(given[number].dim() == 2) for number in of_rows}
        alike[3] = of_rows
    return Fitting(given, free, alike)


class Attend(torch.autograd.Function):
    """A bound call and its gradient on eager tensors. It bypasses PyTorch's operator.

    The operator's gradient runs the same code; ``torch.compile`` uses the operator. Eager
    calls of the operator fill in and check 35 arguments one by one, which takes 250 µs per call
    (torch 2.11 and 2.13).
    """

    @staticmethod
    def forward(ctx: Any, bound: Bound, *tensors: torch.Tensor) -> Any:
        found = bound.run(*tensors)
        out, lse = found[0].contiguous(), found[1].contiguous()
        if out._is_view():  # which nobody may change in place when it comes from here
            whole = out.untyped_storage(), out.storage_offset(), out.shape, out.stride()
            out = out.new_empty(0).set_(*whole)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.bound = bound
        if bound.returns_lse:
            ctx.set_materialize_grads(False)
            return out, lse
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        saved, bound = ctx.saved_tensors, ctx.bound
        if dout is None:
            dout = torch.zeros_like(saved[0])
        given = (dout, *saved) if dlse is None else (dout, *saved, dlse)
        if torch.is_grad_enabled():
            # A graph of the gradients is asked for: by the operator, which refuses to be
            # differentiated.
            grads = _by_operator(bound, _saved(bound, given, dlse is not None))
        else:
            grads = _gradients(bound, given, dlse is not None)
        # PyTorch drops those that nobody needs.
        return bound.pick((*grads, None, *grads.captured))


# Function.apply without what it does for torch.func's transforms, which have been refused by then:
# 1.9 of 7.4 µs of a call on a CPU.
attend: Any = super(torch.autograd.Function, Attend).apply
_torch.run_backward_directly(Attend)


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
