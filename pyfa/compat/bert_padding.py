"""Conversion between padded and packed sequences, with gradients (``flash_attn.bert_padding``)."""

from __future__ import annotations

import torch

from .rearrange import rearrange

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows ``indices`` (n,) of x (rows, …), as (n, …)."""
    return x[indices]


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Return a tensor (first_axis_dim, …) that holds ``values`` (n, …) in the rows ``indices``
    (n,), and 0 elsewhere."""
    whole = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return whole.index_copy(0, indices, values)


def index_first_axis_residual(
    x: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows ``indices`` (n,) of x (rows, …), and x itself for a residual connection."""
    return x[indices], x


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the tokens of hidden_states (B, S, …), without padding, as packed rows (total, …).

    ``attention_mask`` (B, S), bool or int, is true for tokens in use. ``unused_mask`` (B, S) is
    true for tokens that are allocated but not in use; these tokens are returned, too. The other
    results are the rows' indices in (B·S), the offsets of the sequences (B+1,) int32, the largest
    allocated length, and the used lengths (B,) int32. The function waits for the device.
    """
    marked = attention_mask if unused_mask is None else attention_mask + unused_mask
    allocated = marked.sum(-1, dtype=torch.int32)
    indices = marked.flatten().nonzero()[:, 0]
    return (
        hidden_states.flatten(0, 1)[indices],
        indices,
        _offsets(allocated),
        int(allocated.max()),
        attention_mask.sum(-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Apply ``unpad_input`` to a batch whose rows each hold several sequences, one after the other.

    Row b of ``attention_mask_in_length`` (B, S) int begins with the lengths of the sequences in row
    b of the batch; the rest is 0. Returns the packed tokens, their indices in the flattened batch
    (B·S), the offsets of all sequences (sequences+1,) int32, and the largest length.
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    position = torch.arange(attention_mask_in_length.shape[1], device=used.device)
    indices = (position < used).flatten().nonzero()[:, 0]
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, _offsets(lengths), int(lengths.max())


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Invert ``unpad_input``: convert (total, …) to (batch, seqlen, …), with 0 in unused rows."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
