"""The forward kernel: which problems it takes, with which tiles, and its launch."""

from __future__ import annotations

import torch

from ... import abi
from ...plan import Plan
from ...problem import Call, Problem, is_aligned
from . import plans
from .launcher import Launcher

FEATURES = frozenset({"causal", "gqa"})
HEAD_DIMS = (64, 128)
BLOCK_Q = 128
BLOCK_K = 64
THREADS = 256
MAX_BATCH = 65536  # hipModuleLaunchKernel refuses more workgroups in y and in z


def why_not(problem: Problem) -> list[str]:
    """What the kernel lacks for ``problem``, beyond features and dtypes."""
    reasons = []
    if problem.head_dim not in HEAD_DIMS:
        dims = ", ".join(str(dim) for dim in HEAD_DIMS)
        reasons.append(f"head_dim {problem.head_dim} is not one of {dims}")
    if problem.batch > MAX_BATCH:
        reasons.append(f"more than {MAX_BATCH} sequences do not fit into the grid")
    return reasons


def plan(backend: str, problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    constants = {
        "CAUSAL": int("causal" in problem.features),
        "DTYPE": plans.DTYPE_CODES[problem.dtype],
        "HEAD_DIM": problem.head_dim,
    }
    notes = () if problem.aligned else ("q, k and v are copied once: not aligned to 16 bytes",)
    return Plan(backend, "hip/attn_fwd.hip", tuple(sorted(constants.items())), notes)


def all_plans(backend: str) -> list[Plan]:
    return [
        Plan(
            backend,
            "hip/attn_fwd.hip",
            (("CAUSAL", causal), ("DTYPE", dtype), ("HEAD_DIM", dim)),
        )
        for dim in HEAD_DIMS
        for dtype in plans.DTYPE_CODES.values()
        for causal in (0, 1)
    ]


def run(launch: Launcher, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of ``call``."""
    out = call.q.new_empty(call.out_shape())
    lse = call.q.new_empty(call.lse_shape(), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if not is_aligned(call):
        call = call._replace(q=_aligned(call.q), k=_aligned(call.k), v=_aligned(call.v))
    launch(
        plan,
        (-(-call.max_seqlen_q // BLOCK_Q), call.q.shape[-2], call.batch),
        THREADS,
        abi.forward_values(call, out, lse),
        {"q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse},
    )
    return out, lse


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
