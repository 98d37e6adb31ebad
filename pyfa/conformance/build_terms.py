"""Adds the arguments that all layouts share to the inputs of a case: masks, score terms, scales,
dropout."""

from __future__ import annotations

from typing import Any

import torch

from ..problem import Call
from .cases import Case
from .inputs import Inputs, Placed, dtype_of, integers, near_normal, place
from .modifiers import captured_by, mods_of


def with_terms(case: Case, placed: dict[str, Placed], others: dict[str, Any], call: Call) -> Inputs:
    """Add masks, bias, slopes, sinks and dropout to the arguments and to the reference's call."""
    terms: dict[str, Any] = {
        **_window(case),
        "attention_chunk": case.attention_chunk,
        "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
    }
    if case.bias:
        values = _bias(case, call)
        if values.dtype == torch.bool:
            others["bias"] = values[0] if call.cu_seqlens_q is not None else values
            terms["bias"] = values
        else:
            own = case.bias in ("full", "hidden", "other") or case.bias.endswith("_like_q")
            dtype = dtype_of(case) if own else torch.float32
            dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
            if case.bias == "other":
                dtype = torch.bfloat16 if dtype == torch.float16 else torch.float16
            packed = call.cu_seqlens_q is not None
            placed["bias"] = place(values[0] if packed else values, dtype, case.layout)
            view = placed["bias"].view()
            terms["bias"] = view[None] if packed else view
    if case.tree:
        mask = near_normal(f"{case.name}/tree", (case.batch, *2 * (call.max_seqlen_q,))) > -0.3
        others["tree_mask"] = mask
        terms["bias"] = _seen_in_tree(case, call, mask)
    if case.alibi:
        shape = (case.heads_q,) if case.alibi == "heads" else (case.batch, case.heads_q)
        count = torch.Size(shape).numel()
        steps = integers(f"{case.name}/slopes", count, 64)
        slopes = torch.tensor(steps, dtype=torch.float32).reshape(shape)
        placed["alibi_slopes"] = place((slopes + 1.0) / 128.0, torch.float32, "contiguous")
        terms["alibi_slopes"] = placed["alibi_slopes"].view()
    if case.sinks:
        values = near_normal(f"{case.name}/sinks", (case.heads_q,))
        values += 14.0 if case.recipe == "sink" else 0.0
        placed["sinks"] = place(values, torch.float32, "contiguous")
        terms["sinks"] = placed["sinks"].view()
    if case.dropout_p:
        seed = integers(f"{case.name}/seed", 1, 1 << 64)[0]
        others["seed"] = seed
        terms["seed"] = torch.tensor([seed - (1 << 64) if seed >> 63 else seed])
    if case.score_mod or case.mask_mod or case.block_mask:
        # The call's own tables are made on the device where it runs.
        here = torch.device("cpu")
        digest, captured, _ = captured_by(mods_of(case, here), here, case.captured_grad)
        terms |= {name: x.detach() for name, x in captured.items()}
        terms["mods"] = digest
    if case.scales:
        terms |= _scales(case, placed, call)
    if case.dtype.startswith("float8"):
        terms["out_dtype"] = getattr(torch, case.out_dtype or "bfloat16")
        if case.out_dtype:
            others["out_dtype"] = terms["out_dtype"]
    options = {
        "causal": case.causal,
        "window": case.window,
        "attention_chunk": case.attention_chunk or None,
        "scale": case.scale,
        "softcap": case.softcap if case.kind != "latent" else None,
    }
    others |= {name: value for name, value in options.items() if value is not None}
    if case.batch_invariant:
        others["batch_invariant"] = terms["batch_invariant"] = True
    if case.kind in ("dense", "varlen"):
        others |= {"dropout_p": case.dropout_p, "deterministic": case.deterministic}
    spec = call._replace(**terms)
    return Inputs(case, placed, others, spec, spec)


def _window(case: Case) -> dict[str, int]:
    """Return the reference's window: one without a negative bound, with positions shifted
    instead."""
    left, right = case.window or (-1, -1)
    if case.causal:
        right = right if right < -1 else 0
    if -1 not in (left, right) and left + right < 0:
        return {"window_right": 0, "window_shift": -(1 << 20)}  # no key at all
    shift = -left if left < -1 else right if right < -1 else 0
    edges = left if left == -1 else left + shift, right if right == -1 else right - shift
    return {"window_left": edges[0], "window_right": edges[1], "window_shift": shift}


def _scales(case: Case, placed: dict[str, Placed], call: Call) -> dict[str, torch.Tensor]:
    """Return scales from 0.5 to 1.5 for the float8 tensors; NaN if no row of a block belongs to a
    sequence."""
    terms: dict[str, torch.Tensor] = {}
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.dtype.itemsize > 1:
            continue
        if case.kind == "latent" and name == "v":
            terms["v_descale"] = terms["k_descale"]
            continue
        shape: tuple[int, ...] = ()
        if case.scales == "head":
            shape = (case.batch, case.heads_k)
        elif isinstance(case.scales, int):
            stored = x.shape[0] if x.dim() == 4 else 1
            shape = (stored, case.heads_k, -(-x.shape[-3] // case.scales))
        steps = integers(f"{case.name}/{name}_descale", torch.Size(shape).numel(), 64)
        values = (torch.tensor(steps, dtype=torch.float32).reshape(shape) + 32.5) / 64.0
        if isinstance(case.scales, int):
            nobody = x.float().isnan().all(-1).all(-1).reshape(shape[0], -1)
            short = -nobody.shape[1] % case.scales
            nobody = torch.nn.functional.pad(nobody, (0, short), value=True)
            nobody = nobody.unflatten(1, (-1, case.scales)).all(-1)[:, None]
            values = values.masked_fill(nobody, torch.nan)
        placed[f"{name}_descale"] = place(values, torch.float32, "contiguous")
        view = placed[f"{name}_descale"].view()
        if not view.dim():
            view = view.expand(call.batch, case.heads_k)
        elif case.topk:
            view = view.repeat_interleave(call.batch // max(case.batch, 1), dim=0)
        terms[f"{name}_descale"] = view
    return terms


def _seen_in_tree(case: Case, call: Call, mask: torch.Tensor) -> torch.Tensor:
    """Return the mask over the new rows, extended to all keys: (B, 1, rows, keys)."""
    seen = torch.ones(case.batch, 1, call.max_seqlen_q, call.max_seqlen_k, dtype=torch.bool)
    for b, (rows, keys) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        new = min(rows, keys)
        seen[b, 0, :rows, keys - new : keys] = mask[b, :rows, rows - new : rows]
    return seen


def _bias(case: Case, call: Call) -> torch.Tensor:
    """Return (B | 1, H | 1, rows | 1, keys | 1), with NaN for rows and keys that no sequence
    has."""
    packed = call.cu_seqlens_q is not None
    batch, heads = 1 if packed else call.batch, case.heads_q
    rows, keys = call.max_seqlen_q, call.max_seqlen_k
    shape = {
        "keys": (1, 1, 1, keys),
        "rows": (1, 1, rows, 1),
        "heads": (1, heads, rows, keys),
        "per_head": (1, heads, 1, 1),
        "one": (1, 1, 1, 1),
        "sequences": (batch, 1, 1, keys),
        "batch": (batch, 1, rows, keys),
        "matrix": (1, 1, rows, keys),
        "bool": (batch, 1, rows, keys),
    }.get(case.bias.removesuffix("_like_q").removesuffix("_bool"), (batch, heads, rows, keys))
    values = near_normal(f"{case.name}/bias", shape)
    if case.has_bool_bias:
        # A quarter hidden, and a row that sees nothing.
        seen = values > -0.67
        if shape[2] > 1:
            seen[:, :, :1] = False
        return seen
    if case.bias == "hidden":
        values = values.masked_fill(values < -1.0, -torch.inf)
        values[:, :, 1::3] = -torch.inf
    valid = torch.zeros(batch, 1, rows, keys, dtype=torch.bool)
    for b in range(case.batch):
        valid[0 if packed else b, :, : case.lengths_q[b], : case.lengths_k[b]] = True
    for dim, size in enumerate(shape):
        if size == 1:
            valid = valid.any(dim, keepdim=True)
    return values.masked_fill(~valid, torch.nan)
