"""A small GPT whose training step is timed with each peer's attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .ready import Attend, Ready
from .suites import Cell


class _Block(nn.Module):
    """Attention and a perceptron of four times the width, each after a norm (Radford 2019)."""

    def __init__(self, cell: Cell, attend: Attend) -> None:
        super().__init__()
        width = cell.heads_q * cell.head_dim
        self.heads, self.heads_k, self.head_dim = cell.heads_q, cell.heads_k, cell.head_dim
        self.attend = attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (cell.heads_q + 2 * cell.heads_k) * cell.head_dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.heads_k, self.heads_k), dim=2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        out: torch.Tensor = x + self.mlp(self.between(x))
        return out


def step(cell: Cell, device: torch.device, attend: Attend) -> Ready:
    """Return a function that runs one training step. Tokens and initial weights are the same for
    every peer."""
    dtype = getattr(torch, cell.dtype)
    width = cell.heads_q * cell.head_dim
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(cell.vocabulary, width),
            *(_Block(cell, attend) for _ in range(cell.layers)),
            nn.LayerNorm(width),
            nn.Linear(width, cell.vocabulary),
        ).to(device, dtype)
        tokens = torch.randint(cell.vocabulary, (cell.batch, cell.seqlen_q + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets)

    def whole() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Ready(loss, tuple(model.parameters()), torch.ones((), device=device), step=whole)
