"""flash-attention 3's compiled extension (``flash_attn_3._C``): ``torch.ops.flash_attn_3``.

Importing this module registers ``fwd``, ``bwd``, ``fwd_combine`` and ``get_scheduler_metadata``
with the schemas of flash-attention 3. It is for the packages that ``pyfa compat install`` writes.
``bwd`` returns rowsum(dO∘O), the LSE times log2(e), and three empty tensors in place of
flash-attention's accumulators. The last dimension of the first two results is Sq, or total_q +
128·B for packed sequences, rounded up to a multiple of 128. 128 zeros follow each packed sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import request
from . import fa3, raw
from .arguments import window
from .errors import in_words_of

__all__: list[str] = []

_LIBRARY = torch.library.Library("flash_attn_3", "FRAGMENT")

_in_their_words = in_words_of(descale="q_descale", cache_seqlens="seqused_k")

_SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
    "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor",
)


@_in_their_words
@torch.no_grad()
def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, LSE, and two empty tensors in place of flash-attention's partial results).

    Tensors are dense or packed (``cu_seqlens_q`` and ``cu_seqlens_k``). The call runs over a cache
    if it has new keys, pages, ``kv_batch_idx``, ``leftpad_k``, rotary, or packed queries with keys
    that are not packed.
    """
    common: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": is_causal,
        "qv": q_v,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap,
    }
    cached = (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin)
    if any(x is not None for x in cached) or (cu_seqlens_q is not None and cu_seqlens_k is None):
        if seqused_q is not None or cu_seqlens_k is not None:
            raise NotImplementedError("seqused_q and cu_seqlens_k: not implemented with a cache")
        result, lse, *_ = fa3.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k,
            page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=None if cu_seqlens_q is None else max_seqlen_q,
            rotary_seqlens=seqlens_rotary, rotary_interleaved=is_rotary_interleaved,
            num_splits=num_splits, return_softmax_lse=True, **common,
        )  # fmt: skip
    else:
        rows = raw.Rows(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        )
        function = fa3.flash_attn_varlen_func if rows.has_lengths else fa3.flash_attn_func
        dense: dict[str, Any] = common | {"return_attn_probs": True, "num_splits": num_splits}
        result, lse = function(*rows.arguments, **dense)
        result, lse = rows.as_given(result), rows.lse_as_given(lse)
    return raw.copied_into(out, result), lse, q.new_empty(0, dtype=torch.float32), lse.new_empty(0)


@_in_their_words
@torch.no_grad()
def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients, and write them into those of dq, dk and dv that are not None.
    ``out`` and ``softmax_lse`` are as in ``raw.backward``."""
    if q.itemsize == 1:
        raise NotImplementedError("float8 attention has no gradient")
    shared = request.Shared(
        causal=is_causal,
        window=window((window_size_left, window_size_right)),
        scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )
    rows = raw.Rows(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    rows.backward(shared, dout, out, softmax_lse, (dq, dk, dv))
    log2 = rows.spread(softmax_lse) * math.log2(math.e)
    return rows.sums(dout, out), log2, *(q.new_empty(0, dtype=torch.float32) for _ in range(3))


def fwd_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``fa3.flash_attn_combine``."""
    return fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Return an empty int32 tensor on the device of ``seqused_k``."""
    return seqused_k.new_empty(0, dtype=torch.int32)


for _schema, _run in zip(_SCHEMAS, (fwd, bwd, fwd_combine, get_scheduler_metadata), strict=True):
    _LIBRARY.define(_schema)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_run.__name__, _run, _key)
