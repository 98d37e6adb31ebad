"""In a worker: attention over ranks as a function of whole tensors, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import workers
from torch.distributed.device_mesh import DeviceMesh

from pyfa.conformance import Case, examine
from pyfa.conformance.build import build
from pyfa.distributed import ring, ring_attention, shard, ulysses_attention, unshard

_meshes: dict[tuple[int, int], DeviceMesh] = {}


def case_of(options: Mapping[str, Any], *, lengths: tuple[int, ...], **defaults: Any) -> Case:
    """The case of ``options``, with a backward and as many keys as queries unless they differ."""
    options = dict(options)
    lengths = options.pop("lengths", lengths)
    whole = {"lengths_q": lengths, "lengths_k": lengths, "backward": True, **defaults}
    return Case(**{**whole, **options})


def mesh(ring: int, heads: int) -> DeviceMesh:
    """(ring, heads) of the first ring · heads ranks. Made by all ranks of the world together."""
    if (ring, heads) not in _meshes:
        ranks = torch.arange(ring * heads).reshape(ring, heads)
        _meshes[ring, heads] = DeviceMesh(
            workers.device().type, ranks, mesh_dim_names=("ring", "heads")
        )
    return _meshes[ring, heads]


class _Summed(torch.autograd.Function):
    """The same, with a gradient that is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.float().contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gathered(torch.autograd.Function):
    """unshard, with the gradient that each rank gets its rows'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, how: dict[str, Any], total: Any) -> Any:
        ctx.dim, ctx.how, ctx.total = dim, how, total
        with torch.no_grad():
            return unshard(x, dim=dim, **how, **total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = {name: value for name, value in ctx.total.items() if name != "seqlen"}
        return shard(grad, dim=ctx.dim, **ctx.how, **total), None, None, None


class Way:
    """How ranks share a sequence: "ring", n, sharding; "ulysses", n; or "mesh", ring, heads."""

    def __init__(self, kind: str, *sizes: Any) -> None:
        self.kind = kind
        self.function: Any = ulysses_attention if kind == "ulysses" else ring_attention
        self.how: dict[str, Any]
        if kind == "ring":
            self.group = workers.group(sizes[0])
            self.how = self.options = {"group": self.group, "sharding": sizes[1]}
        elif kind == "ulysses":
            self.group = workers.group(sizes[0])
            self.options = {"group": self.group}
            self.how = {"group": self.group, "sharding": "contiguous"}
        else:
            self.group = workers.group(sizes[0] * sizes[1])
            self.how = self.options = {"mesh": mesh(*sizes)}

    def attention(self, q: Any, k: Any, v: Any, **others: Any) -> Any:
        """``pyfa.attention`` of whole tensors, or of packed ones with ``cu_seqlens_q``."""
        packed = "cu_seqlens_q" in others
        dim = 0 if packed else 1
        of_q: dict[str, Any] = {"seqlen": q.shape[dim]}
        of_k: dict[str, Any] = {"seqlen": k.shape[dim]}
        lengths = {"seqlen_q": q.shape[dim], "seqlen_k": k.shape[dim]}
        if packed:
            if self.kind != "ulysses":  # which cuts a packed batch as if it were one sequence
                of_q, of_k = ({"cu_seqlens": others[f"cu_seqlens_{side}"]} for side in "qk")
            lengths = {name: others.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
            others = {name: x for name, x in others.items() if not name.startswith("max_seqlen")}
        local = []
        for x, total in ((q, of_q), (k, of_k), (v, of_k)):
            total = {name: value for name, value in total.items() if name != "seqlen"}
            local.append(shard(_Summed.apply(x, self.group), dim=dim, **self.how, **total))
        if others.get("sinks") is not None:
            others["sinks"] = _Summed.apply(others["sinks"], self.group)
        result = self.function(*local, **self.options, **lengths, **others)
        if not others.get("return_lse"):
            return _Gathered.apply(result, dim, self.how, of_q)
        out, lse = result
        row = 1 if packed else 2
        return (
            _Gathered.apply(out, dim, self.how, of_q),
            _Gathered.apply(lse, row, self.how, of_q),
        )


class _Elsewhere(Exception):
    """What is expected is looked at on rank 0 alone."""


class _Nothing(examine.Expected):
    @property
    def ref(self) -> Any:  # type: ignore[override]
        raise _Elsewhere


def examined(case: Case, *way: Any, backend: str = "torch", least: int | None = None) -> list[str]:
    """What the conformance suite finds wrong with ``case``, on rank 0.

    ``least``: the elements of queries that go round together.
    """
    attention = Way(*way)
    if dist.get_rank(attention.group) < 0:
        return []
    examine._FUNCTIONS = dict.fromkeys(examine._FUNCTIONS, attention.attention)
    inputs = build(case)
    usual, ring.LEAST_ELEMENTS = ring.LEAST_ELEMENTS, least or ring.LEAST_ELEMENTS
    expected = (examine.Expected if dist.get_rank() == 0 else _Nothing)(inputs)
    try:
        found = examine.examine(expected, backend, workers.device())
    except _Elsewhere:
        return []
    finally:
        ring.LEAST_ELEMENTS = usual
    return [check.message for check in found.checks if not check.passed]
