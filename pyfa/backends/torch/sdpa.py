"""PyTorch's fused attention, called through the operators under ``scaled_dot_product_attention``.

The public function gives no LSE and hides its backward; these operators give both. They are the
CPU's flash kernel and, on a GPU, PyTorch's FlashAttention-2 (AOTriton's on ROCm).
"""

from __future__ import annotations

import math

import torch

from ...problem import Call, Problem
from ..base import Gradients
from ..common.calls import with_rows

# Bound in C++: the same operator through torch.ops costs 1.6 µs more.
_CPU_FORWARD = torch._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

_SAME_FUNCTION = frozenset({"causal", "gqa", "backward", "deterministic"})


def why_not(problem: Problem) -> list[str]:
    """Return why PyTorch's attention does not compute this problem; empty if it does."""
    reasons = []
    beyond = sorted(problem.features - _SAME_FUNCTION - {"dlse"})
    if beyond:
        reasons.append(f"PyTorch's attention does not support {', '.join(beyond)}")
    if "dlse" in problem.features:
        reasons.append("PyTorch's attention does not support a gradient through the LSE")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        reasons.append("PyTorch's fused kernels refuse empty tensors")
    if "causal" in problem.features and not problem.square:
        reasons.append("PyTorch's causal mask is aligned to the top left")
    if "causal" in problem.features and not problem.positive:
        reasons.append("PyTorch's attention loses the causal mask if the scale is 0 or negative")
    if problem.device.arch != "cpu":
        if not problem.aligned:
            reasons.append("PyTorch's flash attention needs rows aligned to 16 bytes")
        if not problem.positive:
            reasons.append("PyTorch's flash attention gives NaN if the scale is 0 or negative")
        if problem.dtype == "float32":
            reasons.append("PyTorch's flash attention does not support float32")
        if problem.head_dim % 8:
            reasons.append(f"head_dim {problem.head_dim} is not a multiple of 8")
        if "deterministic" in problem.features:
            reasons.append("PyTorch's flash backward is not deterministic")
    return reasons


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return out and LSE; None if PyTorch's kernel may have lost a NaN or an inf among the
    inputs."""
    q, k, v = _heads_first(call)
    causal = call.window_right == 0
    if q.is_cpu:
        by, scale = (1.0, call.scale) if q.dtype.itemsize < 4 else _power_of_2(call.scale)
        out, lse = _CPU_FORWARD(q if by == 1.0 else q * by, k, v, 0.0, causal, scale=scale)
        if not is_usual(lse):
            return None
    else:
        out, lse, *_ = _GPU_FORWARD(q, k, v, 0.0, causal, False, scale=call.scale)
        # FlashAttention-2 writes +inf where the sum is NaN.
        lse = lse.masked_fill(lse == torch.inf, torch.nan)
    return out.transpose(1, 2), lse


def is_usual(lse: torch.Tensor) -> bool:
    """Return whether a CPU's LSE comes from finite scores: neither NaN nor inf nor 0.

    For other scores the result of PyTorch's CPU kernels depends on their position in a register: a
    NaN row with 12 keys gives output 0 and LSE 0, a key of inf in bfloat16 gives output 0 and LSE
    +inf. Finite scores may also give an LSE of 0; the caller then uses the tiled path, which is
    right, too. The check takes 3 µs per call.
    """
    return math.isfinite((lse / lse).sum().item())


def backward(call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Gradients:
    q, k, v = _heads_first(call)
    causal = call.window_right == 0
    dout, out = with_rows(dout).transpose(1, 2), out.transpose(1, 2)
    if q.is_cpu:
        # In float32, because the 16-bit kernel adds up dK and dV in 16 bits, block by block: 2.5
        # times the error of rounding once at 2048 rows. Float16 is 11 times faster for it too, and
        # bfloat16 1.3 times slower (2 cores, 4096 x 8 x 64).
        dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        by, scale = _power_of_2(call.scale)
        args = dout, q if by == 1.0 else q * by, k, v, out, lse
        dq, dk, dv = _CPU_BACKWARD(*args, 0.0, causal, scale=scale)
        dq = dq if by == 1.0 else dq * by
    else:
        # Rows of dO may lie anywhere, and the kernel reads 16 bytes at a time.
        dout = dout.clone(memory_format=torch.contiguous_format)
        # There are no offsets, because nothing is packed. The state of dropout is not read at p =
        # 0.
        state = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _GPU_BACKWARD(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state,
            scale=call.scale,
        )  # fmt: skip
    heads_k = call.k.shape[2]
    if dk.shape[1] != heads_k:
        dk, dv = (x.unflatten(1, (heads_k, -1)).float().sum(2) for x in (dk, dv))
    dq, dk, dv = (x.to(call.q.dtype).transpose(1, 2) for x in (dq, dk, dv))
    return Gradients(dq, dk, dv)


def _power_of_2(scale: float) -> tuple[float, float]:
    """Split ``scale`` into a factor for q from 1 to below 2 (0 for 0), and a power of two.

    PyTorch's CPU kernels (2.11, 2.13) scale forward's scores and backward's differently in the last
    bits: with scores of 40 and head_dim 72 a float32 dQ was off by 3e-5 of its maximum, 40 times as
    much as with a power of two, where both are exact.
    """
    power = math.ldexp(0.5, math.frexp(scale)[1])
    return scale / power, power


def _heads_first(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (B, H, S, D) with contiguous rows; keys and values are repeated to the number of heads
    of q."""
    q, k, v = call.q, call.k, call.v
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = with_rows(q), with_rows(k), with_rows(v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.q.shape[2] != call.k.shape[2]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q, k, v
