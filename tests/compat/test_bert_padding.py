"""Packing padded sequences and back, as ``flash_attn.bert_padding``."""

from __future__ import annotations

import pytest
import torch

from pyfa.compat import bert_padding

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    rows, indices, offsets, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert offsets.tolist() == [0, 2, 2, 5]
    assert offsets.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (3, [2, 0, 3])
    back = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    (dx,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(dx, MASK[..., None, None].expand_as(x).float())


def test_allocated_and_unused_rows_are_packed_too() -> None:
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    x = torch.arange(12.0).view(3, 4, 1)
    rows, indices, offsets, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert rows[:, 0].tolist() == indices.tolist() == [0, 1, 2, 4, 9, 10, 11]
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 3, 4, 7], 3, [2, 0, 3])


def test_several_sequences_in_a_row() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    x = torch.arange(8.0).view(2, 4, 1)
    rows, indices, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, lengths
    )
    assert rows[:, 0].tolist() == indices.tolist() == [0, 1, 2, 4, 5, 6]
    assert (offsets.tolist(), longest) == ([0, 2, 3, 6], 3)
    assert offsets.dtype == torch.int32


def test_rows_by_index() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    indices = torch.tensor([2, 0])
    rows, whole = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, bert_padding.index_first_axis(x, indices))
    (dx,) = torch.autograd.grad(rows.sum() + whole.sum(), x)
    assert dx[:, 0].tolist() == [2.0, 1.0, 2.0, 1.0]
    put = bert_padding.index_put_first_axis(rows, indices, 4)
    assert torch.equal(put[indices], rows)
    assert not bool(put[[1, 3]].any())


X = torch.arange(120.0).view(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("pattern", "sizes", "expected"),
    [
        # What verl asks for, and then each kind of change alone.
        ("b s ... -> (b s) ...", {}, X.view(6, 4, 5)),
        ("b s h d -> (b s) (h d)", {}, X.view(6, 20)),
        ("c b s ... -> (b s) c ...", {}, X.permute(1, 2, 0, 3).reshape(12, 2, 5)),
        ("... d -> d ...", {}, X.permute(3, 0, 1, 2)),
        ("b s (x y) d -> b y s (d x)", {"x": 2}, X.view(2, 3, 2, 2, 5).permute(0, 3, 1, 4, 2)
         .reshape(2, 2, 3, 10)),
        ("b s h d -> b 1 s (h d)", {}, X.view(2, 1, 3, 20)),
        ("(a b) ... -> a b (...)", {"a": 1}, X.view(1, 2, 60)),
    ],
)  # fmt: skip
def test_rearrange(pattern: str, sizes: dict[str, int], expected: torch.Tensor) -> None:
    assert torch.equal(bert_padding.rearrange(X, pattern, **sizes), expected)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("b s -> s b", {}),
        ("b s h d e ... -> b", {}),
        ("b s h d", {}),
        ("b s h d -> b s h", {}),
        ("b (s t) h d -> b s t h d", {}),
        ("b (s t) h d -> b s t h d", {"s": 2}),
        ("b s h d -> b s h [d]", {}),
        ("b s 1 d -> b s d", {}),
    ],
)
def test_rearrange_that_does_not_fit(pattern: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        bert_padding.rearrange(X, pattern, **sizes)
