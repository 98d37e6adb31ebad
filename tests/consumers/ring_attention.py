"""ring-flash-attn on two gloo ranks with `pyfa compat`, forward and backward, against the whole.

Its schedules: ring, zigzag, stripe, ring over packed sequences, and Llama 3's with gathered keys.
Inputs are float16, the whole is float32 of the same values. Most schedules round dq to bfloat16
whatever the inputs are. Float32 inputs would not do: ``to(float32)`` then copies nothing there, and
the second block's gradients overwrite the first's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from checks import check
from transformers import modeling_flash_attention_utils

import pyfa

# Asked for by ring-flash-attn 0.1.8 while it is imported; transformers 5 has it no more.
if not hasattr(modeling_flash_attention_utils, "is_flash_attn_greater_or_equal_2_10"):
    modeling_flash_attention_utils.is_flash_attn_greater_or_equal_2_10 = lambda: True

import ring_flash_attn as package

RANKS = 2
ROWS = 32
# Two steps of the last place: rounded once by a block, once by the sum.
LIMITS = {"out": 2.0**-10, "dq": 2.0**-7, "dk": 2.0**-9, "dv": 2.0**-9}


def chunks(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(RANKS, dim=-3)[rank].contiguous()


def zigzag(x: torch.Tensor, rank: int) -> torch.Tensor:
    parts = x.chunk(2 * RANKS, dim=-3)
    return torch.cat([parts[rank], parts[2 * RANKS - 1 - rank]], dim=-3)


def stripe(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[:, rank::RANKS].contiguous()


def each_sequence(x: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.cat([chunks(part, rank) for part in x.split(SEQUENCES)], dim=0)


SEQUENCES = [20, 12]
Share = Callable[[torch.Tensor, int], torch.Tensor]


def compare(
    name: str, rank: int, share: Share, attend: Callable[..., Any], whole: Callable[..., Any],
    packed: bool,
) -> None:  # fmt: skip
    torch.manual_seed(5)
    lead = (ROWS,) if packed else (2, ROWS)
    heads = (4, 2, 2, 4)
    q, k, v, dout = (torch.randn(*lead, each, 16).half() for each in heads)
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = whole(*wide)
    results = [wanted.detach(), *torch.autograd.grad(wanted, wide, dout.float())]
    mine = [share(x, rank).requires_grad_() for x in (q, k, v)]
    found = attend(*mine)
    made = [found.detach(), *torch.autograd.grad(found, mine, share(dout, rank))]
    for (what, limit), x, y in zip(LIMITS.items(), made, results, strict=True):
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        if rank == 0:
            shares = torch.cat([share(y, r) for r in range(RANKS)], dim=-3)
            check(f"{name}: {what}", torch.cat(parts, dim=-3), shares, limit)


def run(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    offsets = torch.tensor([0, 20, 32], dtype=torch.int32)
    for causal in (False, True):
        word = "causal" if causal else "full"

        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal) -> Any:
            return pyfa.attention(q, k, v, causal=causal)

        def whole_packed(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal
        ) -> Any:
            return pyfa.attention_varlen(q, k, v, offsets, offsets, 20, 20, causal=causal)

        schedules = {"ring": (chunks, package.ring_flash_attn_func)}
        if causal:
            schedules["zigzag"] = (zigzag, package.zigzag_ring_flash_attn_func)
            schedules["stripe"] = (stripe, package.stripe_flash_attn_func)
        for name, (share, function) in schedules.items():
            attend = functools.partial(function, causal=causal)
            compare(f"{name}, {word}", rank, share, attend, whole, False)
        attend = functools.partial(
            package.ring_flash_attn_varlen_func, cu_seqlens=offsets // RANKS, max_seqlen=10,
            causal=causal,
        )  # fmt: skip
        compare(f"packed ring, {word}", rank, each_sequence, attend, whole_packed, True)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        where = package.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, RANKS)
        attend = functools.partial(
            package.llama3_flash_attn_varlen_func, **dict(zip(names, where, strict=True)),
            heads_k_stride=1, causal=causal,
        )  # fmt: skip
        compare(f"llama3, {word}", rank, chunks, attend, whole_packed, True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (29500 + os.getpid() % 1000,), nprocs=RANKS)
