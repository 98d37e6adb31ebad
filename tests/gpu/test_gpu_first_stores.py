"""Hopper's backward, whose first block that reaches a tile of dQ stores, while later ones add.

Cases of the conformance suite have few blocks for a tile, and so rarely one that has to wait. Here
blocks of a whole GPU reach the same tiles, and all memory holds NaN before: sums that are added to
what nobody stored, or that a later store overwrites, show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyfa
from pyfa import device
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import plans
from pyfa.conformance import runner

CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "full": (16, 1024, 128, 128, {}),
    "causal": (4, 4096, 128, 128, {"causal": True}),
    "window": (1, 8192, 128, 128, {"causal": True, "window": (127, 0)}),
    "192/128": (16, 1024, 192, 128, {}),
    "rows without keys": (2, 2048, 128, 128, {"window": (-1, -512)}),
}


@pytest.fixture
def memory_of_nan() -> Iterator[Any]:
    if why := BACKENDS["cuda"].why_unavailable():
        pytest.skip(f"cuda: {why}")
    if not plans.runs_sm90(device.of(runner.device_of("cuda")).arch):
        pytest.skip("the GPU is no Hopper")
    yield lambda: torch.full((1 << 28,), float("nan"), device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", CALLS)
def test_no_sum_is_lost(name: str, memory_of_nan: Any) -> None:
    batch, rows, dim, dim_v, mask = CALLS[name]
    torch.manual_seed(0)

    def random(dim: int) -> torch.Tensor:
        return torch.randn(batch, rows, 16, dim, device="cuda", dtype=torch.bfloat16)

    q, k, v, dout = random(dim), random(dim), random(dim_v), random(dim_v)
    q.requires_grad_()
    in_turn = pyfa.attention(q, k, v, deterministic=True, backend="cuda", **mask)
    (expected,) = torch.autograd.grad(in_turn, q, dout)
    out = pyfa.attention(q, k, v, backend="cuda", **mask)
    for _ in range(20):
        memory_of_nan()  # freed at once: the next allocation gets it
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        # Both round sums that differ in the order of a few float32 additions.
        torch.testing.assert_close(dq, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
