"""Benchmarks packed sequences of different lengths. Some peers have a function for packed batches;
the others are called once per sequence."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

import pyfa

from .ready import Attend, Ready
from .suites import Cell

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(cell: Cell, device: torch.device) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Return q, k, v as (total, heads, head_dim), the gradient of the output, and cu_seqlens."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal(heads: int, dim: int = cell.head_dim) -> torch.Tensor:
        shape = (cell.tokens, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k = (normal(heads).requires_grad_(cell.grad) for heads in (cell.heads_q, cell.heads_k))
    v = normal(cell.heads_k, cell.dim_v).requires_grad_(cell.grad)
    ends = torch.tensor((0, *cell.lengths)).cumsum(0)
    cu_seqlens = ends.to(device, torch.int32)
    return (q, k, v), normal(cell.heads_q, cell.dim_v), cu_seqlens


def by_pyfa(
    backend: str | None, cell: Cell, device: torch.device, *, deterministic: bool = False
) -> Ready:
    leaves, dout, cu = inputs(cell, device)
    longest = cell.seqlen_q

    def forward() -> torch.Tensor:
        result = pyfa.attention_varlen(
            *leaves, cu, cu, longest, longest, causal=cell.causal, deterministic=deterministic,
            backend=backend,
        )  # fmt: skip
        assert isinstance(result, torch.Tensor)
        return result

    return Ready(forward, leaves, dout)


def by_package(name: str, cell: Cell, device: torch.device) -> Ready:
    """Prepare one of flash-attention's own packages. They differ in the order of the arguments and
    in whether they take maximum lengths."""
    function = importlib.import_module(name).flash_attn_varlen_func
    leaves, dout, cu = inputs(cell, device)
    options: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": cell.causal}
    taken = inspect.signature(function).parameters
    options |= dict.fromkeys({"max_seqlen_q", "max_seqlen_k"} & set(taken), cell.seqlen_q)

    def forward() -> torch.Tensor:
        return out_of(function(*leaves, **options))

    return Ready(forward, leaves, dout)


def out_of(result: Any) -> torch.Tensor:
    """Return the output in the result of a flash-attention function. The result is either the
    output alone, or a tuple that begins with it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def one_by_one(
    attend_for: Callable[[Cell, torch.device], Attend], cell: Cell, device: torch.device
) -> Ready:
    """Call the peer for each sequence and concatenate the results."""
    leaves, dout, _ = inputs(cell, device)
    attend = attend_for(cell, device)

    def forward() -> torch.Tensor:
        parts = zip(*(x.split(cell.lengths) for x in leaves), strict=True)
        return torch.cat([attend(q[None], k[None], v[None])[0] for q, k, v in parts])

    return Ready(forward, leaves, dout)
