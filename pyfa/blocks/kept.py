"""A cache of block lists, valid until something that they depend on changes.

A list depends on the mask_mod, on sizes, and on the captured tensors: their memory, their offset in
it, and PyTorch's count of in-place changes. The cache holds weak references, so that the identity
of freed memory is not reused.
"""

from __future__ import annotations

import itertools
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


# The oldest entries, which are looked at with each new one: looking at all took 100 µs.
_LOOKED_AT = 8


class _Entry(NamedTuple):
    made: Any
    versions: Hashable
    storages: tuple[_torch.StorageRef, ...]
    size: int


class _Needs(NamedTuple):
    """What the lists of a mask_mod depend on: captured tensors, sequences, heads."""

    slots: list[int]
    batch: bool
    heads: bool


_known: dict[str, _Needs] = {}  # by digest, as long as the mods themselves are kept
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_bytes = 0
_lock = threading.Lock()


def find(call: Call, mask: Function, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return ``make()`` for the ``mask`` of ``call``, cached."""
    needs = _known.get(call.mods)
    if needs is None:
        slots = sorted({int(op.value or 0) for op in mask.ops if op.name == "load"})
        needs = _known[call.mods] = _Needs(slots, asks_for(mask, "b"), asks_for(mask, "h"))
    captured = call.captured
    used = [captured[slot] for slot in needs.slots]
    sizes: tuple[Hashable, ...] = (call.max_seqlen_q, call.max_seqlen_k, call.q_start, call.k_start)
    if needs.batch:
        sizes += ("b", call.batch, call.batch_start)
    if needs.heads:
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
    place, versions = states
    whole = (key, place)
    with _lock:
        found = _entries.get(whole)
        if found is not None and found.versions == versions:
            _entries.move_to_end(whole)
            made: _Made = found.made
            return made
    made = make()
    storages = tuple(_torch.StorageRef(x) for x in used)
    tensors = made if isinstance(made, tuple) else (made,)
    size = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
    with _lock:
        _add(whole, _Entry(made, versions, storages, size))
    return made


def _add(whole: Hashable, entry: _Entry) -> None:
    """Add ``entry``, in place of one for older values, and drop what is gone or too much."""
    global _bytes
    dropped = [whole] if whole in _entries else []
    for old in itertools.islice(_entries, _LOOKED_AT):
        if old != whole and any(x.is_gone() for x in _entries[old].storages):
            dropped.append(old)
    for old in dropped:
        _bytes -= _entries.pop(old).size
    _entries[whole] = entry
    _bytes += entry.size
    while len(_entries) > 1 and (len(_entries) > _MOST or _bytes > _MOST_BYTES):
        _bytes -= _entries.popitem(last=False)[1].size


def clear() -> None:
    """Empty the cache."""
    global _bytes
    with _lock:
        _entries.clear()
        _bytes = 0


def _states_of(device: torch.device, used: list[torch.Tensor]) -> tuple[Hashable, Hashable] | None:
    """Return what identifies the tensors in ``used``, and their values. Return None if nothing
    does: PyTorch does not count the changes of an inference_mode tensor, and a captured graph runs
    again with other values."""
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
                _torch.storage_number(x), x.storage_offset(), x.shape, x.stride(), x.dtype,
                x.data_ptr(),
            )
        )  # fmt: skip
    return tuple(found), tuple(x._version for x in used)
