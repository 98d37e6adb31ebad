"""Train a small GPT for a few steps and print each loss: one curve on every backend.

    python benchmarks/train_gpt.py --backend hip          # on an MI300X
    python benchmarks/train_gpt.py --backend emulator     # its machine code, on a CPU
    python benchmarks/train_gpt.py --backend emulator:deterministic   # gradients in two passes
    python benchmarks/train_gpt.py --backend float64      # what the rule compares with
    python benchmarks/train_gpt.py --backend float64,naive,torch,triton,cuda --save

Weights and data come from fixed seeds on the CPU. Queries, keys and values are rounded to bfloat16,
everything else is float32: what differs between two runs is attention and its gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import pyfa

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WHAT = "cross entropy before each step's update, one list a backend; weights and data the same"
VOCABULARY, LAYERS, HEADS, HEADS_K, HEAD_DIM = 64, 4, 4, 2, 64


def eager(dtype: torch.dtype) -> Attention:
    """PyTorch's operations in ``dtype``, causal: float64 as reference, bfloat16 as "naive"."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    return attend


def attention(backend: str) -> Attention:
    """Causal attention by ``float64``, ``naive``, or a backend, as ``hip:deterministic``."""
    if backend in ("float64", "naive"):
        return eager(torch.float64 if backend == "float64" else torch.bfloat16)

    name, _, way = backend.partition(":")
    if way not in ("", "deterministic"):
        raise ValueError(f"backend: expected {name} or {name}:deterministic; got {backend}")
    deterministic = bool(way)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = pyfa.attention(q, k, v, causal=True, deterministic=deterministic, backend=name)
        assert isinstance(out, torch.Tensor)
        return out

    return attend


class Block(nn.Module):
    def __init__(self, attend: Attention) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.attend = attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * HEADS_K) * HEAD_DIM)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, HEAD_DIM)).bfloat16()
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), dim=2)
        x = x + self.out(self.attend(q, k, v).flatten(2).float())
        out: torch.Tensor = x + self.mlp(self.between(x))
        return out


def losses(backend: str, steps: int, batch: int, seqlen: int, device: str = "cpu") -> list[float]:
    """The cross entropy of each step, before its update by AdamW."""
    attend = attention(backend)
    torch.manual_seed(0)
    width = HEADS * HEAD_DIM
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, width), *(Block(attend) for _ in range(LAYERS)),
        nn.LayerNorm(width), nn.Linear(width, VOCABULARY),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Walks over the vocabulary: the next token follows from this one and a step of one's own.
    start, stride = torch.randint(VOCABULARY, (2, batch, 1))
    tokens = ((start + stride * torch.arange(seqlen + 1)) % VOCABULARY).to(device)
    found = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", default="torch", help="of pyfa; or float64, or naive; or several: torch,cuda"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=100)
    parser.add_argument("--save", action="store_true", help="write results/train_gpt.json")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    begin = time.monotonic()
    for backend in options.backend.split(","):
        on_gpu = torch.cuda.is_available() and not backend.startswith("emulator")
        curves[backend] = losses(
            backend, options.steps, options.batch, options.seqlen, "cuda" if on_gpu else "cpu"
        )
        print(f"{time.monotonic() - begin:4.0f} s {backend}", file=sys.stderr)
        if options.save:
            import machine  # beside this file, which others import too

            found = {"what": WHAT, "options": vars(options), "curves": curves}
            machine.save("train_gpt", found)
    if len(curves) > 1:
        print("  ".join(f"{backend:>8}" for backend in curves))
    for step in zip(*curves.values(), strict=True):
        print("  ".join(f"{loss:.6f}" for loss in step))


if __name__ == "__main__":
    main()
