"""Rotary position embedding in plain PyTorch (``flash_attn.layers.rotary``)."""

from __future__ import annotations

import torch

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate the first 2·R elements of each head of x (B, S, H, D) by its position.

    cos and sin are (positions, R). Row s of sequence b is at ``seqlen_offsets[b]`` + s. Pairs are
    elements 2i and 2i+1 if ``interleaved``, else i and i+R. Computed in float32.
    """
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = offsets + torch.arange(x.shape[1], device=x.device)
    turn = torch.complex(cos.float(), sin.float())[positions][:, :, None]
    head, tail = x.float().split([2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    if interleaved:
        pairs = head.unflatten(-1, (-1, 2))
    else:
        pairs = head.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    if not interleaved:
        turned = turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), tail], dim=-1).to(x.dtype)
