"""Readies a KV cache for attention: new rows go in, rotary turns queries and new keys."""

from __future__ import annotations

import torch

from ... import abi
from ...problem import Call
from ..base import Rotary
from . import calls
from .launch import Launch

THREADS = 256


def run(
    launch: Launch,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary: Rotary | None,
) -> bool:
    """What ``Appending.append`` promises, in one launch."""
    given = [x for x in (call.k, call.v, q, k, v) if x is not None]
    # The kernel goes by addresses, and a cache cannot be copied first.
    if call.k.stride(-1) != 1 or call.v.stride(-1) != 1 or any(x.is_neg() for x in given):
        return False
    if call.k.element_size() == 1:  # float8 is not one of its formats
        return False
    values: dict[str, int | float] = {
        "heads_q": q.shape[-2],
        "heads_k": call.k.shape[-2],
        "batch": call.batch,
        "seqlen_q": call.max_seqlen_q,
        "seqlen_k": call.max_seqlen_k,
        "head_dim": call.k.shape[-1],
        "head_dim_v": call.v.shape[-1],
    }
    tensors = calls.tensors_of(call)
    lines = 0
    if rotary is not None:
        q = calls.with_rows(q)
        # Any but float32 and q's own format goes through float32, as in the operator.
        kept = rotary.cos.dtype == rotary.sin.dtype == q.dtype
        cos, sin = (
            (x if kept else x.float()).contiguous() for x in (rotary.cos, rotary.sin)
        )  # fmt: skip
        values |= {
            "rotary_cos": cos.data_ptr(),
            "rotary_sin": sin.data_ptr(),
            "rotary_seqlens": rotary.start.data_ptr(),
            "rotary_dim": 2 * cos.shape[1],
            "rotary_rows": cos.shape[0],
            "rotary_size": cos.element_size(),
            "rotary_interleaved": int(rotary.interleaved),
            "rotary_step": int(rotary.moving),
        }
        values |= abi.place("q", q) | abi.place("out", call.q)
        tensors |= {"q": q, "out": call.q, "cos": cos, "sin": sin, "start": rotary.start}
        lines = call.batch * call.max_seqlen_q
    if k is not None and v is not None:
        k, v = calls.with_rows(k), calls.with_rows(v)
        values["new_rows"] = k.shape[1]
        for name, x in (("k", call.k), ("v", call.v), ("new_k", k), ("new_v", v)):
            values |= abi.place(name, x)
        tensors |= {"new_k": k, "new_v": v}
        lines += 2 * call.batch * k.shape[1]
    for name in ("cu_seqlens_q", "seqused_k", "page_table", "cache_batch_idx"):
        if name in tensors:
            values[name] = tensors[name].data_ptr()
    if call.page_table is not None:
        values["page_size"] = call.k.shape[1]
        values["page_table_batch"] = call.page_table.stride(0)
    if lines * THREADS >= 2**32:  # more threads than a grid may have
        return False
    if lines:
        launch(launch.plan("append", calls.dtype_code(q)), lines, THREADS, values, tensors)
    return True
