"""Rotary position embedding in plain PyTorch (``flash_attn.layers.rotary``, ``ops.triton.rotary``).

cos and sin are tables (positions, R). Pairs of elements are rotated: 2i and 2i+1 if
``interleaved``, otherwise i and i+R. Elements of a head after the first 2·R do not change. Row s of
sequence b is at position ``seqlen_offsets[b]`` + s. Rows beyond the end of the tables are not
rotated. (In the kernels of ``pyfa.attention_kvcache`` they give NaN.) The computation is in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import validate

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]

Offsets = int | torch.Tensor
# Views of a packed tensor that are turned, each with its tables.
_Views = Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rotate x (B, S, H, D), or packed (total, H, D) with ``cu_seqlens``.

    ``conjugate`` rotates backwards. With ``inplace`` it returns x itself.
    """
    turned = 2 * cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or turned > x.shape[-1]:
        validate.wrong("cos", f"sin's shape (positions, at most {x.shape[-1] // 2})", cos)
    if x.dim() != (4 if cu_seqlens is None else 3):
        layout = "batch, seqlen" if cu_seqlens is None else "total"
        validate.wrong("x", f"shape ({layout}, heads, head_dim)", x)
    offsets = torch.as_tensor(seqlen_offsets, device=x.device)
    if cu_seqlens is None:
        positions = offsets.reshape(-1, 1) + torch.arange(x.shape[1], device=x.device)
    else:
        row = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
        sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
        positions = row - cu_seqlens[sequence] + offsets.expand(cu_seqlens.shape[0] - 1)[sequence]
    table = torch.complex(cos.float(), -sin.float() if conjugate else sin.float())
    table = torch.cat([table, torch.ones_like(table[:1])])  # 1 is what does not turn
    turn = table[positions.clamp(max=cos.shape[0])].unsqueeze(-2)
    pairs = x[..., :turned].float()
    pairs = pairs.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    if not interleaved:
        result = result.transpose(-1, -2)
    result = result.flatten(-2).to(x.dtype)
    if inplace:
        x[..., :turned] = result
        return x
    return torch.cat([result, x[..., turned:]], dim=-1)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Call ``apply_rotary`` so that x receives a gradient, also with ``inplace``."""
    where = {
        "seqlen_offsets": seqlen_offsets,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "interleaved": interleaved,
    }
    if not inplace:
        return apply_rotary(x, cos, sin, **where)  # type: ignore[arg-type]
    return _in_place(x, lambda x: [(x, cos, sin)], where)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate x (B, S, H, D) in its own dtype, by cos and sin (S, R) or (B, S, R)."""
    first = slice(0, 2 * cos.shape[-1])
    head, tail = x[..., first], x[..., first.stop :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    parts = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned, tail], dim=-1)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate Q and K of qkv in place; return qkv. With ``cos_k`` and ``sin_k``, these rotate K.

    qkv is (B, S, 3, H, D), or (B, S, num_heads_q + 2·Hk, D).
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            validate.wrong("qkv", "shape (batch, seqlen, 3, heads, head_dim)", qkv)
        heads_q, heads_k = 0, 0
    elif num_heads_q is None or qkv.dim() != 4 or (qkv.shape[2] - num_heads_q) % 2:
        shape = "shape (batch, seqlen, num_heads_q + 2 * heads_k, head_dim)"
        validate.wrong("qkv", f"{shape} for num_heads_q={num_heads_q}", qkv)
    else:
        heads_q, heads_k = num_heads_q, (qkv.shape[2] - num_heads_q) // 2

    def views(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        if x.dim() == 5:
            return [(x[:, :, 0], cos, sin), (x[:, :, 1], cos_k, sin_k)]
        q, k, _ = x.split([heads_q, heads_k, heads_k], dim=2)
        return [(q, cos, sin), (k, cos_k, sin_k)]

    where = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved}
    return _in_place(qkv, views, where)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
) -> torch.Tensor:
    """Rotate K of kv (B, S, 2, H, D) in place; return kv."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        validate.wrong("kv", "shape (batch, seqlen, 2, heads, head_dim)", kv)
    where = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved}
    return _in_place(kv, lambda x: [(x[:, :, 0], cos, sin)], where)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with its own tables (Su et al. 2021, arXiv:2104.09864).

    Rotates ``dim`` elements of each head. ``scale_base`` selects XPos (Sun et al. 2022,
    arXiv:2212.10554), in which Q's tables grow with the position and K's tables shrink.
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> torch.Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (even / self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make tables for ``seqlen`` positions, unless the existing ones suffice."""
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and (kept.device, kept.dtype) == (device, dtype)
            and not (self.training and kept.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Always in float32, whatever the model's dtype: bfloat16 cannot count to 512.
        frequency = self.inv_freq
        if frequency.dtype != torch.float32:
            frequency = self._compute_inv_freq(device)
        angle = torch.outer(
            torch.arange(seqlen, device=device, dtype=torch.float32), frequency.to(device)
        )
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        centered = torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2
        grown = self.scale.float().to(device) ** (centered / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * grown).to(dtype), (sin * grown).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / grown).to(dtype), (sin / grown).to(dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotate Q and K in place.

        Without ``kv``, rotate Q and K of qkv as ``apply_rotary_emb_qkv_`` does, and return qkv.
        With ``kv``, qkv holds only Q (B, S, H, D): rotate it, and K of kv (B, S, 2, Hk, D), and
        return both.

        ``max_seqlen`` is the length of the tables if ``seqlen_offset`` is a tensor.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin, cos_k, sin_k = (
            self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached,
        )  # fmt: skip
        if cos is None or sin is None:
            validate.wrong("max_seqlen", "a length, with seqlen_offset as a tensor", None)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


class _InPlace(torch.autograd.Function):
    """Rotates views of a tensor in place, also of a leaf that requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, views: _Views, where: dict[str, Any]
    ) -> torch.Tensor:
        for x, cos, sin in views(whole):
            apply_rotary(x, cos, sin, **where, inplace=True)
        ctx.views, ctx.where = views, where
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        for x, cos, sin in ctx.views(gradient):
            apply_rotary(x, cos, sin, **ctx.where, inplace=True, conjugate=True)
        return gradient, None, None


def _in_place(whole: torch.Tensor, views: _Views, where: dict[str, Any]) -> torch.Tensor:
    return _InPlace.apply(whole, views, where)  # type: ignore[no-untyped-call, no-any-return]
