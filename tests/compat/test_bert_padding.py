"""Packing padded sequences and back, as ``flash_attn.bert_padding``; rotary by its own formula."""

from __future__ import annotations

import pytest
import torch

from pyfa.compat import bert_padding
from pyfa.compat.rotary import apply_rotary_emb

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


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    """Position by position, the rotation of a plane per pair."""
    x, angle = torch.randn(2, 3, 2, 10), torch.rand(9, 4)
    offsets = torch.tensor([0, 5])
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=offsets)
    for i in range(4):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
        turn = torch.stack([angle[:3, i], angle[5:8, i]])[..., None]
        a, b = x[..., first], x[..., second]
        torch.testing.assert_close(out[..., first], a * turn.cos() - b * turn.sin())
        torch.testing.assert_close(out[..., second], a * turn.sin() + b * turn.cos())
    assert torch.equal(out[..., 8:], x[..., 8:])
