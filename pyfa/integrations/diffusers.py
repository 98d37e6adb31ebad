"""diffusers' models on pyfa: a backend of its attention dispatcher.

    from pyfa.integrations import diffusers as integration
    integration.register()
    pipeline.transformer.set_attention_backend("pyfa")

``register`` adds the name ``pyfa`` to diffusers' list and changes nothing else. Masks (boolean, or
added to the score), causal masks (aligned to the top left, as in PyTorch), windows, grouped heads
and dropout are supported, with gradients. Context parallelism (ring and Ulysses) works as with
diffusers' own backends: without a mask and without dropout. Tested with diffusers 0.42.

UNets call PyTorch's attention, not the dispatcher; a processor for their layers changes that:

    unet.set_attn_processor(integration.Processor())
    unet.set_attention_backend("pyfa")
"""

from __future__ import annotations

import enum
import functools
import importlib
from typing import Any

import torch

from .. import api, request
from ..compat import raw
from ..compat.arguments import window

__all__ = ["NAME", "Processor", "register"]

NAME = "pyfa"

_NEEDED = (
    "AttentionBackendName", "_AttentionBackendRegistry", "_templated_context_parallel_attention",
)  # fmt: skip


def register() -> None:
    """Add pyfa to the backends that ``set_attention_backend`` accepts.

    May be called more than once. Raises ``ImportError`` without diffusers, or if its dispatcher is
    not the one that this module is written for.
    """
    dispatcher = importlib.import_module("diffusers.models.attention_dispatch")
    missing = [name for name in _NEEDED if not hasattr(dispatcher, name)]
    if missing:
        version = getattr(importlib.import_module("diffusers"), "__version__", "?")
        raise ImportError(f"diffusers {version} has no {', '.join(missing)}; 0.42 has")
    member = _member(dispatcher.AttentionBackendName)
    registry = dispatcher._AttentionBackendRegistry
    registry.register(member, supports_context_parallel=True)(_attention)


class Processor:
    """Computes the same as diffusers' ``AttnProcessor2_0``, on the attention backend that is set.

    One object serves all layers of a model: ``set_attn_processor(Processor())``.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of the layer ``attn``, a ``diffusers`` ``Attention``."""
        dispatcher = importlib.import_module("diffusers.models.attention_dispatch")
        x = hidden_states
        if attn.spatial_norm is not None:
            x = attn.spatial_norm(x, temb)
        if hidden_states.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        keys = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            keys = attn.norm_encoder_hidden_states(keys)
        mask = attention_mask
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, keys.shape[1], len(keys))
            mask = mask.view(len(keys), attn.heads, -1, mask.shape[-1])
        made = (attn.to_q(x), attn.to_k(keys), attn.to_v(keys))
        q, k, v = (each.unflatten(-1, (attn.heads, -1)) for each in made)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        out = dispatcher.dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )  # fmt: skip
        linear, dropout = attn.to_out
        out = dropout(linear(out.flatten(2).to(q.dtype)))
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            out = out + hidden_states
        result: torch.Tensor = out / attn.rescale_output_factor
        return result


def _member(names: type[enum.Enum]) -> enum.Enum:
    """Return the member ``pyfa`` of diffusers' closed enumeration of strings; add it if it is
    missing."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member: Any = str.__new__(names, NAME)  # type: ignore[type-var]
    member._name_, member._value_ = NAME.upper(), NAME
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    return names(NAME)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Compute attention for the dispatcher: q, k and v are (B, S, H, D); the LSE is (B, H, S)."""
    edges = window(window_size)
    if _parallel_config is not None:
        dispatcher = importlib.import_module("diffusers.models.attention_dispatch")
        return dispatcher._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=functools.partial(_forward, window=edges),
            backward_op=functools.partial(_backward, window=edges),
            _parallel_config=_parallel_config,
        )  # fmt: skip
    bias, causal = _mask(attn_mask, is_causal, query, key)
    return api.attention(
        query, key, value, bias=bias, causal=causal, window=edges, scale=scale,
        dropout_p=dropout_p, return_lse=return_lse,
    )  # fmt: skip


def _forward(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
    *,
    window: tuple[int, int] | None,
) -> Any:
    """Compute one block of context parallelism; the LSE is (B, S, H) here."""
    if attn_mask is not None or dropout_p:
        raise ValueError(
            "pyfa in diffusers' context parallelism supports neither attn_mask nor dropout_p"
        )
    with torch.no_grad():
        out, lse = api.attention(
            query, key, value, causal=is_causal, window=window, scale=scale, return_lse=True
        )
    lse = lse.transpose(1, 2)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pyfa = request.Shared(causal=is_causal, window=window, scale=scale)
    return (out, lse) if return_lse else out


def _backward(
    ctx: Any,
    grad_out: torch.Tensor,
    *unused: Any,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of one block. ``out`` and ``lse`` may be of all keys; tensors that are
    None are those of the forward."""
    given = (query, key, value, out, lse)
    q, k, v, whole, sums = (
        kept if x is None else x for x, kept in zip(given, ctx.saved_tensors, strict=True)
    )
    with torch.no_grad():
        asked = request.dense(q, k, v, ctx.pyfa)
        sums = sums.transpose(1, 2).float()
        return raw.backward(asked, grad_out.to(q.dtype), whole, sums, (None, None, None))


def _mask(
    attn_mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor | None, bool]:
    """Return pyfa's bias, and whether to use pyfa's causal mask."""
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask[:, None, None]  # (B, Sk): which keys there are
    rows, keys = query.shape[1], key.shape[1]
    if not is_causal or rows == keys:
        return attn_mask, is_causal
    # PyTorch's causal mask begins at the first key, pyfa's ends at the last.
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()[None, None]
    if attn_mask is None:
        return seen, False
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen, False
    return attn_mask.masked_fill(~seen, -torch.inf), False
