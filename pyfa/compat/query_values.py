"""``qv``: scores of q·k + qv·v, as in latent attention with the latents as v.

The sum of the two products is computed as one product with a larger head_dim: q and qv are
concatenated, and so are k and v. If v and k are already adjacent views of one cache, nothing is
copied.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import binding, dispatch, request, validate
from ..problem import Call
from ..request import Request

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scales = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None


def scale_of(softmax_scale: float | None, q: torch.Tensor, v: torch.Tensor) -> float:
    """Return ``softmax_scale``, by default 1/√(head_dim of q + head_dim of qv)."""
    both = q.shape[-1] + v.shape[-1]
    return both**-0.5 if softmax_scale is None else softmax_scale


def joined(
    q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descale: Scales = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scales]:
    """Return q, k, v and their scales for the single product; v is a view of k."""
    for name, x in (("q", q), ("qv", qv), ("k", k), ("v", v)):
        validate.a_tensor(name, x)
    shape = (*q.shape[:-1], v.shape[-1])
    if qv.shape != shape or qv.dtype != q.dtype or qv.device != q.device:
        validate.wrong("qv", f"shape {shape}, {q.dtype}, on {q.device}", qv)
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype or k.shape[-1] != q.shape[-1]:
        return q, k, v, descale  # which the checks of all calls refuse
    if descale is not None:
        q, qv, descale = _with_one_scale(q, qv, descale)
    keys = _as_one(k, v)
    return _side_by_side(qv, q), keys, keys[..., : v.shape[-1]], descale


def attended(asked: Request) -> Result:
    """Run attention for a request whose q, k and v come from ``joined``."""
    return binding.attend(asked._replace(call=asked.call._replace(latent=not asked.needs_grad)))


def attended_with_cache(asked: Request, qv: torch.Tensor) -> Result:
    """Run the request of ``attention_kvcache`` with ``qv``; rotary applies to q and k only."""
    if asked.append is not None:
        # Whatever is wrong is said before anything is written.
        whole = _of_cache(asked.call, qv)
        dispatch.prepare(whole, *asked.who).validate(whole, asked.append)
        call = request.appended(asked.call, asked.append)
        asked = asked._replace(call=call, append=None)
    return binding.attend(asked._replace(call=_of_cache(asked.call, qv)))


def _of_cache(call: Call, qv: torch.Tensor) -> Call:
    descale: Any = None
    if call.k_descale is not None:
        descale = call.q_descale, call.k_descale, call.v_descale
    q, k, v, descale = joined(call.q, qv, call.k, call.v, descale)
    call = call._replace(q=q, k=k, v=v, latent=True)
    if descale is not None:
        call = call._replace(q_descale=None, k_descale=descale[1], v_descale=descale[2])
    return call


def _as_one(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return v and k concatenated: a view if they are adjacent in memory."""
    whole = (*v.shape[:-1], v.shape[-1] + k.shape[-1])
    if not torch.compiler.is_compiling():
        behind = v.data_ptr() + v.shape[-1] * v.itemsize == k.data_ptr()
        if behind and v.stride() == k.stride() and v.stride(-1) == 1:
            ends = v.storage_offset() + sum(
                (size - 1) * step for size, step in zip(whole, v.stride(), strict=True)
            )
            if v.numel() and (ends + 1) * v.itemsize <= v.untyped_storage().nbytes():
                return v.as_strided(whole, v.stride())
    return _side_by_side(v, k)


def _side_by_side(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.itemsize == 1:  # PyTorch does not join all of its float8 formats everywhere
        return torch.cat((a.view(torch.uint8), b.view(torch.uint8)), -1).view(a.dtype)
    return torch.cat((a, b), -1)


def _with_one_scale(
    q: torch.Tensor, qv: torch.Tensor, descale: Any
) -> tuple[torch.Tensor, torch.Tensor, Scales]:
    """Return 16-bit queries that include their own scale and the ratio of k's scale to v's."""
    of_q, of_k, of_v = descale
    dtype = q.dtype if q.itemsize > 1 else torch.bfloat16
    for name, scale in (("k_descale", of_k), ("v_descale", of_v)):
        if scale.dim() > 2 or (q.dim() != 4 and scale.numel() > 1):
            validate.wrong(name, "scales per sequence and head of padded queries with qv", scale)
    own = torch.ones_like(of_k) if of_q is None else of_q

    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        if factor.numel() > 1:  # (B, Hk)
            factor = factor.repeat_interleave(x.shape[-2] // factor.shape[-1], -1)[:, None, :, None]
        return (x.float() * factor).to(dtype)

    return scaled(q, own * of_k / of_v), scaled(qv, own), (None, of_v, of_v)
