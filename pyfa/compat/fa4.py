"""flash-attention 4's interface (``from flash_attn.cute import …``), implemented with pyfa.

    from pyfa.compat.fa4 import flash_attn_func

Signatures, defaults, return values and conventions are those of ``flash_attn.cute``, and of
``flash_attn_combine`` and ``get_scheduler_metadata`` in ``flash_attn.cute.interface``:

- Every call returns (out, lse). With ``return_lse`` lse is differentiable; otherwise it is None.
  (In flash-attention lse has no gradient, and is also returned if an input requires one.)
- In ``window_size`` only None means unlimited; −1 is an ordinary bound.
- ``learnable_sink`` (H,) is float16, bfloat16 or float32 and has a gradient. The LSE includes it.
- Wrong arguments raise ``ArgumentError``, a ``RuntimeError``, with flash-attention's argument
  names.

pyfa supports more than flash-attention, as in ``fa2``. ``score_mod`` and ``mask_mod`` are plain
Python functions; pyfa derives their gradients. ``qv`` is as in ``fa3``.

Accepted and ignored: ``pack_gqa``, ``min_seqlen_k``, ``scheduler_metadata``,
``seqlen_k_per_split``, ``disable_scheduler_metadata``, ``score_mod_bwd``,
``block_sparse_tensors_bwd``.

These raise ``NotImplementedError``: ``gather_kv_indices``, mods in the CuTe DSL, mods with ``qv``,
and block-sparse tensors of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import api, request, validate
from . import query_values
from .arguments import length, natural
from .combine import combine
from .errors import ArgumentError, in_words_of, refuse
from .fa4_mods import Blocks, Lengths, Mod, pyfas_mods

__all__ = [
    "ArgumentError",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

Window = Sequence[int | None]
Result = tuple[torch.Tensor, torch.Tensor | None]

_in_their_words = in_words_of(sinks="learnable_sink")

_WHY_NOT = {
    "gather_kv_indices": "attention to a list of keys per query is not implemented here; "
    "pyfa.attention_latent supports it",
    "score_mod": "not implemented with qv",
    "mask_mod": "not implemented with qv",
    "block_sparse_tensors": "not implemented with qv or packed sequences; without them, pyfa skips "
    "blocks that a mask_mod masks",
    "virtual_batch_idx": "not implemented; parts are merged row by row",
}


@_in_their_words
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Result:
    """Compute attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    Returns (out (B, Sq, H, Dv), lse). With ``return_lse`` lse is (B, H, Sq) float32, else None.
    ``causal`` and ``window_size`` (left, right) align to the bottom right.

    Raises ``ArgumentError`` (a ``RuntimeError``) or ``TypeError`` for wrong arguments,
    ``NotImplementedError`` for the arguments that the module's docstring lists, and
    ``pyfa.UnsupportedProblem`` if no backend can run the call.
    """
    refuse_missing(gather_kv_indices=gather_kv_indices)
    shared: dict[str, Any] = {
        **_window_of(causal, window_size, mask_mod), "scale": softmax_scale,
        "softcap": softcap or 0.0, "sinks": learnable_sink, "deterministic": deterministic,
        "return_lse": return_lse,
    }  # fmt: skip
    num_splits = natural("num_splits", num_splits)
    if qv is not None:
        refuse_missing(
            score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors
        )
    elif score_mod is not None or mask_mod is not None or block_sparse_tensors is not None:
        _refuse_two_caps(softcap, score_mod)
        for name, x in (("q", q), ("k", k)):
            validate.a_tensor(name, x)
        rows, keys = (x.shape[1] if x.dim() == 4 else 0 for x in (q, k))
        lengths = Lengths(rows, keys)
        shared |= pyfas_mods(score_mod, mask_mod, aux_tensors, aux_scalars, lengths)
        if block_sparse_tensors is not None:
            shared["block_mask"] = Blocks(block_sparse_tensors, rows, keys)
    if qv is None:
        result = api.attention(q, k, v, num_splits=num_splits, **shared)
    else:
        shared["scale"] = query_values.scale_of(softmax_scale, q, v)
        q, k, v, _ = query_values.joined(q, qv, k, v)
        result = query_values.attended(request.dense(q, k, v, request.Shared(**shared), num_splits))
    return (result, None) if isinstance(result, torch.Tensor) else result


@_in_their_words
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Result:
    """Call ``flash_attn_func`` for sequences of different lengths.

    q is packed, (total_q, H, D) with ``cu_seqlens_q`` (B+1,) int32, or padded, (B, Sq, H, D). k and
    v are packed with ``cu_seqlens_k``, padded, or pages (num_pages, page_size, Hk, D) with
    ``page_table`` (B, pages) int32. With ``seqused_q`` or ``seqused_k`` (B,) int32 only the first
    rows of each sequence are used; unused queries give output 0 and LSE −inf. Maximum lengths are
    optional. Pass them if sequences are much shorter than the whole batch: calls are then faster.

    Returns (out, lse) in the layout of q: lse is (H, total_q) or (B, H, Sq), or None. Raises what
    ``flash_attn_func`` raises.
    """
    refuse_missing(gather_kv_indices=gather_kv_indices, block_sparse_tensors=block_sparse_tensors)
    padded_q = cu_seqlens_q is None
    if qv is not None:
        refuse_missing(score_mod=score_mod, mask_mod=mask_mod)
        softmax_scale = query_values.scale_of(softmax_scale, q, v)
        q, k, v, _ = query_values.joined(q, qv, k, v)
    if cu_seqlens_q is None:
        batch, rows = _padded("q", q)
        q, cu_seqlens_q, max_seqlen_q = q.flatten(0, 1), _even(batch, rows, q), rows
    if page_table is not None:
        validate.a_tensor("page_table", page_table)
        if cu_seqlens_k is not None:
            validate.wrong("cu_seqlens_k", "None with page_table (seqused_k has lengths)", "both")
        room = page_table.shape[-1] * k.shape[1]
        if seqused_k is None:
            seqused_k = page_table.new_full(page_table.shape[:1], room)
        max_seqlen_k = room if max_seqlen_k is None else max_seqlen_k
    elif cu_seqlens_k is None:
        batch_k, max_seqlen_k = _padded("k", k)
        _padded("v", v)
        cu_seqlens_k = _even(batch_k, max_seqlen_k, k)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    # Bounds, where they are not known: reading the offsets would wait for the device.
    longest_q = q.shape[0] if max_seqlen_q is None else length(max_seqlen_q)
    longest_k = k.shape[0] if max_seqlen_k is None else length(max_seqlen_k)
    given = {}
    if score_mod is not None or mask_mod is not None:
        _refuse_two_caps(softcap, score_mod)
        begins_k = None if page_table is not None else cu_seqlens_k
        info = Lengths(
            _used(seqused_q, cu_seqlens_q), _used(seqused_k, cu_seqlens_k), cu_seqlens_q, begins_k
        )
        given = pyfas_mods(score_mod, mask_mod, aux_tensors, aux_scalars, info)
    lengths: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": longest_q, "max_seqlen_k": longest_k,
        "seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table,
        "num_splits": natural("num_splits", num_splits),
    }  # fmt: skip
    shared: dict[str, Any] = {
        **_window_of(causal, window_size, mask_mod), "scale": softmax_scale,
        "softcap": softcap or 0.0, "sinks": learnable_sink, "deterministic": deterministic,
        "return_lse": return_lse, **given,
    }  # fmt: skip
    if qv is None:
        result = api.attention_varlen(q, k, v, **lengths, **shared)
    else:
        asked = request.varlen(q, k, v, request.Shared(**shared), **lengths)
        result = query_values.attended(asked)
    out, lse = (result, None) if isinstance(result, torch.Tensor) else result
    if padded_q:
        out = out.unflatten(0, (batch, rows))
        lse = None if lse is None else lse.unflatten(1, (batch, rows)).transpose(0, 1)
    return out, lse


@_in_their_words
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> Result:
    """Merge attention over parts of the keys into attention over all of them: (out, lse).

    ``out_partial`` (splits, B, S, H, D) and ``lse_partial`` (splits, B, S, H), or packed
    (splits, total, H, D) and (splits, total, H), are float32. Returns out in ``out_dtype``
    (float32 by default), and the LSE (B, S, H) or (total, H), None without ``return_lse``. With
    ``out``, the output is written into this tensor. ``cu_seqlens`` and ``seqused`` are ignored,
    because rows are merged independently.
    """
    refuse_missing(virtual_batch_idx=virtual_batch_idx)
    merged, lse = combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: bool | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> None:
    """Return None, which ``flash_attn_varlen_func`` accepts. pyfa needs no metadata, because its
    kernels read the lengths themselves."""


def refuse_missing(**given: object) -> None:
    """Raise ``NotImplementedError`` if the call has an argument that is not implemented."""
    for name, value in given.items():
        refuse(name, value, _WHY_NOT[name])


def pyfas_window(window_size: Window, causal: bool) -> tuple[validate.Edge | None, ...] | None:
    """Return ``window_size`` as pyfa's window.

    In flash-attention 4 only None means unlimited, −1 is an ordinary bound, and a window that
    contains no key is ignored.
    """
    if len(window_size) != 2:
        validate.wrong("window_size", "(left, right)", window_size)
    left, right = window_size
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None
    if left is right is None:
        return None
    return tuple(None if edge is None else validate.Edge(edge) for edge in (left, right))


def _window_of(causal: bool, window_size: Window, mask_mod: Mod | None) -> dict[str, Any]:
    """Return pyfa's ``causal`` and ``window``. With a mask_mod both are ignored."""
    window = pyfas_window(window_size, causal)
    if mask_mod is not None:
        return {"causal": False, "window": None}
    return {"causal": causal, "window": window}


def _refuse_two_caps(softcap: float, score_mod: Mod | None) -> None:
    if softcap and score_mod is not None:
        validate.wrong("softcap", "0 with a score_mod, which can cap the score itself", softcap)


def _used(lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the lengths of packed sequences."""
    if lengths is not None:
        return lengths
    assert offsets is not None
    return offsets.diff()


def _padded(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Return batch and length of x (B, S, heads, head_dim)."""
    validate.a_tensor(name, x)
    if x.dim() != 4:
        offsets = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        validate.wrong(name, f"shape (batch, seqlen, heads, head_dim) without {offsets}", x)
    return x.shape[0], x.shape[1]


def _even(batch: int, rows: int, x: torch.Tensor) -> torch.Tensor:
    """Return the offsets of ``batch`` sequences of ``rows`` each."""
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows
