"""Rows as the kernels read them, in units of 16 bytes whatever the format."""

from __future__ import annotations

import pytest
import torch

from pyfa.backends.common import calls


@pytest.mark.parametrize(
    ("dtype", "dim", "becomes"),
    [
        (torch.bfloat16, 24, 24),
        (torch.bfloat16, 20, 24),
        (torch.float8_e4m3fn, 48, 48),
        (torch.float8_e4m3fn, 40, 48),
        (torch.float8_e4m3fn, 1, 16),
    ],
)
def test_heads_are_whole_units(dtype: torch.dtype, dim: int, becomes: int) -> None:
    x = torch.randn(2, 5, 3, dim).to(dtype)
    y = calls.readable(x)
    assert y.dtype == dtype
    assert y.shape[-1] == becomes
    assert torch.equal(y[..., :dim].float(), x.float())
    assert not y[..., dim:].float().any()
    assert (y is x) == (dim == becomes)


def test_float8_rows_that_start_between_units_are_copied() -> None:
    x = torch.zeros(2, 5, 3, 24).to(torch.float8_e4m3fn)[..., :16]
    y = calls.readable(x)
    assert y is not x
    assert y.is_contiguous()
