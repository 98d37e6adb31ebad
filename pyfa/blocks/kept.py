"""A cache of block lists, valid until something that they depend on changes.

A list depends on the mask_mod, on sizes, and on the captured tensors: their memory, their offset in
it, and PyTorch's count of in-place changes. The cache holds weak references, so that the identity
of freed memory is not reused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from .. import _torch
from ..mods import Function
from ..problem import Call
from .build import asks_for

_Made = TypeVar("_Made")
_MOST, _MOST_BYTES = 256, 1 << 29


class _Entry(NamedTuple):
    made: Any
    storages: tuple[_torch.StorageRef, ...]
    size: int


_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_lock = threading.Lock()


def find(call: Call, mask: Function, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return ``make()`` for the ``mask`` of ``call``, cached."""
    slots = sorted({int(op.value or 0) for op in mask.ops if op.name == "load"})
    captured = call.captured
    used = [captured[slot] for slot in slots]
    sizes: tuple[Hashable, ...] = (call.max_seqlen_q, call.max_seqlen_k, call.q_start, call.k_start)
    if asks_for(mask, "b"):
        sizes += ("b", call.batch, call.batch_start)
    if asks_for(mask, "h"):
        sizes += ("h", call.q.shape[-2], call.head_start)
    return keep((call.mods, what, sizes), call.q.device, used, make)


def keep(
    key: Hashable, device: torch.device, used: list[torch.Tensor], make: Callable[[], _Made]
) -> _Made:
    """Return ``make()``, cached under ``key`` until the values of ``used`` change, per stream.
    Tensors in the result must be on ``device``."""
    states = _states_of(device, used)
    if states is None:
        return make()
    whole = (key, states)
    with _lock:
        found = _entries.get(whole)
        if found is not None:
            _entries.move_to_end(whole)
            made: _Made = found.made
            return made
    made = make()
    storages = tuple(_torch.StorageRef(x) for x in used)
    tensors = made if isinstance(made, tuple) else (made,)
    size = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
    with _lock:
        for old in [k for k, e in _entries.items() if any(s.is_gone() for s in e.storages)]:
            del _entries[old]
        _entries[whole] = _Entry(made, storages, size)
        while len(_entries) > _MOST or sum(e.size for e in _entries.values()) > _MOST_BYTES:
            if len(_entries) == 1:
                break
            _entries.popitem(last=False)
    return made


def clear() -> None:
    """Empty the cache."""
    with _lock:
        _entries.clear()


def _states_of(device: torch.device, used: list[torch.Tensor]) -> Hashable | None:
    """Return a key that identifies the tensors in ``used`` and their values. Return None if there
    is no such key: PyTorch does not count the changes of an inference_mode tensor, and a captured
    graph runs again with other values."""
    stream = 0
    if device.type == "cuda":
        if _torch.is_capturing():
            return None
        index = device.index if device.index is not None else _torch.current_device()
        stream = _torch.current_stream(index)
    found: list[Hashable] = [device, stream]
    for x in used:
        if x.is_inference() or not _torch.has_storage(x):
            return None
        found.append(
            (
                _torch.storage_number(x), x._version, x.storage_offset(), x.shape, x.stride(),
                x.dtype, x.data_ptr(),
            )
        )  # fmt: skip
    return tuple(found)
