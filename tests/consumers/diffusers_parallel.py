"""diffusers' own context parallelism on two gloo ranks: ring and Ulysses, by "pyfa" and "flash".

A small Flux model whole, and its dispatcher on shards with gradients. diffusers asks how many
accelerators there are, where a CPU has none: it is told one.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from checks import check

import pyfa

RANKS = 2


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip


def run(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.accelerator.device_count = lambda: 1  # type: ignore[method-assign]
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from pyfa.integrations import diffusers as integration

    integration.register()
    torch.manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.ones(2),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    whole = [torch.randn(2, 24, 4, 16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 24, 4, 16)
    wanted = pyfa.attention(*whole)
    grads = torch.autograd.grad(wanted, whole, dout)
    with torch.no_grad():
        alone = flux()(**inputs, return_dict=False)[0]
    for kind in ("ring", "ulysses"):
        for backend in ("pyfa", "flash"):
            model = flux()
            model.set_attention_backend(backend)
            model.enable_parallelism(config=ContextParallelConfig(**{f"{kind}_degree": RANKS}))
            with torch.no_grad():
                out = model(**inputs, return_dict=False)[0]
            (config,) = {
                id(each): each
                for module in model.modules()
                if (each := getattr(getattr(module, "processor", None), "_parallel_config", None))
            }.values()
            mine = [x.detach().chunk(RANKS, 1)[rank].clone().requires_grad_() for x in whole]
            found = dispatch_attention_fn(*mine, backend=backend, parallel_config=config)
            made = torch.autograd.grad(found, mine, dout.chunk(RANKS, 1)[rank])
            if rank == 0:
                check(f"{kind}, {backend}: Flux", out, alone)
                names = ("attention", "dq", "dk", "dv")
                for name, x, y in zip(
                    names, (found.detach(), *made), (wanted.detach(), *grads), strict=True
                ):
                    check(f"{kind}, {backend}: {name} of rank 0", x, y.chunk(RANKS, 1)[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (29500 + os.getpid() % 1000,), nprocs=RANKS)
