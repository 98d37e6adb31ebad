"""Private names that other packages import from flash-attention 2
(``flash_attn.flash_attn_interface``).

Importing this module registers PyTorch operators under flash-attention's names,
``torch.ops.flash_attn``. It is for the packages that ``pyfa compat install`` writes, on machines
without flash-attention. The operators have no gradient of their own, as in flash-attention: their
callers provide one.
"""

from __future__ import annotations

from typing import Any

import torch

from . import fa2
from . import fa2_extension as flash_attn_gpu
from .fa2 import *  # noqa: F403  # the module has the public functions too
from .raw import ROUNDED, rounded

__all__ = [
    *fa2.__all__,
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_gpu",
    "maybe_contiguous",
    "round_multiple",
]

# flash-attention says by this that it runs without its extension, which ``flash_attn_gpu`` is.
USE_TRITON_ROCM = False


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x`` with a contiguous last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """Return ``x`` rounded up to a multiple of ``m``."""
    return -(-x // m) * m


def _get_block_size_n(
    device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Return the keys per tile. S_dmask is relative to the running maximum of such a tile in
    flash-attention, and to the maximum of the row in pyfa."""
    return 1 << 30


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, LSE, S_dmask, rng_state) for q, k and v (B, S, H, D)."""
    out, lse, probabilities, state = flash_attn_gpu.fwd(
        q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, return_softmax, None,
    )  # fmt: skip
    return out, lse, probabilities, state


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    batch, rows, heads = q.shape[:3]
    drawn = _option(7, "return_softmax", options, named)
    return (
        q.new_empty((batch, rows, heads, v.shape[-1])),
        q.new_empty((batch, heads, rows), dtype=torch.float32),
        q.new_empty((batch, heads, rounded(rows), rounded(k.shape[1])) if drawn else (0,)),
        q.new_empty((2,), dtype=torch.int64),
    )


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, LSE, S_dmask, rng_state) for packed q, k and v, or for k and v in blocks."""
    out, lse, probabilities, state = flash_attn_gpu.varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal,
        window_size_left, window_size_right, softcap, return_softmax, None, num_splits,
    )  # fmt: skip
    return out, lse, probabilities, state


def _varlen_forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    total, heads = q.shape[:2]
    sizes = (cu_seqlens_q.shape[0] - 1, heads, rounded(max_seqlen_q), rounded(max_seqlen_k))
    drawn = _option(7, "return_softmax", options, named)
    return (
        q.new_empty((total, heads, v.shape[-1])),
        q.new_empty((heads, total), dtype=torch.float32),
        q.new_empty(sizes if drawn else (0,)),
        q.new_empty((2,), dtype=torch.int64),
    )


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradients into those of dq, dk and dv that are not None; return rowsum(dO∘O) (B, H,
    Sq rounded up to 128).

    ``out`` and ``softmax_lse`` may come from attention over more keys, as in ring attention.
    """
    *_, sums = flash_attn_gpu.bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return sums


def _backward_fake(dout: torch.Tensor, q: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    batch, rows, heads = q.shape[:3]
    return q.new_empty((batch, heads, rounded(rows)), dtype=torch.float32)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Call ``_flash_attn_backward`` on packed tensors; return (H, total_q + 128·B)."""
    *_, sums = flash_attn_gpu.varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal,
        window_size_left, window_size_right, softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return sums


def _varlen_backward_fake(
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
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    columns = q.shape[0] + ROUNDED * (cu_seqlens_q.shape[0] - 1)
    return q.new_empty((q.shape[1], columns), dtype=torch.float32)


def _option(number: int, name: str, options: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return options[number] if number < len(options) else named.get(name)


torch.library.register_fake("flash_attn::_flash_attn_forward", _forward_fake)
torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", _varlen_forward_fake)
torch.library.register_fake("flash_attn::_flash_attn_backward", _backward_fake)
torch.library.register_fake("flash_attn::_flash_attn_varlen_backward", _varlen_backward_fake)

_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward
