"""torchtitan's models on pyfa: an inner attention for its configs.

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = PyfaAttention.Config()

``PyfaAttention`` replaces ``VarlenAttention`` and also accepts packed documents. It keeps the dtype
of the queries, and runs on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.utils import is_in_batch_invariant_mode
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from .. import api

__all__ = ["PyfaAttention"]


class PyfaAttention(VarlenAttention):  # type: ignore[misc]  # not checked
    """``VarlenAttention``, computed by ``pyfa.attention_varlen``."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any) -> None:
        Module.__init__(
            self
        )  # VarlenAttention's own would choose a flash-attention for the process
        self.window_size = config.window_size

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute attention of q, k and v (B, L, H, D), with document boundaries from
        ``attention_masks``. ``out_transform`` gets the output and the LSE (B, L, H)."""
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                f"attention_masks: expected VarlenMetadata; got {type(attention_masks).__name__}"
            )
        left, right = self.window_size
        found: Any = api.attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            attention_masks.cu_seq_q, attention_masks.cu_seq_k,
            attention_masks.max_q, attention_masks.max_k,
            causal=right == 0, window=(left, right), scale=scale,
            batch_invariant=is_in_batch_invariant_mode(), return_lse=out_transform is not None,
        )  # fmt: skip
        if out_transform is None:
            return found.view(*q.shape[:3], v.shape[-1])  # type: ignore[no-any-return]
        out, lse = found
        out = out.view(*q.shape[:3], v.shape[-1])
        return out_transform(out, lse.transpose(0, 1).reshape(q.shape[:3]))
