"""CUDA graphs: what a replay reads again, and what it draws again."""

from __future__ import annotations

import torch

import pyfa
from pyfa.bench.timing import captured
from pyfa.compat import fa2

HALF = {"device": "cuda", "dtype": torch.float16}


def test_cache_lengths_are_read_on_the_device(backend: str) -> None:
    q = torch.randn(3, 1, 8, 128, **HALF)
    k_cache, v_cache = (torch.randn(3, 1024, 2, 128, **HALF) for _ in range(2))
    k, v = (torch.randn(3, 1, 2, 128, **HALF) for _ in range(2))
    used = torch.tensor([5, 700, 1000], dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return pyfa.attention_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=used, causal=True, backend=backend
        )

    graph, out = captured(run)
    for lengths in ([5, 700, 1000], [1023, 0, 64]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        have = out.clone()
        assert torch.equal(have, run())
        assert torch.equal(k_cache[0, lengths[0]], k[0, 0])


def test_packed_lengths_are_read_on_the_device(backend: str) -> None:
    q, k, v = (torch.randn(300, 4, 64, **HALF) for _ in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return pyfa.attention_varlen(
            q, k, v, starts, starts, 256, 256, causal=True, backend=backend
        )

    graph, out = captured(run)
    seen = []
    for middle in (100, 200):
        starts.copy_(torch.tensor([0, middle, 300]))
        graph.replay()
        seen.append(out.clone())
        assert torch.equal(seen[-1], run())
    assert not torch.equal(*seen)


def test_dropout_differs_between_replays(backend: str) -> None:
    q, k = (torch.randn(2, 64, 4, 64, **HALF) for _ in range(2))
    v = torch.eye(64, **HALF)[None, :, None, :].expand(2, 64, 4, 64).contiguous()

    def run() -> torch.Tensor:
        return pyfa.attention(q, k, v, dropout_p=0.5, backend=backend)

    graph, out = captured(run)
    kept = []
    for _ in range(3):
        graph.replay()
        kept.append(out != 0)
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    torch.manual_seed(3)
    graph.replay()
    again = out.clone()
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(out, again)


def test_a_seed_on_the_device_is_read_at_each_replay(backend: str) -> None:
    q, k, v = (torch.randn(2, 200, 4, 64, **HALF) for _ in range(3))
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run() -> torch.Tensor:
        return pyfa.attention(q, k, v, dropout_p=0.3, seed=seed, backend=backend)

    graph, out = captured(run)
    for value in (7, -1):
        seed.fill_(value)
        graph.replay()
        expected = pyfa.attention(q, k, v, dropout_p=0.3, seed=value, backend=backend)
        assert torch.equal(out, expected)


def test_a_training_step(backend: str) -> None:
    leaves = [torch.randn(2, 300, 4, 64, **HALF).requires_grad_() for _ in range(3)]
    dout = torch.randn(2, 300, 4, 64, **HALF)

    def run() -> tuple[torch.Tensor, ...]:
        options = {"softcap": 20.0, "deterministic": True, "backend": backend}
        out = pyfa.attention(*leaves, causal=True, **options)
        return (out, *torch.autograd.grad(out, leaves, dout))

    graph, results = captured(run)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    have = [x.clone() for x in results]
    for x, y in zip(have, run(), strict=True):
        assert torch.equal(x, y)


def test_flash_attentions_function_with_pages_is_captured(backend: str) -> None:
    """It checks the lengths against the table, which waits for the device: not in a capture."""
    q = torch.randn(2, 1, 8, 64, **HALF)
    k_cache, v_cache = (torch.randn(8, 256, 2, 64, **HALF) for _ in range(2))
    table = torch.randperm(8, dtype=torch.int32, device="cuda").view(2, 4)
    used = torch.tensor([300, 1024], dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        with pyfa.use_backend(backend):
            return fa2.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=used, block_table=table
            )

    graph, out = captured(run)
    used.copy_(torch.tensor([1, 999]))
    graph.replay()
    assert torch.equal(out.clone(), run())
