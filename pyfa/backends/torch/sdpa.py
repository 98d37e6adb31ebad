"""PyTorch's fused attention, called through the operators under ``scaled_dot_product_attention``.

The public function gives no LSE and hides its backward; these operators give both. They are the
CPU's flash kernel and, on a GPU, PyTorch's FlashAttention-2 (AOTriton's on ROCm).
"""

from __future__ import annotations

import torch

from ...problem import Call, Problem
from ..base import Gradients

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

_SAME_FUNCTION = frozenset({"causal", "gqa", "backward", "deterministic"})


def why_not(problem: Problem) -> list[str]:
    """Why PyTorch's attention does not compute this problem; empty where it does."""
    reasons = []
    beyond = sorted(problem.features - _SAME_FUNCTION - {"dlse"})
    if beyond:
        reasons.append(f"PyTorch's attention has no {', '.join(beyond)}")
    if "dlse" in problem.features:
        reasons.append("PyTorch's attention has no gradient through the LSE")
    if "causal" in problem.features and not problem.square:
        reasons.append("PyTorch's causal mask is aligned to the top left")
    if problem.device.arch != "cpu":
        if problem.dtype == "float32":
            reasons.append("PyTorch's flash attention takes no float32")
        if problem.head_dim % 8:
            reasons.append(f"head_dim {problem.head_dim} is not a multiple of 8")
        if "deterministic" in problem.features:
            reasons.append("PyTorch's flash backward is not deterministic")
    return reasons


def has_work(call: Call) -> bool:
    """Whether there is a row to compute and a key to see: fused kernels refuse empty tensors."""
    return call.q.numel() > 0 and call.max_seqlen_k > 0


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _heads_first(call)
    causal = call.window_right == 0
    if q.device.type == "cpu":
        out, lse = _CPU_FORWARD(q, k, v, 0.0, causal, scale=call.scale)
    else:
        out, lse, *_ = _GPU_FORWARD(q, k, v, 0.0, causal, False, scale=call.scale)
    return out.transpose(1, 2), lse


def backward(call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Gradients:
    q, k, v = _heads_first(call)
    causal = call.window_right == 0
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    if q.device.type == "cpu":
        dq, dk, dv = _CPU_BACKWARD(dout, q, k, v, out, lse, 0.0, causal, scale=call.scale)
    else:
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)
        none = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _GPU_BACKWARD(
            dout, q, k, v, out, lse, nothing, nothing, q.shape[2], k.shape[2], 0.0, causal,
            none, none, scale=call.scale,
        )  # fmt: skip
    heads_k = call.k.shape[2]
    dk, dv = (x.unflatten(1, (heads_k, -1)).float().sum(2).to(x.dtype)
              if x.shape[1] != heads_k else x for x in (dk, dv))  # fmt: skip
    return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


def _heads_first(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, H, S, D) views; keys and values repeated to as many heads as q has."""
    q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q, k, v
