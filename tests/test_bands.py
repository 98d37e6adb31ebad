"""``attention_chunk`` and windows with a negative edge: what they mean, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import pyfa


def theirs(rows: int, keys: int, chunk: int) -> torch.Tensor:
    """What FlashAttention-3's tests call visible, by remainders as they do."""
    position = torch.arange(rows)[:, None] + keys - rows
    first = position - position % chunk
    key = torch.arange(keys)
    return (key >= first) & (key < first + chunk)


def within(rows: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = (10**6 if edge is None else edge for edge in (left, right))
    return (distance >= -left) & (distance <= right)


def seen(rows: int, keys: int, **options: Any) -> torch.Tensor:
    """Which keys have a part in which row, read from the weights of an identity."""
    q = torch.zeros(1, rows, 1, 4)
    k, v = torch.zeros(1, keys, 1, 4), torch.eye(keys)[None, :, None]
    return pyfa.attention(q, k, v, **options)[0, :, 0] > 0


@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (5, 14), (14, 5), (1, 30)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100, 2**40])
def test_chunks_are_those_of_flash_attention_3(rows: int, keys: int, chunk: int) -> None:
    want = theirs(rows, keys, chunk)
    assert torch.equal(seen(rows, keys, attention_chunk=chunk), want)
    causal = want & within(rows, keys, None, 0)
    assert torch.equal(seen(rows, keys, attention_chunk=chunk, causal=True), causal)
    window = want & within(rows, keys, 2, 1)
    assert torch.equal(seen(rows, keys, attention_chunk=chunk, window=(2, 1)), window)
    moved = want & within(rows, keys, -1, 4)
    assert torch.equal(seen(rows, keys, attention_chunk=chunk, window=(pyfa.Edge(-1), 4)), moved)


_EDGES = (None, -40, -5, -2, -1, 0, 3, 40)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(_EDGES, _EDGES)))
def test_edges_count_as_they_are(left: int | None, right: int | None) -> None:
    window = tuple(None if edge is None else pyfa.Edge(edge) for edge in (left, right))
    for rows, keys in ((9, 9), (5, 14), (14, 5)):
        assert torch.equal(seen(rows, keys, window=window), within(rows, keys, left, right))
        causal = 0 if right is None else min(right, 0)
        found = seen(rows, keys, window=window, causal=True)
        assert torch.equal(found, within(rows, keys, left, causal))


def test_minus_one_is_unlimited_and_an_edge_of_it_is_not() -> None:
    # The same call again and again, so that the one that was bound for the other is not taken.
    for _ in range(3):
        assert torch.equal(seen(6, 6, window=(2, -1)), within(6, 6, 2, None))
        assert torch.equal(seen(6, 6, window=(2, pyfa.Edge(-1))), within(6, 6, 2, -1))
        assert torch.equal(seen(6, 6, window=(-1, -2)), within(6, 6, None, -2))
        assert seen(6, 6, attention_chunk=0).all()
        assert torch.equal(seen(6, 6, attention_chunk=2), theirs(6, 6, 2))
        assert seen(6, 6).all()


@pytest.mark.parametrize("window", [(-(2**40), None), (None, -(2**40)), (2**40, -(2**40))])
def test_edges_beyond_32_bits(window: Any) -> None:
    assert not seen(5, 7, window=window).any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_chunk": -1}, ValueError, "attention_chunk: expected a number of keys"),
        ({"attention_chunk": True}, TypeError, "attention_chunk: expected an int"),
        ({"attention_chunk": 2.0}, TypeError, "attention_chunk: expected an int .*got float"),
        ({"window": (pyfa.Edge(1.5), 2)}, ValueError, "window: expected two integers"),
        ({"window": (pyfa.Edge(None), 2)}, ValueError, "window: expected two integers"),
        ({"window": (1.0, 2)}, ValueError, "window: expected two integers"),
        ({"attention_chunks": 2}, TypeError, "did you mean 'attention_chunk'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    q = torch.zeros(1, 3, 1, 4)
    pyfa.attention(q, q, q)
    with pytest.raises(error, match=message):
        pyfa.attention(q, q, q, **options)
    with pytest.raises(error, match=message):
        pyfa.attention_kvcache(q, q, q, **options)


def test_explain_says_them() -> None:
    q = torch.zeros(1, 3, 1, 4)
    text = str(pyfa.explain(q, q, q, attention_chunk=2, window=(7, -3)))
    assert "window=(7, -3), attention_chunk=2" in text
    assert "window=(-3, None)" in str(pyfa.explain(q, q, q, window=(-3, None)))
