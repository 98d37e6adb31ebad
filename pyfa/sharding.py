"""Sharding rules of attention's operators for DTensors on a mesh.

Sequences and heads are independent of each other, so a mesh dimension shards the batch or the
heads, or replicates. DTensor redistributes any other placement first. The rules are registered when
the first DTensor is passed, because importing torch.distributed.tensor takes 0.3 s.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from .mods import MOST_CAPTURED
from .problem import TENSORS, Call

_GRADIENTS = ("q", "k", "v", "bias", "sinks")
_OF_SEQUENCES = ("seqused_q", "seqused_k", "page_table", "cache_batch_idx", "cache_leftpad")
_Row = tuple[list[Any], list[Any]]
# The placement of a tensor, by its name in a call.
_Place = Callable[[str, Any], Any]


def prepared(call: Call) -> Call:
    """Return ``call`` in the form that the operators accept: if q is a DTensor, plain tensors
    become replicated DTensors. Other calls are returned unchanged."""
    found = sys.modules.get("torch.distributed.tensor")
    if found is None or not isinstance(call.q, found.DTensor):
        return call
    _register()
    mesh = call.q.device_mesh
    everywhere = [found.Replicate()] * mesh.ndim
    tensors: list[Any] = [
        found.DTensor.from_local(x, mesh, everywhere, run_check=False)
        if type(x) is torch.Tensor or type(x) is torch.nn.Parameter
        else x
        for x in call[:TENSORS]
    ]
    numbers: list[Any] = [*call[TENSORS:]]
    return Call(*tensors, *numbers)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.pyfa.forward.default)(_forward)
    register_sharding(torch.ops.pyfa.backward.default)(_backward)


def _forward(*args: Any) -> list[_Row]:
    call = Call(*args[: len(Call._fields)])
    rest = [None] * (len(args) - TENSORS)
    return [
        ([place("q", call.q), place("lse", call.q)], [*_inputs(call, place), *rest])
        for place in _ways(call)
    ]


def _backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any) -> list[_Row]:
    from torch.distributed.tensor import Replicate

    call, bias_grad = Call(*args[: len(Call._fields)]), args[-1]
    rest = [None] * (len(args) - TENSORS)
    found = []
    for place in _ways(call):
        of_lse = place("lse", lse)
        given = [place("q", dout), None if dlse is None else of_lse, place("q", out), of_lse]
        gradients = [_gradient(call, name, place, bias_grad) for name in _GRADIENTS]
        # With mods, every rank computes all of these gradients. Without mods, they are empty
        # tensors.
        gradients += [Replicate()] * MOST_CAPTURED
        found.append((gradients, [*given, *_inputs(call, place), *rest]))
    return found


def _inputs(call: Call, place: _Place) -> list[Any]:
    """Return the placements of the tensors of ``call``, None for those that it lacks."""
    named = zip(Call._fields[:TENSORS], call[:TENSORS], strict=True)
    return [None if x is None else place(name, x) for name, x in named]


def _gradient(call: Call, name: str, place: _Place, bias_grad: bool) -> Any:
    from torch.distributed.tensor import Partial, Replicate

    x = getattr(call, name)
    if x is None or (name == "bias" and not bias_grad):
        return Replicate()  # of an empty tensor
    placed = place(name, x)
    # Ranks that share it have each seen some of the sequences or heads.
    return Partial() if placed.is_replicate() and place("q", call.q).is_shard() else placed


def _ways(call: Call) -> list[_Place]:
    """Return the ways in which one dimension of the mesh can place the tensors of ``call``."""
    from torch.distributed.tensor import Replicate, Shard

    def placed(dim_of: Callable[[str, Any], int | None]) -> _Place:
        def place(name: str, x: Any) -> Any:
            dim = dim_of(name, x)
            return Replicate() if dim is None else Shard(dim)

        return place

    found = [placed(lambda name, x: None)]
    # Dropout and mods count heads and sequences of the whole problem. Values are a view of a
    # latent cache, which DTensor may move apart.
    if call.dropout_p or call.mods or call.latent:
        return found
    if _heads_split(call):
        found.append(placed(lambda name, x: _head_dim(call, name, x)))
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None:
        found.append(placed(lambda name, x: _batch_dim(call, name, x)))
    return found


def _heads_split(call: Call) -> bool:
    """Return whether every share of the mesh that can hold KV heads holds whole groups of heads."""
    heads_k, spec = call.k.shape[-2], cast(Any, call.k)
    for count in range(1, spec.mesh.ndim + 1):
        for sizes in itertools.combinations(spec.mesh.shape, count):
            ranks = math.prod(sizes)
            # DTensor itself leaves out a dimension that is shorter than its ranks are many.
            if ranks <= heads_k and heads_k % ranks:
                return False
    return True


def _head_dim(call: Call, name: str, x: Any) -> int | None:
    """Return the head dimension of a tensor; None if it is replicated."""
    if name == "q":
        return len(call.q.shape) - 2
    if name == "lse":
        return 1 if call.cu_seqlens_q is None else 0
    if name in ("k", "v", "q_descale", "k_descale", "v_descale"):
        of_keys = len(call.k.shape) - 2 if name in ("k", "v") else 1
        return of_keys if call.k.shape[-2] > 1 else None
    if name == "alibi_slopes":
        return len(x.shape) - 1
    if name == "bias":
        return 1 if x.shape[1] > 1 else None
    return 0 if name == "sinks" else None


def _batch_dim(call: Call, name: str, x: Any) -> int | None:
    """Return the sequence (batch) dimension of a tensor; None if it is replicated."""
    pooled = call.page_table is not None or call.cache_batch_idx is not None
    if name in ("q", "lse") or name in _OF_SEQUENCES:
        return 0
    if name in ("k", "v", "q_descale", "k_descale", "v_descale"):
        return None if pooled else 0
    if name == "alibi_slopes":
        return 0 if len(x.shape) == 2 else None
    if name == "bias":
        return 0 if x.shape[0] > 1 else None
    return None
