"""``pyfa.merge`` as one launch of ``combine``, against PyTorch's operators on the same GPU."""

from __future__ import annotations

import pytest
import torch
from merge_cases import cascade, wrong

from pyfa import merging


@pytest.fixture
def merges(backend: str) -> str:
    """The backend, if it merges in one launch."""
    if backend == "triton":
        pytest.skip("triton merges by PyTorch's operators")
    return backend


def test_it_is_what_pytorch_makes_of_it(merges: str) -> None:
    merging._bound.clear()
    assert not wrong(0, merges, "cuda", merges=200)
    assert any(merging._bound.values()), "no launch was bound"


def test_a_cascade_with_sinks_once(merges: str) -> None:
    have, want = cascade(merges, "cuda")
    torch.testing.assert_close(have[0].float(), want[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(have[1], want[1], atol=1e-4, rtol=1e-4)
