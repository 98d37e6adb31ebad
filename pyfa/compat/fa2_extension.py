"""flash-attention 2's compiled extension (``flash_attn_2_cuda``): ``fwd``, ``varlen_fwd``, ``bwd``,
``varlen_bwd`` and ``fwd_kvcache``.

Arguments are positional. Their order is that of flash-attention 2.8. The functions record no
gradient. ``rng_state`` is (2,) int64, the dropout seed and 0. A backward with dropout needs the
``rng_state`` of its forward. ``generator`` must be None, as in flash-attention.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api, request, validate
from . import fa2, raw
from .arguments import length, window
from .errors import ArgumentError, in_words_of
from .probabilities import Packed, signed_probabilities

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

_in_their_words = in_words_of(page_table="block_table")


@_in_their_words
@torch.no_grad()
def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
    /,
) -> list[torch.Tensor]:
    """Return out (B, Sq, H, Dv), LSE (B, H, Sq), S_dmask and rng_state for q, k and v (B, S, H, D).

    S_dmask is empty unless ``return_softmax`` is set, which needs dropout. The output is written
    into the argument ``out`` unless it is None.
    """
    shared = _shared(
        generator, return_softmax, alibi_slopes, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap,
    )  # fmt: skip
    seed = _drawn(dropout_p, q)
    result, lse = api.attention(q, k, v, seed=seed, return_lse=True, **shared)
    return _results(q, k, None, result, lse, out, seed, return_softmax, shared)


@_in_their_words
@torch.no_grad()
def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
    num_splits: int = 0,
    /,
) -> list[torch.Tensor]:
    """Call ``fwd`` on packed q (total_q, H, D), k and v; the LSE is (H, total_q).

    ``seqused_k`` (B,) int32 is the number of keys of each sequence that are used. ``zero_tensors``
    has no effect: rows outside the sequences are always set to 0. ``leftpad_k`` is not supported.
    """
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for packed queries")
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k: padding on the left of packed keys")
    shared = _shared(
        generator, return_softmax, alibi_slopes, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap,
    )  # fmt: skip
    seed = _drawn(dropout_p, q)
    where = Packed(
        cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k), block_table
    )
    result, lse = api.attention_varlen(
        q, k, v, *where[:4], seqused_k=seqused_k, page_table=block_table, seed=seed,
        return_lse=True, num_splits=num_splits, **shared,
    )  # fmt: skip
    if return_softmax and seqused_k is not None:
        raise NotImplementedError("return_softmax: with seqused_k")
    return _results(q, k, where, result, lse, out, seed, return_softmax, shared)


@_in_their_words
@torch.no_grad()
def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: torch.Tensor | None,
    /,
) -> list[torch.Tensor]:
    """Return dq, dk, dv and rowsum(dO∘O) (B, H, Sq rounded up to 128). Each gradient is written
    into the argument ``dq``, ``dk`` or ``dv``, unless this argument is None.

    ``out`` and ``softmax_lse`` may come from attention over more keys, as in ring attention.
    """
    shared = _shared(
        generator, False, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap,
    )  # fmt: skip
    asked = request.dense(
        q, k, v,
        request.Shared(deterministic=deterministic, seed=_kept(dropout_p, rng_state), **shared),
    )  # fmt: skip
    grads = raw.backward(asked, dout, out, softmax_lse, (dq, dk, dv))
    return [*grads, raw.row_sums(dout, out)]


@_in_their_words
@torch.no_grad()
def varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: torch.Tensor | None,
    /,
) -> list[torch.Tensor]:
    """Do what ``bwd`` does, on packed tensors. rowsum(dO∘O) has shape (H, total_q + 128·B), with
    128 extra columns after each sequence."""
    shared = _shared(
        generator, False, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap,
    )  # fmt: skip
    asked = request.varlen(
        q, k, v,
        request.Shared(deterministic=deterministic, seed=_kept(dropout_p, rng_state), **shared),
        cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k),
    )  # fmt: skip
    grads = raw.backward(asked, dout, out, softmax_lse, (dq, dk, dv))
    columns = q.shape[0] + raw.ROUNDED * (cu_seqlens_q.shape[0] - 1)
    return [*grads, raw.packed_row_sums(dout, out, cu_seqlens_q, columns)]


@_in_their_words
def fwd_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    /,
) -> list[torch.Tensor]:
    """Return [out, LSE] of ``flash_attn_with_kvcache``. The output is copied into the
    argument ``out`` unless it is None."""
    result, lse = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, (window_size_left, window_size_right),
        softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse=True,
    )  # fmt: skip
    return [raw.copied_into(out, result), lse]


def _shared(
    generator: None,
    return_softmax: bool,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> dict[str, Any]:
    if generator is not None:
        raise RuntimeError("the RNG `generator` argument is no longer supported and must be None")
    if return_softmax and not dropout_p > 0.0:
        validate.wrong("return_softmax", "False without dropout", return_softmax)
    return {
        "causal": causal,
        "window": window((window_size_left, window_size_right)),
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
    }


def _drawn(dropout_p: float, q: torch.Tensor) -> torch.Tensor | None:
    return validate.seed(None, q.device) if dropout_p > 0.0 else None


def _kept(dropout_p: float, rng_state: torch.Tensor | None) -> torch.Tensor | None:
    if not dropout_p > 0.0:
        return None
    if rng_state is None or rng_state.shape != (2,):
        raise ArgumentError(
            f"rng_state: expected the forward's, (2,) int64, with dropout; got {rng_state}"
        )
    return rng_state[:1]


def _results(
    q: torch.Tensor,
    k: torch.Tensor,
    where: Packed | None,
    result: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor | None,
    seed: torch.Tensor | None,
    return_softmax: bool,
    shared: dict[str, Any],
) -> list[torch.Tensor]:
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    probabilities = q.new_empty(0)
    if seed is not None:
        state[:1] = seed
        if return_softmax:
            probabilities = signed_probabilities(
                q, k, where, shared["causal"], shared["window"], shared["scale"],
                shared["softcap"], shared["alibi_slopes"], shared["dropout_p"], seed,
            )  # fmt: skip
    return [raw.copied_into(out, result), fa2.their_lse(lse), probabilities, state]
