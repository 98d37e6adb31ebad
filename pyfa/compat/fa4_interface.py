"""Private names that other packages import from flash-attention 4 (``flash_attn.cute.interface``).

Arguments that choose tiles and threads are accepted and ignored, because pyfa's plan decides them.
Arguments that ``fa4`` does not support are not supported here, either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import request, validate
from . import fa4, raw
from .errors import in_words_of, refuse
from .fa4 import *  # noqa: F403  # the module has the public functions too
from .fa4_blocks import transposed
from .fa4_mods import Blocks, Lengths, pyfas_mods

__all__ = [*fa4.__all__, "_flash_attn_bwd", "_flash_attn_fwd", "_validate_head_dims"]


def _validate_head_dims(
    head_dim: int, head_dim_v: int, compute_capability: int, alignment: int
) -> None:
    """Raise ``AssertionError`` for head dims that pyfa does not support on any GPU."""
    for name, size, most in (
        ("head_dim", head_dim, validate.MAX_HEAD_DIM),
        ("head_dim_v", head_dim_v, validate.MAX_HEAD_DIM_V),
    ):
        if not 1 <= size <= most:
            raise AssertionError(f"{name}: expected 1 to {most}; got {size}")


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Return (out, lse or None, None, None), without a gradient. The results are written into the
    arguments ``out`` and ``lse`` unless these are None."""
    for name, given in (("q_descale", q_descale), ("k_descale", k_descale)):
        refuse(name, given, "float8 is in version 3's functions and in pyfa.attention")
    refuse("v_descale", v_descale, "float8 is in version 3's functions and in pyfa.attention")
    shared: dict[str, Any] = {
        "qv": qv, "gather_kv_indices": gather_kv_indices, "softmax_scale": softmax_scale,
        "causal": causal, "window_size": (window_size_left, window_size_right),
        "learnable_sink": learnable_sink, "softcap": softcap or 0.0, "num_splits": num_splits,
        "score_mod": score_mod, "mask_mod": mask_mod, "aux_tensors": aux_tensors,
        "aux_scalars": aux_scalars, "block_sparse_tensors": block_sparse_tensors,
        "return_lse": return_lse or lse is not None,
    }  # fmt: skip
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    with torch.no_grad():
        if all(x is None for x in lengths):
            result, sums = fa4.flash_attn_func(q, k, v, **shared)
        else:
            result, sums = fa4.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q,
                seqused_k=seqused_k, page_table=page_table, **shared,
            )  # fmt: skip
        result = result if out is None else out.copy_(result)
        if sums is not None and lse is not None:
            sums = lse.copy_(sums)
    return result, sums, None, None


@in_words_of(sinks="learnable_sink")
def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    dlse: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv): packed with both ``cu_seqlens``, else dense. A gradient is written into
    the argument for it unless this is None.

    Blocks of ``block_sparse_tensors`` are listed for each block of keys, as version 4 has them.
    ``out`` and ``lse`` may come from attention over more keys. ``dlse`` and ``learnable_sink`` are
    not supported here; the public functions support their gradients.
    """
    refuse("dlse", dlse, "its gradient flows through flash_attn_func")
    refuse("learnable_sink", learnable_sink, "its gradient flows through flash_attn_func")
    given: dict[str, Any] = {}
    if score_mod is not None or mask_mod is not None or block_sparse_tensors is not None:
        packed = cu_seqlens_q is not None or seqused_q is not None or seqused_k is not None
        refuse("score_mod", packed or None, "its gradient flows through flash_attn_varlen_func")
        lengths = Lengths(q.shape[1], k.shape[1])
        given = dict(pyfas_mods(score_mod, mask_mod, aux_tensors, aux_scalars, lengths))
        if block_sparse_tensors is not None:
            given["block_mask"] = Blocks(transposed(block_sparse_tensors), q.shape[1], k.shape[1])
        if mask_mod is not None:
            causal, window_size_left, window_size_right = False, None, None
    shared = request.Shared(
        **given,
        causal=causal,
        window=fa4.pyfas_window((window_size_left, window_size_right), causal),
        scale=softmax_scale,
        softcap=softcap or 0.0,
        deterministic=deterministic,
    )
    with torch.no_grad():
        rows = raw.Rows(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        )
        return rows.backward(shared, dout, out, lse, (dq, dk, dv))
