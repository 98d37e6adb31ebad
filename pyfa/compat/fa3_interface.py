"""Private names that other packages import from flash-attention 3 (``flash_attn_interface``).

Importing this module registers PyTorch operators under flash-attention's names,
``torch.ops.flash_attn_3``. It is for the packages that ``pyfa compat install`` writes.
"""

from __future__ import annotations

from typing import Any

import torch

from . import fa3, fa3_extension
from .fa2_interface import maybe_contiguous, round_multiple
from .fa3 import *  # noqa: F403  # the module has the public functions too
from .raw import ROUNDED, rounded

__all__ = [
    *fa3.__all__,
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_3_gpu",
    "maybe_contiguous",
    "round_multiple",
]

# flash-attention says by this that it runs without its extension.
USE_TRITON_ROCM = False

flash_attn_3_gpu = torch.ops.flash_attn_3


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
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
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call ``torch.ops.flash_attn_3.fwd`` with a gradient, for dense and packed q, k and v.

    If the call has ``out_``, the result is copied into it, too; the returned tensor is separate.
    """
    out, *rest = fa3_extension.fwd(
        q, k, v, k_new, v_new, qv, None, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size_left, window_size_right, attention_chunk, softcap, rotary_interleaved,
        scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
    if out_ is not None:
        out_.copy_(out)
    lse, out_partial, lse_partial = rest
    return out, lse.contiguous(), out_partial, lse_partial


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *options: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    packed = q.dim() == 3
    heads, lead = q.shape[-2], q.shape[:-2]
    dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
    return (
        q.new_empty((*lead, heads, v.shape[-1]), dtype=dtype),
        q.new_empty((heads, *lead) if packed else (lead[0], heads, lead[1]), dtype=torch.float32),
        q.new_empty(0, dtype=torch.float32),
        q.new_empty(0, dtype=torch.float32),
    )


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Write each gradient into dq, dk or dv, unless that argument is None. Return rowsum(dO∘O), its
    rows rounded up to 128.

    ``out`` and ``softmax_lse`` may come from attention over more keys, as in ring attention.
    """
    sums, *_ = fa3_extension.bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, sequed_q,
        sequed_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, deterministic, sm_margin,
    )  # fmt: skip
    return sums


def _backward_fake(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    given = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    heads = q.shape[-2]
    if all(x is None for x in given):
        return q.new_empty((q.shape[0], heads, rounded(q.shape[1])), dtype=torch.float32)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    total = q.shape[0] * q.shape[1] if cu_seqlens_q is None else q.shape[0]
    return q.new_empty((heads, rounded(total + ROUNDED * batch)), dtype=torch.float32)


_PARAMETERS = 34  # of _flash_attn_forward
_OFFSETS = slice(7, 14)  # cu_seqlens_q … max_seqlen_k


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v = inputs[:3]
    cu_q, cu_k, _, used_q, used_k, *ctx.longest = inputs[_OFFSETS]
    ctx.save_for_backward(q, k, v, *output[:2], cu_q, cu_k, used_q, used_k)
    ctx.has_gradient = all(x is None for x in (*inputs[3:7], *inputs[14:20])) and q.itemsize > 1
    ctx.scale, ctx.causal, ctx.left, ctx.right, _, ctx.softcap = inputs[23:29]


def _gradient(ctx: Any, dout: torch.Tensor, *unused: Any) -> tuple[Any, ...]:
    if not ctx.has_gradient:
        raise NotImplementedError("attention over a cache, and float8, have no gradient")
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k = ctx.saved_tensors
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    _flash_attn_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, *ctx.longest, *grads, ctx.scale,
        ctx.causal, ctx.left, ctx.right, ctx.softcap,
    )  # fmt: skip
    return (*grads, *(None,) * (_PARAMETERS - 3))


_flash_attn_forward.register_autograd(_gradient, setup_context=_save)
torch.library.register_fake("flash_attn_3::_flash_attn_forward", _forward_fake)
torch.library.register_fake("flash_attn_3::_flash_attn_backward", _backward_fake)
