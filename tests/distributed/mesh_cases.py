"""Attention on DTensors, in a worker, against the same on whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pyfa

PLACEMENTS = {
    "batch": [Shard(0)],
    "rows": [Shard(1)],
    "heads": [Shard(2)],
    "all": [Replicate()],
    "batch, heads": [Shard(0), Shard(2)],
    "heads, heads": [Shard(2), Shard(2)],
}
_ROWS, _KEYS, _DIM = 24, 40, 16


def _mesh(dims: int) -> DeviceMesh | None:
    """Of 2 ranks in each dimension; None in ranks outside. All ranks have to make it."""
    mesh = init_device_mesh("cpu", (2,) * dims)
    return None if mesh.get_coordinate() is None else mesh


def differing(
    placed: str, batch: int, heads: int, heads_k: int, terms: tuple[str, ...], plain: bool
) -> list[str]:
    """What differs from the whole: output, LSE and each gradient, each with its largest error; and,
    beginning with "placed", where the output lies.

    ``plain``: ALiBi slopes, bias and sinks are no DTensors.
    """
    placements = PLACEMENTS[placed]
    mesh = _mesh(len(placements))
    if mesh is None:
        return []
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(batch, _ROWS, heads, _DIM),
        "k": torch.randn(batch, _KEYS, heads_k, _DIM),
        "v": torch.randn(batch, _KEYS, heads_k, _DIM),
    }
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if "dropout" in terms:
        options |= {"dropout_p": 0.3, "seed": 7}
    if "mod" in terms:
        options["score_mod"] = lambda score, b, h, i, j: score * (1 + h) + b
    others = {
        "sinks": torch.randn(heads),
        "bias": torch.randn(batch, 1, _ROWS, _KEYS),
        "bias of heads": torch.randn(1, heads, _ROWS, _KEYS),
        "alibi_slopes": torch.rand(batch, heads),
        "alibi of heads": torch.rand(heads),
    }
    tensors |= {name.split()[0]: x for name, x in others.items() if name in terms}
    if "alibi" in tensors:
        tensors["alibi_slopes"] = tensors.pop("alibi")

    def run(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = {name: x.detach().requires_grad_("alibi" not in name) for name, x in given.items()}
        out, lse = pyfa.attention(**leaves, **options)
        asked = [x for name, x in leaves.items() if x.requires_grad]
        loss = (out * out).sum() + lse.sum()
        return [out, lse, *torch.autograd.grad(loss, asked)]

    whole = run(tensors)
    sharded = run(
        {
            name: x
            if plain and name not in ("q", "k", "v")
            else distribute_tensor(x, mesh, placements if name in ("q", "k", "v") else None)
            for name, x in tensors.items()
        }
    )
    names = ["out", "lse", *(name for name in tensors if "alibi" not in name)]
    found = []
    for name, x, y in zip(names, sharded, whole, strict=True):
        x = x.full_tensor() if isinstance(x, DTensor) else x
        error = (x - y).abs().max().item()
        if not error < 2e-5 * max(1.0, y.abs().max().item()):
            found.append(f"{name}: {error}")
    return [*found, f"placed {', '.join(map(str, sharded[0].placements))}"]


def packed(placed: str) -> list[str]:
    """Packed sequences, whose heads alone may be shared out."""
    placements = {"heads": [Shard(1)], "rows": [Shard(0)]}[placed]
    mesh = _mesh(1)
    if mesh is None:
        return []
    torch.manual_seed(0)
    q, k, v = (torch.randn(50, heads, _DIM) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 20, 20, 50], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "return_lse": True}

    def run(*leaves: torch.Tensor) -> list[torch.Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        out, lse = pyfa.attention_varlen(*leaves, offsets, offsets, 30, 30, **options)
        return [out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), leaves)]

    whole = run(q, k, v)
    found = run(*(distribute_tensor(x, mesh, placements) for x in (q, k, v)))
    same = all(
        torch.allclose(x.full_tensor(), y, atol=2e-5) for x, y in zip(found, whole, strict=True)
    )
    return [str(same), *map(str, found[0].placements)]


def decode(placed: str) -> list[str]:
    """A paged cache with lengths."""
    placements = PLACEMENTS[placed]
    mesh = _mesh(len(placements))
    if mesh is None:
        return []
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 4, _DIM), torch.randn(6, 8, 2, _DIM), torch.randn(6, 8, 2, _DIM)
    pages = torch.tensor([[0, 2, 4], [5, 3, 1]], dtype=torch.int32)
    used = torch.tensor([20, 9], dtype=torch.int32)
    whole = pyfa.attention_kvcache(q, k, v, cache_seqlens=used, page_table=pages)
    of_pages = [p if p == Shard(2) else Replicate() for p in placements]
    found = pyfa.attention_kvcache(
        distribute_tensor(q, mesh, placements),
        *(distribute_tensor(x, mesh, of_pages) for x in (k, v)),
        cache_seqlens=used,
        page_table=pages,
    )
    same = torch.allclose(found.full_tensor(), whole, atol=2e-5)
    return [str(same), *map(str, found.placements)]
