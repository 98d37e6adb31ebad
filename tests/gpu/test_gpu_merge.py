"""``pyfa.merge`` as one launch of ``combine``, against PyTorch's operators on the same GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from merge_cases import wrong

import pyfa
from pyfa import merging


@pytest.fixture
def merges(backend: str) -> list[str]:
    """The backend, if it merges in one launch."""
    if backend == "triton":
        pytest.skip("triton merges by PyTorch's operators")
    return backend


def test_it_is_what_pytorch_makes_of_it(merges: str) -> None:
    merging._bound.clear()
    assert not wrong(0, merges, "cuda", merges=200)
    assert any(merging._bound.values()), "no launch was bound"


def test_a_cascade_with_sinks_once(merges: str) -> None:
    q, k, v = (
        torch.randn(2, n, h, 64, device="cuda").bfloat16() for n, h in ((3, 4), (90, 2), (90, 2))
    )
    sinks = torch.randn(4, device="cuda")
    with pyfa.use_backend(merges):
        cuts = [
            pyfa.attention(q, k[:, a:b], v[:, a:b], sinks=None if a else sinks, return_lse=True)
            for a, b in itertools.pairwise((0, 33, 33, 64, 90))
        ]
        have = pyfa.merge(*zip(*cuts, strict=True), return_lse=True)
    want = pyfa.attention(q.float(), k.float(), v.float(), sinks=sinks, return_lse=True)
    torch.testing.assert_close(have[0].float(), want[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(have[1], want[1], atol=1e-4, rtol=1e-4)
