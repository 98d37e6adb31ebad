"""Packed calls of any totals of rows, and what they are seen to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa import sizes
from pyfa.backends.common.arguments import TensorMap
from pyfa.backends.cuda import tensor_maps

LONGEST = 512
# The first is bound for. 0 has programs of its own, and one row has a stride that means nothing.
TOTALS = ((128, 128), (1, 1), (500, 500), (333, 777), (0, 64), (16, 0), (512, 1), (129, 128))


def packed(total: int, heads: int, dim: int = 64, **options: Any) -> torch.Tensor:
    return torch.randn(total, heads, dim).bfloat16().requires_grad_(options.get("grad", True))


def offsets() -> torch.Tensor:
    return torch.tensor([0, 40, 100], dtype=torch.int32)


def train(
    q: int, k: int, heads: int = 4, heads_k: int = 4, shared: bool = False, **options: Any
) -> list[torch.Tensor]:
    tensors = [packed(q, heads), packed(k, heads_k), packed(k, heads_k)]
    of_q = offsets()
    given = [*tensors, of_q, of_q if shared else offsets()]
    found = pyfa.attention_varlen(*given, LONGEST, LONGEST, **options)
    outs = list(found) if isinstance(found, tuple) else [found]
    douts = [torch.randn(x.shape).to(x.dtype) for x in outs]
    return [*given, *options.values(), *douts, *torch.autograd.grad(outs, tensors, douts)]


def serve(q: int, k: int, append: bool = False, **options: Any) -> list[torch.Tensor]:
    """Packed rows over pages, of which there are as many in each call."""
    rows, pages = packed(q, 8, grad=False), [packed(1, 1, grad=False).expand(9, 64, 2, 64).clone()]
    pages *= 2
    table, used = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    if append:
        new, turned = packed(2 * 3, 2, grad=False).view(2, 3, 2, 64), torch.randn(LONGEST, 16)
        found = pyfa.attention_kvcache(
            rows, *pages, k=new, v=new, cu_seqlens_q=offsets(), max_seqlen_q=LONGEST,
            cache_seqlens=used, page_table=table, rotary_cos=turned, rotary_sin=turned, causal=True,
        )  # fmt: skip
        return [found]
    found = pyfa.attention_varlen(
        rows, *pages, offsets(), None, LONGEST, LONGEST, seqused_k=used, page_table=table, **options
    )
    return [found]


CASES: dict[str, Callable[[int, int], list[torch.Tensor]]] = {
    "plain": lambda q, k: train(q, k, causal=True),
    "shared offsets": lambda q, k: train(q, q, shared=True, causal=True),
    "deterministic": lambda q, k: train(q, k, deterministic=True),
    "gradient of the LSE": lambda q, k: train(q, k, return_lse=True),
    "sinks": lambda q, k: train(q, k, sinks=torch.randn(4)),
    "general": lambda q, k: train(q, k, softcap=9.0, window=(30, 5)),
    "parts of groups": lambda q, k: train(q, k, heads=64, heads_k=8, causal=True),
    "splits": lambda q, k: [pyfa.attention_varlen(
        *(packed(n, 16, grad=False) for n in (q, k, k)), offsets(), offsets(), LONGEST, LONGEST,
        num_splits=3)],
    "pages": lambda q, k: serve(q, k, causal=True),
    "pages in splits": lambda q, k: serve(q, k, num_splits=2),
    "append": lambda q, k: serve(q, k, append=True),
}  # fmt: skip


def without_sizes(patch: pytest.MonkeyPatch) -> None:
    """Calls are bound for their own totals alone, whose numbers are packed with all others."""
    patch.setattr(sizes, "shape_of", lambda call, name: tuple(getattr(call, name).shape))
    patch.setattr(tensor_maps, "TensorMap", lambda data, name, sizes=(): TensorMap(data, name))


def placed(address: int, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    """An address as the place in a tensor, which the next call has elsewhere."""
    for kind, tensors in (("made", made), ("given", given)):
        for number, x in enumerate(tensors):
            if isinstance(x, torch.Tensor) and 0 <= address - x.data_ptr() < max(x.nbytes, 1):
                return kind, number, address - x.data_ptr()
    return "elsewhere" if address else 0
