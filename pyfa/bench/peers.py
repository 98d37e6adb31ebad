"""Who takes part: pyfa, and what else computes attention in this environment.

Each peer gets its inputs in the layout that it likes best, made outside of what is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyfa
from pyfa.backends import NAMES

from .suites import Cell

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Ready(NamedTuple):
    """A peer at one cell: ``forward`` gives the output of ``leaves``, which ``dout`` fits. What is
    timed runs inside ``within``."""

    forward: Callable[[], torch.Tensor]
    leaves: Inputs
    dout: torch.Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


class Peer(NamedTuple):
    """``prepare`` gives a ``Ready``, or raises where it cannot run the cell; ``why_not`` says what
    the environment lacks, for a device type."""

    name: str
    meaning: str
    why_not: Callable[[str], str | None]
    prepare: Callable[[Cell, torch.device], Ready]


def inputs(cell: Cell, device: torch.device) -> tuple[Inputs, torch.Tensor]:
    """q, k, v as (batch, seqlen, heads, head_dim), and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal(length: int, heads: int) -> torch.Tensor:
        shape = (cell.batch, length, heads, cell.head_dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_(cell.grad)

    q = normal(cell.seqlen_q, cell.heads_q)
    k, v = normal(cell.seqlen_k, cell.heads_k), normal(cell.seqlen_k, cell.heads_k)
    return (q, k, v), torch.randn_like(q, requires_grad=False)


def _heads_first(cell: Cell, device: torch.device, *, copied: bool) -> tuple[Inputs, torch.Tensor]:
    """``inputs`` as (batch, heads, seqlen, head_dim): views, or tensors of that order."""
    (q, k, v), dout = inputs(cell, device)
    turned = [x.detach().transpose(1, 2) for x in (q, k, v, dout)]
    if copied:
        turned = [x.contiguous() for x in turned]
    for x in turned[:3]:
        x.requires_grad_(cell.grad)
    return (turned[0], turned[1], turned[2]), turned[3]


def _pyfa(backend: str | None, cell: Cell, device: torch.device) -> Ready:
    leaves, dout = inputs(cell, device)
    q, k, v = leaves

    def forward() -> torch.Tensor:
        if cell.cache:
            result = pyfa.attention_kvcache(q, k, v, causal=cell.causal, backend=backend)
        else:
            result = pyfa.attention(q, k, v, causal=cell.causal, backend=backend)
        assert isinstance(result, torch.Tensor)
        return result

    return Ready(forward, leaves, dout)


def _sdpa(kind: SDPBackend | None, cell: Cell, device: torch.device) -> Ready:
    leaves, dout = _heads_first(cell, device, copied=False)
    # One query sees all keys: PyTorch's causal mask would show it the first alone.
    causal = cell.causal and cell.seqlen_q > 1
    call = functools.partial(
        F.scaled_dot_product_attention,
        *leaves,
        is_causal=causal,
        enable_gqa=cell.heads_q != cell.heads_k,
    )
    return Ready(call, leaves, dout, nullcontext if kind is None else lambda: sdpa_kernel(kind))


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Every cell has shapes of its own: dynamic ones would be slower.
    torch._dynamo.config.recompile_limit = 256
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _earlier(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _flex(cell: Cell, device: torch.device) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask

    leaves, dout = _heads_first(cell, device, copied=True)
    mask = None
    if cell.causal and cell.seqlen_q > 1:
        mask = create_block_mask(_earlier, None, None, cell.seqlen_q, cell.seqlen_k, device=device)
    gqa = cell.heads_q != cell.heads_k
    call = functools.partial(_compiled_flex(), *leaves, block_mask=mask, enable_gqa=gqa)
    return Ready(call, leaves, dout)


# Scores, what the mask leaves of them, probabilities; then their gradients.
_NAIVE_COPIES = {"forward": 3, "backward": 6, "both": 6}


def _naive(cell: Cell, device: torch.device) -> Ready:
    scores = cell.batch * cell.heads_q * cell.seqlen_q * cell.seqlen_k
    width = 4 if cell.dtype == "float32" else 2
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        if scores * width * _NAIVE_COPIES[cell.passes] > room:
            raise ValueError(f"the scores do not fit in {room / 1e9:.0f} GB")
    leaves, dout = _heads_first(cell, device, copied=True)
    q, k, v = leaves
    shared = (cell.batch, cell.heads_k, cell.heads_q // cell.heads_k)

    def forward() -> torch.Tensor:
        grouped = q.reshape(*shared, cell.seqlen_q, cell.head_dim)
        score = grouped @ k[:, :, None].transpose(-1, -2) * cell.head_dim**-0.5
        if cell.causal and cell.seqlen_q > 1:
            later = torch.ones(score.shape[-2:], dtype=torch.bool, device=device).triu(1)
            score = score.masked_fill(later, -torch.inf)
        out: torch.Tensor = score.softmax(-1) @ v[:, :, None]
        return out.reshape(q.shape)

    return Ready(forward, leaves, dout)


def _package(name: str, cell: Cell, device: torch.device) -> Ready:
    """flash-attention's own packages: ``flash_attn`` (2) and ``flash_attn_interface`` (3)."""
    module = importlib.import_module(name)
    leaves, dout = inputs(cell, device)
    function = module.flash_attn_with_kvcache if cell.cache else module.flash_attn_func

    def forward() -> torch.Tensor:
        result = function(*leaves, causal=cell.causal)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Ready(forward, leaves, dout)


def _anywhere(device: str) -> str | None:
    return None


def _on_gpu(device: str) -> str | None:
    return None if device == "cuda" else "it needs a GPU"


def _on_nvidia(device: str) -> str | None:
    return _on_gpu(device) or ("it needs an NVIDIA GPU" if torch.version.hip else None)


def _flex_lacks(device: str) -> str | None:
    missing = None if importlib.util.find_spec("triton") else "the package triton is not installed"
    return _on_gpu(device) or missing


def _package_lacks(name: str, device: str) -> str | None:
    missing = None if importlib.util.find_spec(name) else f"the package {name} is not installed"
    return _on_gpu(device) or missing


_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
_ALL = (
    Peer("pyfa", "the backend that pyfa chooses", _anywhere, functools.partial(_pyfa, None)),
    Peer("sdpa", "PyTorch's own choice", _anywhere, functools.partial(_sdpa, None)),
    Peer("flash", "PyTorch's FlashAttention-2", _on_gpu, functools.partial(_sdpa, _FLASH)),
    Peer("cudnn", "PyTorch's cuDNN attention", _on_nvidia, functools.partial(_sdpa, _CUDNN)),
    Peer("efficient", "PyTorch's memory-efficient attention", _on_gpu,
         functools.partial(_sdpa, _EFFICIENT)),
    Peer("flex", "FlexAttention, compiled", _flex_lacks, _flex),
    Peer("fa2", "flash_attn", functools.partial(_package_lacks, "flash_attn"),
         functools.partial(_package, "flash_attn")),
    Peer("fa3", "flash_attn_interface", functools.partial(_package_lacks, "flash_attn_interface"),
         functools.partial(_package, "flash_attn_interface")),
    Peer("naive", "all scores, then softmax, then the values", _anywhere, _naive),
)  # fmt: skip
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


def _forced(backend: str) -> Peer:
    def why_not(device: str) -> str | None:
        from pyfa.backends import BACKENDS

        found = BACKENDS.get(backend)
        return "not in this release" if found is None else found.why_unavailable()

    name = f"pyfa:{backend}"
    return Peer(name, f"pyfa's {backend}", why_not, functools.partial(_pyfa, backend))


def chosen(wanted: list[str] | None, device: str) -> tuple[list[Peer], dict[str, str]]:
    """Who takes part, pyfa first, and why the others do not.

    By default all that the environment has (``sdpa`` only on a CPU: on a GPU it is one of the
    others). ``ValueError`` for a name that is none, or one that cannot take part here.
    """
    if wanted is None:
        lacking = {name: peer.why_not(device) for name, peer in PEERS.items()}
        absent = {name: why for name, why in lacking.items() if why is not None}
        found = [peer for name, peer in PEERS.items() if name not in absent]
        return [peer for peer in found if peer.name != "sdpa" or device == "cpu"], absent
    found = []
    for name in ["pyfa", *wanted]:
        head, _, backend = name.partition(":")
        if name not in PEERS and not (head == "pyfa" and backend in NAMES):
            raise ValueError(f"--peers: expected {', '.join(PEERS)} or pyfa:BACKEND; got {name!r}")
        peer = PEERS.get(name) or _forced(backend)
        why = peer.why_not(device)
        if why is not None:
            raise ValueError(f"--peers: {name} cannot take part here: {why}")
        if peer.name not in [other.name for other in found]:
            found.append(peer)
    return found, {}
