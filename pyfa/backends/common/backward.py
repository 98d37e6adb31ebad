"""What backward is on every device: what it takes, the tensors that its kernels read and write."""

from __future__ import annotations

import torch

from ...problem import Call, Problem
from ..base import Gradients

FEATURES = frozenset({"backward", "dlse", "deterministic"})


def why_not(problem: Problem) -> list[str]:
    """What backward lacks for ``problem``, beyond features and dtypes."""
    if "backward" not in problem.features:
        return []
    return ["backward with a page_table is not implemented"] if problem.page_size else []


def is_general(call: Call) -> bool:
    """Whether backward has more to do between products and softmax than scale and masks."""
    terms = (call.alibi_slopes, call.bias, call.sinks)
    return bool(call.softcap or call.dropout_p or any(x is not None for x in terms))


def is_general_problem(problem: Problem) -> bool:
    """The same of a problem."""
    return bool(problem.features & {"softcap", "alibi", "bias", "sinks", "dropout"})


def gradients(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """What backward's kernels read and write, by name; for ``abi.backward_values``.

    The gradients are 0 where nobody writes them: in rows of no sequence, or beyond one's length.
    """
    gaps_q = call.cu_seqlens_q is not None or call.seqused_q is not None
    gaps_k = call.cu_seqlens_k is not None or call.seqused_k is not None
    tensors = {
        "out": out,
        "lse": whole(lse),
        "dout": dout,
        "dq": _like(call.q, gaps_q),
        "dk": _like(call.k, gaps_k),
        "dv": _like(call.v, gaps_k),
        "delta": torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device),
    }
    if dlse is not None:
        tensors["dlse"] = dlse.contiguous()
    if call.sinks is not None:
        tensors["dsinks"] = torch.zeros_like(tensors["lse"])
    return tensors


def whole(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and with the strides of a tensor of its own, by which kernels go.

    To ``contiguous`` the stride of a lone sequence or head is nothing: in a slice of a larger LSE
    it stays that one's, and what kernels keep of each row would lie beyond its tensor.
    """
    x = x.contiguous()
    heads, rows = (max(size, 1) for size in x.shape[-2:])
    own = (heads * rows, rows, 1)[-x.dim() :]
    return x if x.stride() == own else x.as_strided(x.shape, own)


def _like(x: torch.Tensor, gaps: bool) -> torch.Tensor:
    make = torch.zeros if gaps else torch.empty
    return make(x.shape, dtype=x.dtype, device=x.device)


def finished(
    call: Call, tensors: dict[str, torch.Tensor], head_dim: int, head_dim_v: int
) -> Gradients:
    """What the kernels left in the tensors of ``gradients``, of heads as they were given."""
    dsinks = None
    if call.sinks is not None:
        dsinks = tensors["dsinks"].sum((0, 2) if tensors["lse"].dim() == 3 else 1)
    dq, dk, dv = (tensors[name] for name in ("dq", "dk", "dv"))
    return Gradients(dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v], None, dsinks)
