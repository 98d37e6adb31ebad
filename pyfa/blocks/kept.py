"""A cache of block lists, valid until something that they depend on changes.

A list depends on the mask_mod, on sizes, and on the captured tensors: their memory, their offset in
it, and PyTorch's count of in-place changes. The cache holds weak references, so that the identity
of freed memory is not reused.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .. import _torch
from ..mods import Function
from ..problem import Call, Form
from .build import asks_for

_Made = TypeVar("_Made")
_MOST, _MOST_BYTES = 256, 1 << 29


# The oldest entries, which are looked at with each new one: looking at all took 100 µs, at eight a
# third of a new document map's time on the host. One of each two may be gone, so that what is gone
# becomes less even where every call has new tensors.
_LOOKED_AT = 2


class _Entry(NamedTuple):
    made: Any
    versions: list[int]
    storages: tuple[_torch.StorageRef, ...]
    size: int


class _Needs(NamedTuple):
    """The properties that the lists of a mask_mod depend on: captured tensors, sequences, heads."""

    slots: list[int]
    batch: bool
    heads: bool


_known: dict[str, _Needs] = {}  # by digest, as long as the mods themselves are kept
# Numbers that stand for questions in keys: a key is hashed several times for a new entry. No number
# is used again, so that clearing these loses no more than entries.
_numbers: dict[Hashable, int] = {}
_next = itertools.count()
_MOST_NUMBERS = 4096
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_bytes = 0
_lock = threading.Lock()


def find(call: Call, mask: Function, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return ``make()`` for the ``mask`` of ``call``, cached."""
    key, slots = _question(call, mask, what)
    captured = call.captured
    return keep(key, call.q.device, [captured[slot] for slot in slots], make)


def _question(call: Call, mask: Function, what: Hashable) -> tuple[Hashable, list[int]]:
    """Return a key for everything except tensors that an entry depends on, and the slots of the
    captured tensors that it depends on."""
    needs = _known.get(call.mods)
    if needs is None:
        slots = sorted({int(op.value or 0) for op in mask.ops if op.name == "load"})
        needs = _known[call.mods] = _Needs(slots, asks_for(mask, "b"), asks_for(mask, "h"))
    sizes: tuple[Hashable, ...] = (call.max_seqlen_q, call.max_seqlen_k, call.q_start, call.k_start)
    if needs.batch:
        sizes += ("b", call.batch, call.batch_start)
    if needs.heads:
        sizes += ("h", call.q.shape[-2], call.head_start)
    question = (call.mods, what, sizes)
    number = _numbers.get(question)
    if number is None:
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        number = _numbers.setdefault(question, next(_next))
    return number, needs.slots


class Bound(Generic[_Made]):
    """``find`` for the tensors of calls that are like ``call`` in all but values and addresses.

    A repeated call uses this instead of ``find``: it needs no ``Call``, and whatever does not
    change is looked up only once. ``make`` is given the tensors, in the order of ``form``.
    """

    def __init__(
        self,
        call: Call,
        form: Form,
        mask: Function,
        what: Hashable,
        make: Callable[[Sequence[torch.Tensor]], _Made],
    ) -> None:
        self._key, slots = _question(call, mask, what)
        self._used = [form.names.index(f"captured{slot}") for slot in slots]
        self._device, self._make = call.q.device, make

    def __call__(self, tensors: Sequence[torch.Tensor]) -> _Made:
        used = [tensors[number] for number in self._used]
        return keep(self._key, self._device, used, lambda: self._make(tensors))


def keep(
    key: Hashable, device: torch.device, used: list[torch.Tensor], make: Callable[[], _Made]
) -> _Made:
    """Return ``make()``, cached under ``key`` until the values of ``used`` change, per stream.
    Tensors in the result must be on ``device``."""
    states = _states_of(device, used)
    if states is None:
        return make()
    place, versions = states
    whole = (key, *place)
    with _lock:
        found = _entries.get(whole)
        if found is not None and found.versions == versions:
            _entries.move_to_end(whole)
            made: _Made = found.made
            return made
    made = make()
    storages = tuple([_torch.StorageRef(x) for x in used])
    tensors = made if isinstance(made, tuple) else (made,)
    size = sum([x.nbytes for x in tensors if isinstance(x, torch.Tensor)])
    with _lock:
        _add(whole, _Entry(made, versions, storages, size))
    return made


def _add(whole: Hashable, entry: _Entry) -> None:
    """Add ``entry``, in place of one for older values. Drop entries whose tensors are gone, and the
    oldest beyond the limits."""
    global _bytes
    replaced = _entries.pop(whole, None)
    _bytes += entry.size - (0 if replaced is None else replaced.size)
    for old, found in tuple(itertools.islice(_entries.items(), _LOOKED_AT)):
        for storage in found.storages:
            if storage.is_gone():
                del _entries[old]
                _bytes -= found.size
                break
        else:
            _entries.move_to_end(old)  # or those behind it would never be looked at
    _entries[whole] = entry
    while len(_entries) > 1 and (len(_entries) > _MOST or _bytes > _MOST_BYTES):
        _bytes -= _entries.popitem(last=False)[1].size


def clear() -> None:
    """Empty the cache."""
    global _bytes
    with _lock:
        _entries.clear()
        _bytes = 0


def _states_of(
    device: torch.device, used: list[torch.Tensor]
) -> tuple[tuple[Hashable, ...], list[int]] | None:
    """Return what identifies the tensors in ``used``, and their values. Return None if nothing
    does: PyTorch does not count the changes of an inference_mode tensor, and a captured graph runs
    again with other values."""
    index: int | None = device.index
    stream = 0
    if device.type == "cuda":
        if _torch.is_capturing():
            return None
        if index is None:
            index = _torch.current_device()
        stream = _torch.current_stream(index)
    found: tuple[Hashable, ...] = (device.type, index, stream)
    versions = []
    for x in used:
        if x.is_inference() or not _torch.has_storage(x):
            return None
        found += (
            _torch.storage_number(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.data_ptr()
        )  # fmt: skip
        versions.append(x._version)
    return found, versions
