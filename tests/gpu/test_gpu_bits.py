"""What has to be the same bits from run to run, and from one way through the host to another."""

from __future__ import annotations

import os
import subprocess
import sys

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


TOO_SMALL = """
import sys
import torch
import pyfa

offsets = torch.tensor([0, 900, 2000], dtype=torch.int32, device="cuda")
q, k, v = (torch.randn(2000, 4, int(sys.argv[2]), device="cuda").bfloat16() for _ in range(3))
leaves = [x.requires_grad_() for x in (q, k, v)]
junk = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(5, 27)]
del junk  # lies where turns are counted
for softcap in (0.0, 20.0):  # on Hopper cuda's own kernels take the first, Ampere's the other
    for rows, keys in ((1100, 300), (300, 1100), (64, 64)):
        out = pyfa.attention_varlen(*leaves, offsets, offsets, rows, keys, softcap=softcap,
                                    causal=True, deterministic=True, backend=sys.argv[1])
        torch.autograd.grad(out, leaves, torch.ones_like(out))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_deterministic_backward_ends_where_a_max_seqlen_is_too_small(
    backend: str, dim: int
) -> None:
    """Its blocks wait for each other, and must not wait for one that was not started."""
    command = [sys.executable, "-c", TOO_SMALL, backend, str(dim)]
    environment = os.environ | {"PYFA_CHECK": "0"}
    subprocess.run(command, env=environment, timeout=120, check=True)


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


def test_parts_are_combined_when_all_are_there(backend: str) -> None:
    """Calls one behind the other, which have the same memory for their parts, and in a graph."""
    calls = []
    for batch, keys, parts in ((1, 65536, 0), (8, 8192, 0), (3, 1000, 7), (64, 512, 3)):
        q = torch.randn(batch, 1, 32, 128, **BF16)
        k, v = (torch.randn(batch, keys, 8, 128, **BF16) for _ in range(2))
        calls.append((q, k, v, parts))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int) -> torch.Tensor:
        return pyfa.attention_kvcache(q, k, v, num_splits=parts, backend=backend)

    expected = []
    for call in calls:
        expected.append(run(*call).clone())
        torch.cuda.synchronize()
    for _ in range(50):
        found = [run(*call) for call in calls]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run(*call) for call in calls]
    for _ in range(10):
        for out in found:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
