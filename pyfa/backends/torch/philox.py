"""Dropout bits for a tile of scores: Philox4x32-7 in int64 tensors, on any device.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 7


def keep(
    seed: torch.Tensor,
    p: float,
    keys: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    batches: torch.Tensor,
) -> torch.Tensor:
    """Return which probabilities are kept: bool, with the broadcast shape of the four index
    tensors.

    ``keys`` varies along the last dimension only; ``seed`` is one int64.
    """
    # Draws are made per key rather than per group of four: four times the work, no gather.
    c0, c1, c2, c3 = torch.broadcast_tensors(keys >> 2, rows, heads, batches)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # int64 products wrap, so their upper half is masked after the arithmetic shift.
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c2 = ((product1 >> 32) & _LOW) ^ c1 ^ k0, ((product0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    lane = keys & 3
    draw = torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))
    return draw < int((1.0 - p) * 2**32)
