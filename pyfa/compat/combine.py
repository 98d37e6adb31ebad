"""Merge attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import torch

from .. import validate
from ..merging import merged

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine partial results: out (splits, …, heads, D) and LSE (splits, …, heads) into (…,
    heads, D) and (…, heads).

    Both are float32, the LSE a natural logarithm. If a row is fully masked in a split, its LSE
    there is −inf, and its output is not read. A row that is fully masked in every split gets output
    0 and LSE −inf. The result is written to ``out``. If ``out`` is None, the result is a new tensor
    of ``out_dtype``, by default float32. The computation is in float32. Raises ``ValueError`` or
    ``TypeError`` for wrong shapes and dtypes.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        validate.a_tensor(name, x)
        if x.dtype != torch.float32:
            validate.wrong(name, "float32", x)
    if out_partial.dim() not in (4, 5) or not out_partial.shape[0]:
        layout = "(splits, [batch,] seqlen, heads, head_dim) with one split or more"
        validate.wrong("out_partial", layout, out_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        validate.wrong("lse_partial", f"shape {tuple(out_partial.shape[:-1])}", lse_partial)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if dtype not in _DTYPES:
        validate.wrong("out_dtype", "float32, float16 or bfloat16", dtype)
    if out is not None:
        validate.a_tensor("out", out)
        if out.shape != out_partial.shape[1:] or out.dtype != dtype:
            validate.wrong("out", f"shape {tuple(out_partial.shape[1:])} and {dtype}", out)
    total, lse = merged(list(out_partial), lse_partial)
    if out is None:
        return total.to(dtype), lse
    return out.copy_(total), lse
