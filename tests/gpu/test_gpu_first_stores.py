"""Hopper's backward, where the first block that reaches a tile of dQ sets it, while later ones add.

With one sender, the first block stores its sums; otherwise a warp of it writes zeros. Cases of the
conformance suite have few blocks for a tile, and so rarely one that has to wait. Here blocks of a
whole GPU reach the same tiles, and all memory holds NaN before: sums that are added to what nobody
set, or that are overwritten later, show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa

CAUSAL = {"causal": True}
CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "full": (16, 1024, 128, 128, {}),
    "causal": (4, 4096, 128, 128, CAUSAL),
    "window": (1, 8192, 128, 128, {"causal": True, "window": (127, 0)}),
    "192/128": (16, 1024, 192, 128, {}),
    "rows without keys": (2, 2048, 128, 128, {"window": (-1, -512)}),
    "64": (16, 1024, 64, 64, {}),
    "64, causal": (4, 4096, 64, 64, CAUSAL),
    "64, causal, zeros beforehand": (1, 9000, 64, 64, CAUSAL),
    "64, window": (1, 8192, 64, 64, {"causal": True, "window": (127, 0)}),
    "64, rows without keys": (2, 2048, 64, 64, {"window": (-1, -512)}),
    "256": (8, 1024, 256, 256, {}),
    "256, causal": (2, 4096, 256, 256, CAUSAL),
    "256, window": (1, 8192, 256, 256, {"causal": True, "window": (1023, 0)}),
    "256, rows without keys": (2, 2048, 256, 256, {"window": (-1, -512)}),
    "192": (8, 1024, 192, 192, CAUSAL),
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
