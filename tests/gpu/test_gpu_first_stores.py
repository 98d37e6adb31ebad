"""Hopper's backward, whose first block that reaches a tile of dQ stores, while later ones add.

Cases of the conformance suite have few blocks for a tile, and so rarely one that has to wait. Here
blocks of a whole GPU reach the same tiles, and all memory holds NaN before: sums that are added to
what nobody stored, or that a later store overwrites, show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa

CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "full": (16, 1024, 128, 128, {}),
    "causal": (4, 4096, 128, 128, {"causal": True}),
    "window": (1, 8192, 128, 128, {"causal": True, "window": (127, 0)}),
    "192/128": (16, 1024, 192, 128, {}),
    "rows without keys": (2, 2048, 128, 128, {"window": (-1, -512)}),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CALLS)
def test_no_sum_is_lost(name: str) -> None:
    batch, rows, dim, dim_v, mask = CALLS[name]

    def random(dim: int) -> torch.Tensor:
        return torch.randn(batch, rows, 16, dim, device="cuda", dtype=torch.bfloat16)

    q, k, v, dout = random(dim), random(dim), random(dim_v), random(dim_v)
    q.requires_grad_()
    in_turn = pyfa.attention(q, k, v, deterministic=True, backend="cuda", **mask)
    (expected,) = torch.autograd.grad(in_turn, q, dout)
    out = pyfa.attention(q, k, v, backend="cuda", **mask)
    for _ in range(20):
        torch.full((1 << 28,), float("nan"), device="cuda")  # freed at once, for what comes next
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        # Both round sums that differ in the order of a few float32 additions.
        torch.testing.assert_close(dq, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
