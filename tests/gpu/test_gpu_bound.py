"""Forward and backward that are bound are those of a first call, bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa import binding

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def tensors(seed: int, heads_k: int = 8) -> list[torch.Tensor]:
    made = torch.Generator("cuda").manual_seed(seed)
    shapes = [(2, 300, 8, 64), *[(2, 400, heads_k, 64)] * 2, (2, 300, 8, 64)]
    return [torch.randn(shape, generator=made, **BF16) for shape in shapes]


def step(seed: int, backend: str, heads_k: int = 8, **options: Any) -> tuple[torch.Tensor, ...]:
    *leaves, dout = tensors(seed, heads_k)
    leaves = [x.requires_grad_() for x in leaves]
    # dQ is added up in one order only where that is asked for.
    out = pyfa.attention(*leaves, backend=backend, deterministic=True, **options)
    return (out, *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 9.0, "heads_k": 2}], ids=str)
def test_steps_on_other_tensors(
    backend: str,
    options: dict[str, Any],
    nothing_bound: Callable[[], None],
) -> None:
    expected = []
    for seed in range(4):
        nothing_bound()
        expected.append(step(seed, backend, **options))
    # Twice with memory of which nothing is 0 by chance.
    for _ in range(2):
        for seed in range(4):
            waste = torch.full((1 << 24,), torch.nan, device="cuda")
            del waste
            for x, y in zip(step(seed, backend, **options), expected[seed], strict=True):
                assert torch.equal(x, y)
    ((entry,),) = binding.calls.known.values()
    assert [len(each) for each in entry.backwards.values()] == [1, 0]


def packed_step(
    seed: int, backend: str, ends: list[int], total: int = 600
) -> tuple[torch.Tensor, ...]:
    *leaves, dout = (x.flatten(0, 1)[:total].clone() for x in tensors(seed))
    leaves = [x.requires_grad_() for x in leaves]
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
    out, lse = pyfa.attention_varlen(
        *leaves, offsets, offsets, 300, 300, causal=True, return_lse=True, deterministic=True,
        backend=backend,
    )  # fmt: skip
    return (out, lse, *torch.autograd.grad(out, leaves, dout))


def test_packed_steps_with_other_offsets(backend: str, nothing_bound: Callable[[], None]) -> None:
    """Of the same shapes, with rows of no sequence behind the last."""
    ends = [[200, 500, 600], [300, 301, 590], [0, 256, 400], [1, 2, 3]]
    expected = []
    for seed, each in enumerate(ends):
        nothing_bound()
        expected.append(packed_step(seed, backend, each))
    for _ in range(2):
        for seed, each in enumerate(ends):
            waste = torch.full((1 << 24,), torch.nan, device="cuda")
            del waste
            found = packed_step(seed, backend, each)
            for x, y in zip(found, expected[seed], strict=True):
                assert torch.equal(x, y)
            assert not any(x[each[-1] :].any() for x in (found[0], *found[2:]))
            assert (found[1][:, each[-1] :] == -torch.inf).all()
    assert len(binding.calls.known) == 1


def test_packed_steps_with_other_totals(backend: str, nothing_bound: Callable[[], None]) -> None:
    """Twice: bound for each total by itself, and for the first one only."""
    ends = [[200, 500, 600], [100, 101, 290], [1, 2, 3], [0, 256, 400], [299, 300, 301]]
    totals = [600, 300, 3, 417, 302]
    expected = []
    for seed, (each, total) in enumerate(zip(ends, totals, strict=True)):
        nothing_bound()
        expected.append(packed_step(seed % 4, backend, each, total))
    nothing_bound()
    for _ in range(2):
        for seed, (each, total) in enumerate(zip(ends, totals, strict=True)):
            waste = torch.full((1 << 24,), torch.nan, device="cuda")
            del waste
            found = packed_step(seed % 4, backend, each, total)
            for x, y in zip(found, expected[seed], strict=True):
                assert torch.equal(x, y)
    ((entry,),) = binding.calls.known.values()
    assert [len(each) for each in entry.backwards.values()] == [1, 0]


def test_steps_in_threads_on_streams(backend: str) -> None:
    expected = [step(seed, backend) for seed in range(4)]
    torch.cuda.synchronize()
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    found = step(seed, backend)
                    same = [torch.equal(x, y) for x, y in zip(found, expected[seed], strict=True)]
                    if not all(same):
                        failures.append((seed, same))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
