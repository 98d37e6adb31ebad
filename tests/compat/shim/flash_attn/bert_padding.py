"""From padded sequences to packed ones and back, with gradients."""

from __future__ import annotations

import torch


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Of hidden_states (B, S, …) the rows that attention_mask (B, S) marks: (total, …).

    Also their indices in (B·S), the offsets of the sequences (B+1,) int32, the longest length and
    all lengths (B,) int32.
    """
    indices = attention_mask.flatten().nonzero()[:, 0]
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """The inverse: (total, …) to (batch, seqlen, …), 0 where nothing was."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
