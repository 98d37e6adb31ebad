"""Run one attention layer over 262,144 tokens, forward and backward, on one GPU.

    python benchmarks/long_context.py [--save] [--seqlen 262144] [--heads 32]

Time, peak memory, and the largest error of a few rows of the output and of dQ against float64 over
all keys. Exit status 1 where these are wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

import machine
import torch
from peaks import beyond_inputs

import pyfa
from pyfa.traffic import Shape, attention_flops

HOW = (
    "One call after a warm-up on 1,024 tokens, between two waits for the device. Memory: the "
    "allocator's peak beyond q, k, v and dO. Errors: eight rows of four heads against float64."
)
ROWS, HEADS = 8, 4
# What the rounding of bfloat16 leaves: 2⁻⁸ of a value, twice, beside a sum of many small ones.
MOST_ERROR = 2.0**-6


def exact(
    x: list[torch.Tensor], rows: list[int], head: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and dQ of ``rows`` of one head, in float64."""
    q, k, v, dout = (one[0, :, head].double() for one in x)
    scale = q.shape[-1] ** -0.5
    score = q[rows] @ k.T * scale
    if causal:
        at = torch.tensor(rows, device=q.device)[:, None]
        score = score.masked_fill(torch.arange(len(k), device=q.device) > at, -torch.inf)
    p = score.softmax(-1)
    out = p @ v
    dp = dout[rows] @ v.T
    ds = p * (dp - (dout[rows] * out).sum(-1, keepdim=True))
    return out, ds @ k * scale


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def step(x: list[torch.Tensor], causal: bool) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Output, dQ, seconds of forward and of backward."""
    wait = torch.cuda.synchronize if x[0].is_cuda else lambda: None
    leaves = [one.detach().requires_grad_() for one in x[:3]]
    wait()
    begin = time.perf_counter()
    out = pyfa.attention(*leaves, causal=causal)
    assert isinstance(out, torch.Tensor)
    wait()
    middle = time.perf_counter()
    dq, _, _ = torch.autograd.grad(out, leaves, x[3])
    wait()
    return out.detach(), dq, middle - begin, time.perf_counter() - middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/long_context.json")
    parser.add_argument("--seqlen", type=int, default=262_144)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    options = parser.parse_args()
    causal, on_gpu = not options.full, torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"

    def inputs(seqlen: int) -> list[torch.Tensor]:
        size = (1, seqlen, options.heads, options.head_dim)
        return [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4)]

    torch.manual_seed(0)
    step(inputs(min(1024, options.seqlen)), causal)
    x = inputs(options.seqlen)
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out, dq, forward, backward = step(x, causal)
    extra = torch.cuda.max_memory_allocated() - before if on_gpu else None
    rows = sorted({int(n) for n in torch.linspace(0, options.seqlen - 1, ROWS)})
    errors = {"out": 0.0, "dq": 0.0}
    for head in range(min(HEADS, options.heads)):
        want_out, want_dq = exact(x, rows, head, causal)
        errors["out"] = max(errors["out"], relative(out[0, rows, head], want_out))
        errors["dq"] = max(errors["dq"], relative(dq[0, rows, head], want_dq))
    shape = Shape(1, options.seqlen, options.seqlen, options.heads, options.heads,
                  options.head_dim, options.head_dim, window_right=0 if causal else -1)  # fmt: skip
    size = (options.seqlen, options.heads, options.head_dim, causal)
    row = {
        "kind": "training", "side": "pyfa", "seqlen": options.seqlen, "heads": options.heads,
        "head_dim": options.head_dim, "causal": causal, "seconds": forward + backward,
        "forward_seconds": forward, "backward_seconds": backward, "extra_bytes": extra,
        "computed_bytes": beyond_inputs("pyfa", "training", *size),
        "standard_bytes": beyond_inputs("naive", "training", *size),
        "forward_tflops": attention_flops(shape) / forward / 1e12,
        "backward_tflops": attention_flops(shape, backward=True) / backward / 1e12,
        "errors": errors,
    }  # fmt: skip
    for name, value in row.items():
        print(f"{name:18} {value}")
    if options.save:
        title = f"{options.seqlen:,} tokens × {options.heads} heads on one GPU"
        print(machine.save("long_context", {"title": title, "how": HOW, "lengths": [row]}))
    return 1 if max(errors.values()) > MOST_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
