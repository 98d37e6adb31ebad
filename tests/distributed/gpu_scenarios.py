"""What workers with a GPU run."""

from __future__ import annotations

import torch
import workers

from pyfa.distributed import ring_attention


def _leaves(rows: int, heads: int = 32, heads_k: int = 8) -> list[torch.Tensor]:
    options = {"device": workers.device(), "dtype": torch.bfloat16}
    return [
        torch.randn(1, rows, n, 128, **options).requires_grad_() for n in (heads, heads_k, heads_k)
    ]


def same_bits(size: int, backend: str, times: int) -> bool:
    """Whether out and gradients of a long sequence are the same every time."""
    leaves = _leaves(4096)
    first = None
    for _ in range(times):
        out = ring_attention(
            *leaves, group=workers.group(size), causal=True, deterministic=True, backend=backend
        )
        found = (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))
        first = first or found
        if not all(torch.equal(x, y) for x, y in zip(found, first, strict=True)):
            return False
    return True


def memory(size: int, backend: str) -> float:
    """The most memory of forward and backward beside what cannot be less."""
    leaves = _leaves(1 << 17)
    group = workers.group(size)
    small = [x[:, :1024] for x in leaves]
    ring_attention(*small, group=group, causal=True, backend=backend).sum().backward()
    for x in leaves:
        x.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    out = ring_attention(*leaves, group=group, causal=True, backend=backend)
    dout = torch.randn_like(out)
    torch.autograd.backward(out, dout)
    torch.cuda.synchronize()  # what a kernel did outside its memory is heard here
    q, k, v = leaves
    # q, k, v and their gradients, out and its, and two blocks of keys and values.
    least = sum(2 * x.nbytes for x in (q, k, v, out)) + 2 * (k.nbytes + v.nbytes)
    return torch.cuda.max_memory_allocated() / least
