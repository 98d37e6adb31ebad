"""Packed calls with another total of rows run what was bound for the first one, on the HIP kernels'
machine code: bit by bit what a call gives that was bound for it alone.

Between calls all tensors are overwritten and freed, so that an address or a size of an earlier call
would show, or touch memory that the emulator has not mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa.backends.common import program

pytestmark = pytest.mark.usefixtures("nothing_bound")

# Of q and k, with the ends of two sequences: totals grow, shrink, and hold rows of no sequence.
TOTALS = (((60, 50), (20, 55), (30, 50)), ((9, 12), (1, 9), (5, 12)), ((80, 75), (40, 80), (2, 40)))
LONGEST = 40


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=made).bfloat16()


def offsets(ends: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *ends), dtype=torch.int32)


def train(which: int, **options: Any) -> list[torch.Tensor]:
    (q, k), *ends = TOTALS[which]
    leaves = [floats(q, 4, 64), floats(k, 2, 64, seed=1), floats(k, 2, 64, seed=2)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.linspace(-1, 1, 4))]
    outs = pyfa.attention_varlen(
        *leaves[:3], offsets(ends[0]), offsets(ends[1]), LONGEST, LONGEST, sinks=leaves[3],
        return_lse=True, backend="emulator", **options,
    )  # fmt: skip
    # The LSE of rows of no sequence is -inf.
    dlse = outs[1].detach().nan_to_num(neginf=0.0).sin()
    return [*outs, *torch.autograd.grad(outs, leaves, (floats(q, 4, 64, seed=3), dlse)), *leaves]


def split(which: int) -> list[torch.Tensor]:
    (q, k), *ends = TOTALS[which]
    given = [floats(q, 4, 64), floats(k, 2, 64, seed=1), floats(k, 2, 64, seed=2)]
    found = pyfa.attention_varlen(
        *given, *map(offsets, ends), LONGEST, LONGEST, num_splits=2, return_lse=True,
        backend="emulator",
    )  # fmt: skip
    return [*found, *given]


def append(which: int, dim: int = 64) -> list[torch.Tensor]:
    """Packed queries, rotated, over a cache; with a ``dim`` that kernels read from a copy."""
    ((q, _), ends, _), angle = TOTALS[which], torch.linspace(0, 3, 128 * 16).view(128, 16)
    caches = [floats(2, 64, 2, dim, seed=seed) for seed in (1, 2)]
    given = [floats(q, 4, dim), *caches, floats(2, 3, 2, dim, seed=4), floats(2, 3, 2, dim, seed=5)]
    found = pyfa.attention_kvcache(
        *given[:3], k=given[3], v=given[4], cache_seqlens=torch.tensor([7, 40], dtype=torch.int32),
        cu_seqlens_q=offsets(ends), max_seqlen_q=LONGEST, rotary_cos=angle.cos(),
        rotary_sin=angle.sin(), causal=True, return_lse=True, backend="emulator",
    )  # fmt: skip
    return [*found, *(x.clone() for x in caches), *given]


CASES: dict[str, tuple[int, Callable[[int], list[torch.Tensor]]]] = {
    "training": (6, lambda which: train(which, causal=True, deterministic=True)),
    "splits": (2, split),
    "append": (4, append),
    "append, by copies": (4, lambda which: append(which, dim=36)),
}


@pytest.mark.parametrize(("results", "case"), CASES.values(), ids=CASES)
def test_another_total_gives_what_a_first_call_gives(
    results: int,
    case: Callable[[int], list[torch.Tensor]],
    nothing_bound: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(which: int) -> list[torch.Tensor]:
        every = case(which)
        kept = [x.detach().clone() for x in every[:results]]
        for x in every:
            x.detach().untyped_storage().fill_(0xFF)
        return kept

    alone = []
    for which in range(len(TOTALS)):
        nothing_bound()
        alone.append(found(which))
    nothing_bound()
    bound: list[Any] = []
    described = program.Program.__init__

    def noted(self: Any, *given: Any) -> None:
        bound.append(self)
        described(self, *given)

    monkeypatch.setattr(program.Program, "__init__", noted)
    found(0)
    count = len(bound)
    for which in (1, 2, 0, 1, 2):
        for x, y in zip(found(which), alone[which], strict=True):
            assert torch.equal(x, y)
    assert len(bound) == count > 0
