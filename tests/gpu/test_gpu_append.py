"""What is appended to a cache on a GPU: rotary before a float8 cache, and rows beyond its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa.backends import BACKENDS
from pyfa.conformance import grid, runner
from pyfa.conformance.cases import Case

FAULTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "rotated the other way": lambda x, cos, sin, at, pairs: (x, cos, -sin, at, pairs),
    "not rotated": lambda x, cos, sin, at, pairs: (x, cos * 0 + 1, sin * 0, at, pairs),
    "from the position behind": lambda x, cos, sin, at, pairs: (
        x, cos.roll(-1, 0), sin.roll(-1, 0), at, pairs
    ),
    "pairs of the wrong kind": lambda x, cos, sin, at, pairs: (x, cos, sin, at, not pairs),
}  # fmt: skip


def cases(backend: str) -> list[Case]:
    """Return the full level's cases of rotary before a float8 cache."""
    of = BACKENDS[backend]
    every = grid.cases("full", of.FEATURES, of.DTYPES, ["fp8"])
    some = [case for case in every if case.rotary and case.features <= of.FEATURES]
    if not some:
        pytest.skip(f"{backend} has no float8")
    return some


def failing(backend: str, some: list[Case]) -> dict[str, tuple[str, ...]]:
    where = runner.device_of(backend)
    found = (runner.run_case(BACKENDS[backend], case, where) for case in some)
    return {each.name: each.messages or each.reasons for each in found if each.status != "passed"}


def test_rotary_before_a_float8_cache(backend: str) -> None:
    some = cases(backend)
    assert len(some) >= 14
    assert failing(backend, some) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_it_is_found(backend: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rotation of new keys alone."""
    operator = torch.ops.pyfa.rotary

    def wrong(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return operator(*(FAULTS[fault](x, *rest) if x.shape[-2] == 2 else (x, *rest)))

    some = [case for case in cases(backend) if case.heads_q == 8]
    monkeypatch.setattr(torch.ops.pyfa, "rotary", wrong)
    assert failing(backend, some).keys() == {case.name for case in some}


def test_rows_beyond_the_end_of_a_cache_are_dropped(backend: str) -> None:
    """Lengths on a GPU are not checked. In front of the cache and behind it are other rows."""
    rows, capacity = 3, 64
    begin = [*range(capacity - rows - 1, capacity + 2)]
    where = {"device": "cuda", "dtype": torch.bfloat16}
    around = [torch.randn(len(begin) + 2, capacity, 2, 64, **where) for _ in "kv"]
    q, k, v = (torch.randn(len(begin), rows, 2, 64, **where) for _ in "qkv")
    want = [x.clone() for x in around]
    for x, new in zip(want, (k, v), strict=True):
        for b, first in enumerate(begin):
            kept = max(min(rows, capacity - first), 0)
            x[1 + b, first : first + kept] = new[b, :kept]
    caches = [x[1:-1] for x in around]
    held = torch.tensor(begin, dtype=torch.int32, device="cuda")
    pyfa.attention_kvcache(q, *caches, k=k, v=v, cache_seqlens=held, backend=backend)
    assert all(map(torch.equal, around, want))
