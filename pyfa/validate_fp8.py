"""Checks for arguments that only float8 inputs have: their scales, and the output's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .problem import rows_per_scale
from .validate import a_dtype, a_tensor, no_gradient, wrong

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# ``quantize`` makes no smaller scale, so that the product of two stays a normal float32.
LEAST_SCALE = 2.0**-63
_OUT_DTYPES = (torch.bfloat16, torch.float16)


class Scales(NamedTuple):
    """Checked float8 scales of q, k and v (None if absent), and the dtype of the output."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    out_dtype: torch.dtype | None


def scales(
    descale: Any,
    out_dtype: torch.dtype | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    more: Mapping[str, torch.Tensor | None],
) -> Scales:
    """Check ``descale`` and ``out_dtype`` for float8 k and v, with float8 or 16-bit queries.

    ``more``: other arguments that could require a gradient, which float8 does not support.
    """
    no_gradient({"q": q, "k": k, "v": v, **more}, "float8 attention has none")
    a_dtype(out_dtype)
    if q.dtype not in FLOAT8:
        if out_dtype is not None and out_dtype != q.dtype:
            wrong("out_dtype", f"None or {q.dtype}, that of the queries", out_dtype)
        out_dtype = None
    elif out_dtype is None:
        out_dtype = torch.bfloat16
    elif out_dtype not in _OUT_DTYPES:
        wrong("out_dtype", "bfloat16 or float16 for float8 queries", out_dtype)
    if descale is None:
        return Scales(None, None, None, out_dtype)
    if not isinstance(descale, (tuple, list)) or len(descale) != 3:
        wrong("descale", "three scales (q, k, v)", descale)
    of_q, of_k, of_v = descale
    heads = k.shape[-2]
    if q.dtype in FLOAT8:
        of_q = _scale("descale[0] (q)", of_q, q, heads, batch)
    elif of_q is not None:
        wrong("descale[0] (q)", f"None for queries of {q.dtype}", of_q)
    of_k = _scale("descale[1] (k)", of_k, k, heads, batch)
    of_v = _scale("descale[2] (v)", of_v, v, heads, batch)
    if of_k.dim() == 3 and of_v.shape != of_k.shape:
        wrong("descale[2] (v)", f"the same blocks as k, {tuple(of_k.shape)}", of_v)
    for name, scale in (("descale[0] (q)", of_q), ("descale[2] (v)", of_v)):
        if scale is not None and scale.dim() != of_k.dim():
            wrong(name, f"one kind of scale for all: k's is {_kind(of_k)}", _kind(scale))
    return Scales(of_q, of_k, of_v, out_dtype)


def _kind(scale: torch.Tensor) -> str:
    return "per block of rows" if scale.dim() == 3 else "per sequence and head"


def _scale(name: str, scale: Any, x: torch.Tensor, heads: int, batch: int) -> torch.Tensor:
    """Return one tensor's scales: (batch, heads), or (stored, heads, blocks) per block of rows."""
    a_tensor(name, scale)
    if scale.dtype != torch.float32:
        wrong(name, "dtype float32", scale)
    if scale.device != x.device:
        wrong(name, f"q's device {x.device}", scale)
    no_gradient({name: scale}, "scales have none")
    found: torch.Tensor = scale.resolve_neg()  # kernels go by the address
    shape = tuple(found.shape)
    if shape == (batch, heads):
        return found  # the same tensor: what it was bound for is found again
    if shape in ((), (1,)):
        return found.reshape(1, 1).expand(batch, heads)
    if len(shape) == 2 and shape[0] in (1, batch) and shape[1] in (1, heads):
        return found.expand(batch, heads)
    stored, rows = (x.shape[0] if x.dim() == 4 else 1), x.shape[-3]
    if len(shape) != 3 or shape[:2] != (stored, heads):
        known = f"({batch}, {heads}) per sequence and key head"
        blocks = f"({stored}, {heads}, blocks) per block of rows"
        wrong(name, f"shape () per tensor, {known}, or {blocks}", found)
    if not rows_per_scale(shape[2], rows):
        wrong(name, f"⌈{rows} / block⌉ scales along the rows, the block a power of two", found)
    return found
