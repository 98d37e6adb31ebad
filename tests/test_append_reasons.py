"""The operators that ready a cache, where a call on a CPU is refused and one on a GPU is not."""

from __future__ import annotations

import pytest
import torch

from pyfa.backends.torch.append import append_kv, rotary

ROWS, CAPACITY, PAGE = 3, 6, 2


def appended(where: str, begin: list[int], rows: int = ROWS) -> None:
    """Append from ``begin`` on, and compare with rows that are written one after the other."""
    torch.manual_seed(0)
    batch = len(begin)
    pages = CAPACITY // PAGE
    table = torch.randperm(batch * pages).view(batch, pages).int()
    index = torch.randperm(batch + 1)[:batch].int()
    shape = (table.numel(), PAGE) if where == "pages" else (batch + 1, CAPACITY)
    shape = (batch, CAPACITY) if where == "rows" else shape
    caches = [torch.randn(*shape, 2, dim) for dim in (8, 5)]
    fresh = [torch.randn(batch, rows, 2, dim) for dim in (8, 5)]
    want = [cache.clone() for cache in caches]
    for cache, new in zip(want, fresh, strict=True):
        for b, first in enumerate(begin):
            for row in range(rows):
                at = first + row
                if at >= CAPACITY:
                    continue
                if where == "pages":
                    cache[table[b, at // PAGE], at % PAGE] = new[b, row]
                else:
                    cache[index[b] if where == "index" else b, at] = new[b, row]
    append_kv(
        *caches,
        *fresh,
        torch.tensor(begin, dtype=torch.int32),
        table if where == "pages" else None,
        index if where == "index" else None,
    )
    for have, expected in zip(caches, want, strict=True):
        assert torch.equal(have, expected)


@pytest.mark.parametrize("where", ["rows", "index", "pages"])
def test_rows_beyond_the_end_of_a_cache_are_dropped(where: str) -> None:
    """A sequence at every place around the end, alone and beside the others."""
    places = [*range(CAPACITY + 3)]
    appended(where, places)
    for place in places:
        appended(where, [place])


@pytest.mark.parametrize("where", ["rows", "index", "pages"])
def test_nothing_is_appended(where: str) -> None:
    appended(where, [])
    appended(where, [2, CAPACITY], rows=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_position_without_a_row_in_the_tables_gives_nan(interleaved: bool) -> None:
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(7, 2, 10), torch.randn(2, 5, 3)
    positions = torch.tensor([-7, -1, 0, 4, 5, 6, 99])
    out = rotary(x, cos, sin, positions, interleaved)
    known = (positions >= 0) & (positions < 5)
    assert torch.equal(out[..., :6].isnan(), ~known[:, None, None].expand(7, 2, 6))
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert torch.equal(out[known], rotary(x[known], cos, sin, positions[known], interleaved))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_float8_beyond_the_largest_number_is_that_number(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([most, most, -most, -most]).view(1, 1, 4).to(dtype)
    cos, sin = torch.tensor([[0.8, 0.8]]), torch.tensor([[-0.6, 0.6]])
    out = rotary(x, cos, sin, torch.zeros(1, dtype=torch.int64), True).float().flatten()
    assert out.tolist() == [most, nearest(0.2 * most, dtype), nearest(-0.2 * most, dtype), -most]


def test_what_is_infinite_stays_infinite() -> None:
    x, one = torch.tensor([[[torch.inf, 1.0]]], dtype=torch.float16), torch.ones(1, 1)
    assert rotary(x, one, one, torch.tensor([0]), True).flatten().tolist() == [torch.inf, torch.inf]


def nearest(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value).to(dtype).float())
