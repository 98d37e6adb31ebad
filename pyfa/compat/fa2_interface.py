"""What others take from inside flash-attention 2 (``flash_attn.flash_attn_interface``)."""

from __future__ import annotations

import torch

from .. import api
from . import fa2
from .arguments import length, window
from .errors import in_words_of
from .fa2 import *  # noqa: F403  # the module has the public functions too

__all__ = [*fa2.__all__, "USE_TRITON_ROCM", "_flash_attn_varlen_forward", "_get_block_size_n"]

# There is no compiled extension with raw entry points: flash-attention says so by this.
USE_TRITON_ROCM = True


def _get_block_size_n(
    device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Keys in a tile, to whose running maximum S_dmask is relative: pyfa's is to the row's."""
    return 1 << 30


@in_words_of(page_table="block_table")
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) as ``flash_attn_varlen_func``'s, of which ``seqused_k`` (B,) keys are used."""
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for packed queries")
    return api.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k),
        seqused_k=seqused_k, page_table=block_table, causal=causal,
        window=window((window_size_left, window_size_right)), scale=softmax_scale,
        softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p, return_lse=True,
    )  # type: ignore[return-value]  # fmt: skip  # with return_lse it is a pair
