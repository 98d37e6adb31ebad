"""Runs PyTorch's flash attention on pyfa, through the registry in ``torch.nn.attention``.

    from pyfa.integrations import torch_sdpa
    torch_sdpa.activate()    # scaled_dot_product_attention on a GPU now runs pyfa's kernels
    ...
    torch_sdpa.restore()     # PyTorch's own kernels again

While active, pyfa runs ``varlen_attn``, nested tensors, and ``scaled_dot_product_attention`` where
PyTorch chooses flash attention, forward and backward. PyTorch still decides when to choose flash
attention: for float16 and bfloat16, without a mask, and for head_dim up to 256.
``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` forces this choice.

- Dropout drops different positions than PyTorch's kernel. The seed comes from PyTorch's generator
  of the device; each replay of a captured graph draws a new one.
- The LSE of a fully masked row is −inf.
- pyfa chooses the backend (``use_backend``, ``PYFA_BACKEND``), but never the torch backend on a
  GPU, which calls the operators that this module replaces.
- Do not activate or restore between a forward and its backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.attention as registry

from .. import device, dispatch, env, request, validate
from ..backends import AUTOMATIC
from ..compat.probabilities import Packed, signed_probabilities

__all__ = ["NAME", "activate", "register", "restore"]

NAME = "PYFA"

_NEEDED = (
    "register_flash_attention_impl", "activate_flash_attention_impl",
    "current_flash_attention_impl", "restore_flash_attention_impl",
)  # fmt: skip


def register() -> None:
    """Add pyfa to the implementations that ``activate_flash_attention_impl("PYFA")`` accepts.

    Changes nothing else. Raises ``RuntimeError`` if PyTorch has no such registry.
    """
    _check_registry()
    registry.register_flash_attention_impl(NAME, register_fn=_override)


def activate() -> None:
    """Run PyTorch's flash attention on pyfa in this process until ``restore``.

    Warns if PyTorch finds no GPU: PyTorch's attention on a CPU does not change. Raises
    ``RuntimeError`` if PyTorch has no registry of implementations.
    """
    register()
    if not torch.cuda.is_available():
        warnings.warn(
            "torch_sdpa.activate() changes nothing here: PyTorch finds no GPU, and its attention "
            "on a CPU stays PyTorch's own",
            stacklevel=2,
        )
    registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Restore PyTorch's own kernels, if pyfa's are active; otherwise do nothing."""
    _check_registry()
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


def _check_registry() -> None:
    if not all(hasattr(registry, name) for name in _NEEDED):
        raise RuntimeError(
            "torch.nn.attention has no registry of flash-attention implementations in PyTorch "
            f"{torch.__version__}; it needs 2.11 or newer"
        )


class _Overridden:
    """The registry's handle; without it the operators are PyTorch's again."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        self.library = None


def _override(dispatch_key: str = "CUDA") -> _Overridden:
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    for name, function in _OPERATORS.items():
        # PyTorch 2.11 has no operator that writes into a given output.
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, dispatch_key)
    return _Overridden(library)


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Implement ``aten::_scaled_dot_product_flash_attention`` for query (B, H, Sq, D), key and
    value (B, Hk, Sk, D).

    Return (out, lse, None, None, Sq, Sk, rng_state, unused, debug_attn_mask). out has the memory
    layout of query, and lse is (B, H, Sq). The Nones stand for the offsets of packed sequences,
    which this operator does not have.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *rest = flash_forward(
        q, k, v, None, None, query.shape[2], key.shape[2], dropout_p, is_causal,
        return_debug_mask, scale=scale,
    )  # fmt: skip
    out = _laid_out_as(query, out.transpose(1, 2))
    return (out, lse, None, None, query.shape[2], key.shape[2], *rest)


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Implement ``aten::_scaled_dot_product_flash_attention_backward``: gradients of query, key,
    value."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = flash_backward(
        dout, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    inputs = (query, key, value)
    return tuple(
        _laid_out_as(x, grad.transpose(1, 2)) for x, grad in zip(inputs, grads, strict=True)
    )


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Implement ``aten::_flash_attention_forward`` for query (B, Sq, H, D), or packed (total_q, H,
    D) with ``cum_seq_q`` (B+1,) int32.

    Return (out, lse, rng_state, unused, debug_attn_mask). lse is (B, H, Sq), or (H, total_q).
    debug_attn_mask is empty without dropout. With dropout it is (B, H, Sq, Sk), with both lengths
    rounded up to multiples of 128, and contains exp(score − the row's maximum), with a negative
    sign where dropout dropped the probability. ``num_splits`` is the number of splits of the keys;
    with None or 0, pyfa chooses. Raises ``NotImplementedError`` for an argument that PyTorch does
    not pass to the backward.
    """
    seed = validate.seed(None, query.device) if dropout_p else None
    asked = _request(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, scale,
        window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, num_splits or 0,
    )  # fmt: skip
    if asked.needs_grad:
        for name, x in (("seqused_k", seqused_k), ("alibi_slopes", alibi_slopes)):
            if x is not None:
                raise NotImplementedError(f"{name}: PyTorch does not pass it to the backward")
    out, lse = dispatch.prepare(asked.call, *asked.who).forward(asked.call)
    if return_debug_mask and seed is not None:
        call = asked.call
        packed = None
        if cum_seq_q is not None:
            assert cum_seq_k is not None
            packed = Packed(cum_seq_q, cum_seq_k, max_q, max_k, block_table)
        mask = signed_probabilities(
            query, key, packed, False, (call.window_left, call.window_right), call.scale, 0.0,
            call.alibi_slopes, dropout_p, seed,
        )  # fmt: skip
    else:
        mask = query.new_empty(0)
    return (_laid_out_as(query, out), lse.contiguous(), *_rng_state(seed, query), mask)


def flash_forward_inplace(out: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Implement ``aten::_flash_attention_forward_no_dropout_inplace``: write ``out``, return
    lse."""
    result, lse, *_ = flash_forward(*args, **options)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Implement ``aten::_flash_attention_backward``: gradients in the layout of query, key and
    value."""
    seed = rng_state.view(torch.int64).reshape(-1)[:1] if dropout_p else None
    asked = _request(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, scale,
        window_size_left, window_size_right,
    )  # fmt: skip
    prepared = dispatch.prepare(asked.call, *asked._replace(needs_grad=True).who)
    grads = prepared.backward(asked.call, out, logsumexp, grad_out)
    inputs = (query, key, value)
    return tuple(_laid_out_as(x, grad) for x, grad in zip(inputs, grads[:3], strict=True))


def _request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: torch.Tensor | None,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int = 0,
) -> request.Request:
    # PyTorch's kernels take any negative edge for unlimited.
    edges = (window_size_left, window_size_right)
    window = tuple(-1 if edge is None else max(-1, edge) for edge in edges)
    shared = request.Shared(
        causal=is_causal, window=window, scale=scale,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, seed=seed, backend=_candidates(query),
    )  # fmt: skip
    if cum_seq_q is None:
        return request.dense(query, key, value, shared, num_splits)
    return request.varlen(
        query, key, value, shared, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k=seqused_k,
        page_table=block_table, num_splits=num_splits,
    )  # fmt: skip


def _candidates(query: torch.Tensor) -> tuple[str, ...]:
    """Return the backends that may run, in order."""
    asked = dispatch.preference(None)
    names = tuple(asked.split(",")) if asked else env.get("PYFA_BACKEND")
    names = names or AUTOMATIC[device.of(query.device).vendor]
    if query.is_cuda:
        names = tuple(name for name in names if name != "torch")
    if not names:
        raise ValueError("the torch backend cannot stand in for PyTorch's own flash attention")
    return names


def _rng_state(seed: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rng_state`` and ``unused`` in the shapes of PyTorch's fakes; not read at p = 0."""
    if torch.version.hip:
        offset = query.new_empty((), dtype=torch.int64)
        return offset if seed is None else seed[0], offset
    offset = query.new_empty((), dtype=torch.uint64)
    if seed is None:
        return query.new_empty(2, dtype=torch.uint64), offset
    return torch.cat([seed, torch.zeros_like(seed)]).view(torch.uint64), offset


def _laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x with the strides of PyTorch's fakes: those of ``empty_like(like)``."""
    promised = torch.empty_like(like)
    return x if x.stride() == promised.stride() else promised.copy_(x)


_OPERATORS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
