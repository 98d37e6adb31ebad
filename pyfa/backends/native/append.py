"""Prepare a KV cache for attention: append new rows, and rotate queries and new keys (rotary)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import abi, sizes
from ...problem import Append, Call, form_of, tensors_of
from ...sizes import Totals
from ..base import Run
from ..common import calls
from ..common.program import Params, Program, for_any_total, like, run_of
from .launch import Launcher

THREADS = 256
# rotary_flags, as kernels/common/append.h has them.
_FLOAT32_TABLES, _INTERLEAVED, _MOVING = 1, 2, 4
_MOST_THREADS = 2**32  # of a grid


def why_refused(call: Call, append: Append) -> str | None:
    """Return why the kernel does not support ``append``; None if it does."""
    if append.cu_seqlens is not None:
        return "new keys are packed (cu_seqlens_new)"
    given = (call.k, call.v, call.q, append.k, append.v)
    if call.k.stride(-1) != 1 or call.v.stride(-1) != 1:
        return "the cache's rows are not contiguous, and it cannot be copied"
    if any(x is not None and x.is_neg() for x in given):
        return "a tensor has the negative bit"
    if call.k.element_size() == 1:
        return "float8 is not one of its formats"
    if _rows(call, append) * THREADS >= _MOST_THREADS:
        return "there are more rows than a grid has workgroups"
    return None


def readable(call: Call, append: Append) -> tuple[Call, Append]:
    """Return ``call`` and ``append`` as the kernel reads them."""
    if append.k is not None and append.v is not None:
        append = append._replace(k=calls.with_rows(append.k), v=calls.with_rows(append.v))
    if append.cos is not None and append.sin is not None:
        # Tables in any dtype except float32 and q's own are converted to float32, as in the
        # operator.
        kept = append.cos.dtype == append.sin.dtype == call.q.dtype
        cos, sin = ((x if kept else x.float()).contiguous() for x in (append.cos, append.sin))
        append = append._replace(cos=cos, sin=sin)
        call = call._replace(q=calls.with_rows(call.q))
    return call, append


def bind(launch: Launcher, call: Call, append: Append) -> Callable[[Call, Append], Call]:
    """Bind the kernel by itself, for attention that cannot read the cache that it writes.

    The returned function maps a call and an append like these to the call that follows, with the
    rotated queries and with lengths that include the new keys.
    """
    form = form_of(call, append)

    def bind_kind(*tensors: torch.Tensor) -> Callable[[Totals | None], Run]:
        given, new = form.fill(tensors)
        assert new is not None
        program = Program(form.names, given.q)
        made.update(add(launch, program, given, new))
        numbers.update((name, number) for number, name in enumerate(program.made))
        started = launch.launch_of(program, tensors)
        return run_of(program, started, launch.empty, None)

    # These are the same for all totals.
    made: dict[str, str] = {}
    numbers: dict[str, int] = {}
    run = for_any_total(call, tensors_of(call, append), bind_kind)

    def ready(call: Call, append: Append) -> Call:
        found = run(*tensors_of(call, append))
        written: dict[str, Any] = {member: found[numbers[name]] for member, name in made.items()}
        return call._replace(**written)

    return ready


def add(launch: Launcher, program: Program, call: Call, append: Append) -> dict[str, str]:
    """Launch the kernel in ``program``, whose inputs are those of ``call`` and ``append``.

    Returns which of attention's pointers point to the kernel's output.
    """
    values: abi.Values = {
        "heads_q": call.q.shape[-2],
        "heads_k": call.k.shape[-2],
        "batch": call.batch,
        "seqlen_q": call.max_seqlen_q,
        "seqlen_k": call.max_seqlen_k,
        "head_dim": call.k.shape[-1],
        "head_dim_v": call.v.shape[-1],
    }
    pointers = {name: name for name in ("k", "v")}
    written: dict[str, str] = {}
    for name in ("cu_seqlens_q", "page_table", "cache_batch_idx"):
        if getattr(call, name) is not None:
            pointers[name] = name
    if append.cos is not None:
        rotated = like(sizes.shape_of(call, "q"), call.q.dtype)
        program.make("rotated_q", rotated)
        written["q"] = "rotated_q"
        values |= {
            "rotary_dim": 2 * append.cos.shape[1],
            "rotary_rows": append.cos.shape[0],
            "rotary_flags": (
                _FLOAT32_TABLES * (append.cos.element_size() == 4)
                + _INTERLEAVED * append.interleaved
                + _MOVING * append.moving
            ),
        }
        values |= abi.strides_of("q", call.q.stride()) | abi.strides_of("out", rotated[1])
        start = "rotary_seqlens" if append.start is not None else "seqused_k"
        pointers |= {"q": "q", "out": "rotated_q", "rotary_seqlens": start}
        pointers |= {name: name for name in ("rotary_cos", "rotary_sin")}
    if append.k is not None and append.v is not None:
        values["new_rows"] = append.k.shape[1]
        for name, x in (("k", call.k), ("v", call.v), ("new_k", append.k), ("new_v", append.v)):
            values |= abi.strides_of(name, x.stride())
        pointers |= {"new_k": "new_k", "new_v": "new_v", "seqused_q": "seqused_k"}
        if append.k.shape[1]:
            program.make("used", like((call.batch,), torch.int32))
            pointers["seqused_k"] = written["seqused_k"] = "used"
    if call.page_table is not None:
        values["page_size"] = call.k.shape[1]
        values["page_table_batch"] = call.page_table.stride(0)
    plan = launch.plan("append", calls.dtype_code(call.q))
    program.add(plan, _rows(call, append), THREADS, Params(values, pointers))
    return written


def _rows(call: Call, append: Append) -> int:
    """Return the number of workgroups: one for each row of a new key, of a new value and, with
    rotary, of a query."""
    rows = call.batch * call.max_seqlen_q if append.cos is not None else 0
    return rows + (2 * call.batch * append.k.shape[1] if append.k is not None else 0)
