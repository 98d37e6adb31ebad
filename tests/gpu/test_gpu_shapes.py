"""Shapes that went wrong on a GPU, where the interpreter shows nothing."""

from __future__ import annotations

import pytest
import torch
from held import attention_failures

import pyfa
from pyfa.backends import BACKENDS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(96, 1), (59, 1), (111, 8), (64, 8), (128, 8), (40, 15), (256, 2), (17, 1)]
)
def test_values_narrower_than_a_tile(
    backend: str, dim: int, dim_v: int, dtype: torch.dtype
) -> None:
    if str(dtype).removeprefix("torch.") not in BACKENDS[backend].DTYPES:
        pytest.skip(f"{backend} has no {dtype}")
    where = {"device": "cuda", "dtype": dtype}
    q, k = (torch.randn(2, 130, 4, dim, **where) for _ in range(2))
    v, dout = (torch.randn(2, 130, 4, dim_v, **where) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = pyfa.attention(*leaves, causal=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    assert attention_failures(q, k, v, found, dout, causal=True) == []
