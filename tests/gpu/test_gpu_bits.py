"""What has to be the same bits from run to run, and from one way through the host to another."""

from __future__ import annotations

import pytest
import torch

import pyfa

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def tensors(dim: int, heads_k: int = 2) -> list[torch.Tensor]:
    shapes = [(2, 700, 8, dim), (2, 900, heads_k, dim), (2, 900, heads_k, dim)]
    return [torch.randn(shape, **BF16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "dropout_p": 0.1, "seed": 3}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_deterministic_backward(backend: str, dim: int, options: dict[str, float]) -> None:
    leaves = tensors(dim)
    out = pyfa.attention(*leaves, causal=True, deterministic=True, backend=backend, **options)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("rows", [1, 130, 700])
def test_a_repeated_call_is_the_first_one(backend: str, rows: int) -> None:
    """The first call goes the long way, the others launch what it prepared, some without an LSE."""
    q, k, v = (x.detach() for x in tensors(128))
    first = pyfa.attention(q[:, :rows], k, v, causal=True, backend=backend)
    for return_lse in (False, True, False, True):
        again = pyfa.attention(
            q[:, :rows], k, v, causal=True, return_lse=return_lse, backend=backend
        )
        assert torch.equal(again[0] if return_lse else again, first)
