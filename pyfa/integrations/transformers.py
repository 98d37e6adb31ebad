"""transformers' models on pyfa: ``attn_implementation="pyfa"``.

    from pyfa.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pyfa")

``register`` adds two functions to transformers, one for masks and one for attention.

- No mask is allocated for causal attention, sliding windows, padding on either side, or a static
  cache that is not full. Other masks are boolean tensors (B, 1, queries, keys), for example for
  padding between tokens, packed sequences without ``cu_seq_lens_q``, chunks and bidirectional
  blocks.
- As with transformers' own flash attention, a layer's window is its ``sliding_window``.
- The output for padding tokens is meaningless; other tokens never see them. A fully masked row
  gives 0, whereas ``eager`` gives the mean of the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from .. import _torch, api

__all__ = ["attention", "make_mask", "register"]


def register(name: str = "pyfa", attend: Callable[..., torch.Tensor] | None = None) -> None:
    """Make ``attn_implementation=name`` known to every transformers model in this process.

    ``attend`` is called instead of ``pyfa.attention``. For context parallelism, pass
    ``pyfa.distributed.ring_attention``, or ``functools.partial(ring_attention, mesh=mesh)``, and
    call the model with this rank's part of the tokens and their ``position_ids``. Causal masks,
    sliding windows and sinks then apply to the whole sequence. With ``attend``, padding and caches
    are not implemented.
    """
    if attend is None:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, make_mask)
    else:
        AttentionInterface.register(name, functools.partial(_attention_in_parts, attend))
        AttentionMaskInterface.register(name, _no_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query (B, H, Sq, D), key (B, Hk, Sk, D) and value (B, Hk, Sk, Dv).

    ``attention_mask`` is the result of ``make_mask``, or a mask (B | 1, H | 1, Sq | 1, Sk), boolean
    or added to the scores. ``position_bias`` (B | 1, H, Sq, Sk) is also added. ``s_aux`` (H,) are
    sinks. ``cu_seq_lens_q``, ``cu_seq_lens_k`` and their maximum lengths mark the packed sequences
    in a batch of one; the mask is then ignored. Weights are never returned.

    Returns (out (B, Sq, H, Dv), None). Raises the same errors as ``pyfa.attention``, and
    ``NotImplementedError`` for the paged cache of continuous batching.
    """
    if cache is not None:
        raise NotImplementedError(
            "cache: continuous batching with a paged cache runs on pyfa through `pyfa hub export` "
            "and attn_implementation='flash_attention_2'; use that, or generate()"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    shared: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    local = _by_position(module, is_causal, sliding_window)
    out: Any
    if not (
        cu_seq_lens_q is None
        or cu_seq_lens_k is None
        or max_length_q is None
        or max_length_k is None
    ):
        flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        out = api.attention_varlen(
            flat_q, flat_k, flat_v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), int(max_length_q),
            int(max_length_k), dropout_p=dropout, **local, **shared,
        )  # fmt: skip
        return out.unflatten(0, q.shape[:2]), None
    inputs = (q, k, v, s_aux, position_bias)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    bias = None
    if attention_mask is None:
        pass
    elif attention_mask.dtype == torch.int32:
        first, end = attention_mask[:, 0, 0].unbind(-1)
        if not trained and not dropout and position_bias is None:
            out = api.attention_kvcache(
                q, k, v, cache_seqlens=end.contiguous(), cache_leftpad=first.contiguous(),
                **local, **shared,
            )  # fmt: skip
            return out, None
        if trained:  # all rows of the cache are filled (``make_mask``)
            bias = (torch.arange(k.shape[1], device=k.device) >= first[:, None])[:, None, None]
        else:
            bias, local = _seen(first, end, q.shape[1], k.shape[1], **local), {}
    else:
        # Complete: it says all that position says, and is cut as it is for a longer cache.
        bias, local = attention_mask[..., : k.shape[1]], {}
    if position_bias is not None:
        bias = _both(bias, position_bias)
    out = api.attention(q, k, v, bias=bias, dropout_p=dropout, **local, **shared)
    return out, None


def _attention_in_parts(
    attend: Callable[..., torch.Tensor],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute ``attention`` with ``attend``, for this process's part of the sequences."""
    if attention_mask is not None or position_bias is not None:
        raise NotImplementedError(
            "attention_mask: with a split sequence, masks other than causal ones and sliding "
            "windows are not implemented"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attend(
        q, k, v, dropout_p=dropout, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
        **_by_position(module, is_causal, sliding_window),
    )  # fmt: skip
    return out, None


def _no_mask(
    *args: Any,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **others: Any,
) -> None:
    """Return no mask, for a part of the sequences. Raises ``NotImplementedError`` if a mask is
    needed."""
    padded = attention_mask is not None and not bool(attention_mask.all())
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if padded or chunked or q_length != kv_length:
        what = "padding" if padded else "chunks" if chunked else "a cache"
        raise NotImplementedError(
            f"attention_mask: {what} with a split sequence is not implemented"
        )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """Return the mask that ``attention`` takes, in the smallest form that expresses it.

    The mask is for ``q_length`` queries from position ``q_offset`` on and ``kv_length`` keys from
    position ``kv_offset`` on. ``attention_mask`` (B, positions) is False for padding. The result
    is

    - None, if the mask is only causal or only a window, or if it is bidirectional and
      ``attention_mask`` is None;
    - int32 (B, 1, 1, 2), if the mask is causal or a window and, in addition, there is left padding,
      or the cache has unused rows at its end. A row holds two numbers: the index of the first valid
      key, and one more than the index of the last key that the last query sees.
      (transformers passes tensors of four dimensions on unchanged.)
    - otherwise boolean (B, 1, queries | 1, keys), False where a query does not see a key.

    The function reads ``attention_mask`` and so waits for the device, except while a graph is
    traced or captured.
    """
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device,
    }  # fmt: skip
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    if mask_function is bidirectional_mask_function and not use_vmap:
        return None if padding is None else padding[:, None, None]
    if local_size is None:
        # For one query and a static cache it is forbidden only because others would have to read
        # values, which a compiled step cannot.
        compiled = q_length == 1 and isinstance(q_offset, torch.Tensor)
        skip = allow_is_causal_skip or compiled
        as_positions = skip and mask_function is causal_mask_function
    else:
        # A window or a chunk. That no other mask is mixed in is what the permission to skip says.
        chunk = getattr(config, "attention_chunk_size", None)
        sliding = chunk is None and getattr(config, "sliding_window", None) == local_size
        as_positions = allow_is_causal_skip and sliding
    end = q_offset + q_length - kv_offset
    whole = isinstance(end, int) and end == kv_length
    # If gradients are needed, keys that are not filled yet cannot be left out.
    if use_vmap or not as_positions or (torch.is_grad_enabled() and not whole):
        return _complete(arguments)
    if padding is None:
        first = torch.zeros(batch_size, dtype=torch.int32, device=device)
    else:
        found = None if _is_traced(padding) else _first_keys(padding, end, q_length)
        if found is None:
            return _complete(arguments)
        first, anywhere = found
        whole = whole and not anywhere
    if whole:
        return None
    ends = torch.as_tensor(end, device=device).int().expand(batch_size)
    return torch.stack([first, ends], -1)[:, None, None]


def _by_position(
    module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None
) -> dict[str, Any]:
    """Return pyfa's arguments for the mask. A window counts the query itself; if not causal, it
    counts keys on both sides."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sliding_window is None:
        return {"causal": causal}
    return {"causal": causal, "window": (sliding_window - 1, sliding_window - 1)}


def _seen(
    first: torch.Tensor,
    end: torch.Tensor,
    rows: int,
    keys: int,
    causal: bool,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return which keys each row sees, (B, 1, rows, keys): the last row is at position ``end`` − 1,
    and valid keys begin at ``first``, both (B,)."""
    key = torch.arange(keys, device=first.device)
    first, end = first[:, None, None], end[:, None, None]
    row = end - rows + torch.arange(rows, device=first.device)[:, None]
    left, right = window or (keys, keys)
    last = torch.minimum(end - 1, row + (0 if causal else right))
    return ((key >= first) & (key >= row - left) & (key <= last))[:, None]


def _both(bias: torch.Tensor | None, position_bias: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return position_bias.masked_fill(~bias, -torch.inf)
    return position_bias + bias


def _complete(arguments: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = sdpa_mask(**arguments, allow_is_causal_skip=False)
    return mask


def _is_traced(x: torch.Tensor) -> bool:
    if _torch.is_tracing():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _first_keys(
    padding: torch.Tensor, end: int | torch.Tensor, q_length: int
) -> tuple[torch.Tensor, bool] | None:
    """Return the first key (B,) int32 of each sequence, and whether one is not 0; None if keys
    between it and ``end`` are masked.

    If all keys are new, as in training, padding after the last token need not be masked: only
    padding queries see it.
    """
    position = torch.arange(padding.shape[1], device=padding.device)
    first = padding.int().argmax(-1)
    last = padding.shape[1] - 1 - padding.flip(-1).int().argmax(-1)
    all_new = torch.as_tensor(end == q_length, device=padding.device)
    stop = torch.where(all_new, last + 1, end)
    inside = (position >= first[:, None]) & (position < stop[:, None])
    fits = torch.where(position < end, padding == inside, True).all() & padding.any(-1).all()
    fits_all, most = torch.stack([fits.long(), first.max()]).tolist()
    return (first.int(), most > 0) if fits_all else None
