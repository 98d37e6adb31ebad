"""Batch invariance over keys of several chunks: whoever merges them, the same bits, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import reference, request
from pyfa.conformance.tolerances import judge, judge_lse
from pyfa.request import Shared

KEYS = 5003


@pytest.mark.parametrize(
    ("dim", "dim_v"), [(64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("terms", ["causal", "window", "sinks", "alibi"])
def test_chunks(backend: str, dim: int, dim_v: int, terms: str) -> None:
    where = {"device": "cuda", "dtype": torch.bfloat16}
    slopes = torch.linspace(0.001, 0.05, 4, device="cuda")
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    options |= {
        "window": {"window": (2500, 0)}, "sinks": {"sinks": slopes * 100},
        "alibi": {"alibi_slopes": slopes},
    }.get(terms, {})  # fmt: skip
    rows, copies = 200, 60
    q = torch.randn(1, rows, 4, dim, **where)
    k = torch.randn(1, KEYS, 2, dim, **where)
    v = torch.randn(1, KEYS, 2, dim_v, **where)

    def call(q: torch.Tensor, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        q, keys, values = (x.expand(times, *x.shape[1:]) for x in (q, k, v))
        return pyfa.attention(q, keys, values, backend=backend, batch_invariant=True, **options)

    # Few work tiles: each chunk is one. Many: blocks go through the chunks.
    few, few_lse = call(q)
    many, many_lse = call(q, copies)
    last, last_lse = call(q[:, -1:])
    some, some_lse = call(q[:, -64:], copies)
    for out, lse in ((many, many_lse), (last, last_lse), (some, some_lse)):
        assert torch.equal(out[-1], few[0, -out.shape[1] :])
        assert torch.equal(lse[-1], few_lse[0, :, -lse.shape[2] :])

    cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    asked = request.dense(q.cpu(), k.cpu(), v.cpu(), Shared(**cpu)).call
    exact, naive = (reference.attention(asked, dtype=x) for x in (torch.float64, torch.bfloat16))
    size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * asked.scale + 300
    checks = (
        judge("out", few.cpu(), exact[0], naive[0]),
        judge_lse(few_lse.cpu(), exact[1], asked.q, size, size),
    )
    assert [check.message for check in checks if check.message] == []
