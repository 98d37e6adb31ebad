"""Combines attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from . import _torch, device, dispatch, validate, validate_cache
from .backends import BACKENDS
from .backends.base import Merging, Run
from .errors import CompileError

_log = logging.getLogger("pyfa")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint parts of the keys into attention over all of them.

    A part is attention of the same queries over some of the keys. ``outs`` and ``lses`` are the
    outputs and LSEs of all parts, as ``attention`` and ``attention_varlen`` return them with
    ``return_lse=True``: lists, or tensors whose first dimension counts the parts. Outputs may be
    float16, bfloat16 or float32, and may differ in dtype.

    Returns the output and, with ``return_lse``, the LSE over all keys. The output has the dtype to
    which PyTorch promotes the parts' dtypes (float32 if float16 and bfloat16 are mixed). With
    ``out``, the output is written into this tensor, in its dtype and without a gradient. Otherwise
    ``outs`` and ``lses`` receive gradients, and the returned LSE is differentiable. Sums are
    float32 and in the given order, so the same parts in the same order give the same bits.

    A row that is fully masked in every part gives output 0 and LSE −inf. The output of a part with
    LSE −inf is not read. If you use ``sinks``, pass them to one part only, so that they count once.

    Raises ``ValueError`` or ``TypeError`` for parts that do not fit together.

    On ``hip`` and ``cuda``, one kernel launch merges 2 to 4 parts without gradients. In other cases
    PyTorch's operators merge them; the last bits may differ.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".

    >>> own = pyfa.attention(q, k, v, causal=True, return_lse=True)
    >>> shared = pyfa.attention(q, k_prefix, v_prefix, return_lse=True)
    >>> out = pyfa.merge(*zip(own, shared))
    """
    parts, sums = _listed("outs", outs), _listed("lses", lses)
    _check(parts, sums, out)
    return_lse = validate.flag("return_lse", return_lse)
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    run = _kernel(parts, sums, dtype if out is None else out, return_lse)
    if run is not None:
        given = [x for pair in zip(parts, sums, strict=True) for x in pair]
        found = run(*given) if out is None else run(*given, out)
        if out is None:
            out = found.pop(0)
        else:
            torch.autograd.graph.increment_version(out)
        return (out, found[0]) if return_lse else out
    total, lse = merged(parts, torch.stack([x.mT for x in sums]))
    if out is None:
        out = total.to(dtype)
    else:
        out.copy_(total)
    return (out, lse.mT.contiguous()) if return_lse else out


# Launches by what they were bound for: shapes, strides and dtypes.
_MOST_BOUND = 256
_bound: dict[tuple[Any, ...], Run | None] = {}


def _kernel(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    out: torch.Tensor | torch.dtype,
    with_lse: bool,
) -> Run | None:
    """Return the launch that merges these parts; None if PyTorch's operators must do it."""
    if torch.compiler.is_compiling() or outs[0].is_meta:
        return None
    given = [*outs, *lses, *([out] if isinstance(out, torch.Tensor) else ())]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    # What is bound is found by shapes, strides and dtypes, which say nothing of the negative bit.
    if not all(_torch.is_plain(x) and not x.is_neg() for x in given) or _torch.in_transform():
        return None
    wanted = dispatch.preference(None)
    kept = [(x.shape, x.stride(), x.dtype) for x in given]
    into = out.untyped_storage().data_ptr() if isinstance(out, torch.Tensor) else out
    if any(x.untyped_storage().data_ptr() == into for x in (*outs, *lses)):
        return None
    made = None if isinstance(out, torch.Tensor) else out
    key = (wanted, outs[0].device, with_lse, made, len(outs), *kept)
    if key not in _bound:
        run = _bind(wanted, outs, lses, out, with_lse)
        if len(_bound) >= _MOST_BOUND:
            _bound.clear()
        _bound[key] = run
        return run
    return _bound[key]


def _bind(
    wanted: str,
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    out: torch.Tensor | torch.dtype,
    with_lse: bool,
) -> Run | None:
    """Bind the first available backend. If it has no kernel for this, PyTorch's operators merge; no
    other backend is tried."""
    for name in dispatch.candidates(wanted, device.of(outs[0].device)):
        backend = BACKENDS[name]
        if backend.why_unavailable() is None:
            if not isinstance(backend, Merging):
                return None
            try:
                return backend.bind_merge(outs, lses, out, with_lse)
            except CompileError as error:
                _log.debug("merge runs on PyTorch's operators: %s", error)
                return None
    return None


def merged(outs: Sequence[torch.Tensor], lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``outs`` (parts, …, H, Dv) and ``lses`` (parts, …, H). Return float32 out (…, H, Dv)
    and LSE (…, H)."""
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    unseen = total == 0.0  # not where it is NaN
    total = total.masked_fill(unseen, 1.0)
    # One part at a time: all together would take as much memory again.
    out = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for part, weight, lse in zip(outs, weights, lses, strict=True):
        read = part.float().masked_fill((lse == -torch.inf)[..., None], 0.0)
        out = out + (weight / total)[..., None] * read
    return out, (top + total.log()).masked_fill(unseen, -torch.inf)


def _listed(name: str, tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        validate.a_tensor(name, tensors)
    try:
        return list(tensors)
    except TypeError:  # also a tensor without dimensions
        got = type(tensors).__name__
        raise TypeError(f"{name}: expected a list of tensors, or one tensor; got {got}") from None


def _check(outs: list[torch.Tensor], lses: list[torch.Tensor], out: torch.Tensor | None) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge: expected as many lses as outs, one or more; got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    given = [*zip(("outs", "lses"), (outs, lses), strict=True)]
    for name, tensors in (*given, ("out", [] if out is None else [out])):
        for number, x in enumerate(tensors):
            which = name if name == "out" else f"{name}[{number}]"
            validate.a_tensor(which, x)
            if x.device != outs[0].device:
                validate.wrong(which, f"device {outs[0].device}", x.device)
            if name == "lses" and x.dtype != torch.float32:
                validate.wrong(which, "float32", x)
            if x.dtype not in _DTYPES:
                validate.wrong(which, "float16, bfloat16 or float32", x)
    if outs[0].dim() not in (3, 4):
        validate.wrong(
            "outs[0]", "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)", outs[0]
        )
    *rows, heads, _ = shape = tuple(outs[0].shape)
    of_lse = (*rows[:-1], heads, rows[-1])
    for number, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(part.shape) != shape:
            validate.wrong(f"outs[{number}]", f"shape {shape}, as outs[0]", part)
        if tuple(lse.shape) != of_lse:
            validate.wrong(f"lses[{number}]", f"shape {of_lse}", lse)
    if out is not None:
        if tuple(out.shape) != shape:
            validate.wrong("out", f"shape {shape}, as outs[0]", out)
        validate_cache.writable("out", out)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses, out)):
            raise ValueError(
                "out: no gradient flows through a given out; omit it, or use torch.no_grad()"
            )
