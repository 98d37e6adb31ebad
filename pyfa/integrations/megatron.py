"""Megatron-LM's layers on pyfa: a core attention for its layer specs.

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PyfaAttention

It needs Megatron-Core, but not TransformerEngine.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from .. import api

__all__ = ["PyfaAttention"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class PyfaAttention(DotProductAttention):  # type: ignore[misc]  # untyped where it matters
    """Replaces ``DotProductAttention`` and stores no matrix of scores. Supports packed sequences
    (``thd``).

    A layer of mask type ``causal`` ignores ``attention_mask``, as in TransformerEngine.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Compute attention of query (Sq, B, H, D), key and value (Sk, B, Hk, D); return
        (Sq, B, H·D). Packed tensors are (tokens, H, D)."""
        if attention_bias is not None:
            raise NotImplementedError("attention_bias: not supported by pyfa in Megatron")
        kind = attn_mask_type or self.attn_mask_type
        causal = kind in _CAUSAL
        softmax = self.scale_mask_softmax
        shared: dict[str, Any] = {
            "causal": causal,
            "window": None if softmax.window_size is None else tuple(softmax.window_size),
            "scale": self.softmax_scale * (softmax.scale or 1.0),
            "sinks": self.softmax_offset,
            "dropout_p": self.attention_dropout.p if self.training else 0.0,
        }
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, shared)
        if attention_mask is not None and kind != AttnMaskType.causal:
            shared["bias"] = ~attention_mask  # Megatron's masks are True where nothing is seen
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        with self._seeds(shared["dropout_p"]):
            out: torch.Tensor = api.attention(q, k, v, **shared)  # type: ignore[assignment]
        return out.transpose(0, 1).flatten(2)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        given: Any,
        shared: dict[str, Any],
    ) -> torch.Tensor:
        if given.qkv_format != "thd":
            raise NotImplementedError(f"qkv_format: expected 'thd'; got {given.qkv_format!r}")
        if given.cu_seqlens_q_padded is not None or given.cu_seqlens_kv_padded is not None:
            raise NotImplementedError("cu_seqlens_q_padded: not supported by pyfa in Megatron")
        with self._seeds(shared["dropout_p"]):
            out: torch.Tensor = api.attention_varlen(  # type: ignore[assignment]
                query, key, value, given.cu_seqlens_q.int(), given.cu_seqlens_kv.int(),
                int(given.max_seqlen_q), int(given.max_seqlen_kv), **shared,
            )  # fmt: skip
        return out.flatten(1)

    def _seeds(self, dropout_p: float) -> contextlib.AbstractContextManager[None]:
        """Return Megatron's generator for dropout, which ranks of tensor parallelism do not
        share."""
        if not dropout_p or self.config.sequence_parallel:
            return contextlib.nullcontext()
        forked: contextlib.AbstractContextManager[None]
        forked = tensor_parallel.get_cuda_rng_tracker().fork()
        return forked
