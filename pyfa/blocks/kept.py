"""A cache of block lists, valid until something that they depend on changes.

A list depends on the mask_mod, on sizes, and on the captured tensors: their memory, their offset in
it, and PyTorch's count of in-place changes. The cache holds weak references, so that the identity
of freed memory is not reused.

Where every call has a new tensor, such as a document map per training step, a ``Bound`` writes its
new lists into the memory of older ones that nobody can ask for again: those of a tensor that is
gone, or of older values of the same tensor. This needs no allocation. It is safe because an entry
belongs to one stream: kernels that were launched with the older lists come first on it. A captured
graph is never given kept lists.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
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
# Entries of a bound call, besides its last one, whose memory it may write again, and how many of
# them each new tensor looks at. Of 16 maps that are alive together, as those of a step that
# accumulates gradients, a call took 14.0 µs on a CPU with 8 of which one is looked at, and 11.9
# with these.
_MOST_OLDER, _TRIED = 64, 2

# The number of the storage and the address of each captured tensor.
_Place = tuple[int, ...]
# A place, and how often the values of each captured tensor changed.
_State = tuple[_Place, tuple[int, ...]]


class _Entry:
    """``made`` for the tensors of ``state``, on ``stream``. The state is None while ``made`` is
    written again, and ``made`` is None in an entry that was dropped. Bound calls hold entries that
    other threads may change, so that ``made`` must be read before the state."""

    __slots__ = ("made", "size", "state", "storages", "stream", "whole")

    def __init__(
        self, whole: Hashable, stream: int, made: Any, storages: list[_torch.StorageRef]
    ) -> None:
        self.whole, self.stream, self.made, self.storages = whole, stream, made, storages
        self.state: _State | None = None
        self.size = 0
        for x in made if isinstance(made, tuple) else (made,):
            if isinstance(x, torch.Tensor):
                self.size += x.nbytes


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


def find(
    call: Call, mask: Function, what: Hashable, make: Callable[[], _Made], by_value: bool = True
) -> _Made:
    """Return ``make()`` for the ``mask`` of ``call``, cached. Without ``by_value`` it does not
    depend on captured tensors."""
    key, slots = _question(call, mask, what, by_value)
    captured = call.captured
    return keep(key, call.q.device, [captured[slot] for slot in slots], make)


def _question(
    call: Call, mask: Function, what: Hashable, by_value: bool
) -> tuple[Hashable, list[int]]:
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
    return (call.mods, what, sizes), needs.slots if by_value else []


def _number_of(key: Hashable, device: torch.device, used: Sequence[torch.Tensor]) -> int:
    """Return a number for ``key``, the device, and all that is known of the tensors in ``used``
    besides their place and values."""
    kinds = tuple([(x.shape, x.stride(), x.dtype) for x in used])
    question = (key, device.type, _index_of(device), kinds)
    number = _numbers.get(question)
    if number is None:
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        number = _numbers.setdefault(question, next(_next))
    return number


_NOTHING = _Entry((), -1, None, [])


class Bound(Generic[_Made]):
    """``find`` for the tensors of calls that are like ``call`` in all but values and addresses.

    A repeated call uses this instead of ``find``: it needs no ``Call``, and whatever does not
    change is looked up only once. ``make`` is given the tensors, in the order of ``form``, and an
    earlier result, whose memory it may write and return again, or None.
    """

    def __init__(
        self,
        call: Call,
        form: Form,
        mask: Function,
        what: Hashable,
        make: Callable[[Sequence[torch.Tensor], _Made | None], _Made],
        by_value: bool = True,
    ) -> None:
        key, slots = _question(call, mask, what, by_value)
        used, device = [call.captured[slot] for slot in slots], call.q.device
        self._key = _number_of(key, device, used)
        self._used = [form.names.index(f"captured{slot}") for slot in slots]
        self._alone = self._used[0] if len(self._used) == 1 else None
        self._index = _index_of(device) if device.type == "cuda" else None
        # Other tensors of such calls are like these in whether they have a state.
        self._has_state = _state_of(used) is not None
        self._make, self._last = make, _NOTHING
        self._older: deque[_Entry] = deque(maxlen=_MOST_OLDER)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> _Made:
        stream, index = 0, self._index
        if index is not None:
            if _torch.is_capturing():
                return self._make(tensors, None)
            stream = _torch.current_stream(index)
        if not self._has_state:
            return self._make(tensors, None)
        if self._alone is not None:
            x = tensors[self._alone]
            state: _State = (_torch.storage_number(x), x.data_ptr()), (x._version,)
        else:
            place: _Place = ()
            versions: tuple[int, ...] = ()
            for number in self._used:
                x = tensors[number]
                place += (_torch.storage_number(x), x.data_ptr())
                versions += (x._version,)
            state = place, versions
        last = self._last
        made: _Made = last.made
        if last.state == state and last.stream == stream and made is not None:
            return made
        return self._other(tensors, stream, state)

    def _other(self, tensors: Sequence[torch.Tensor], stream: int, state: _State) -> _Made:
        """Return what belongs to other tensors than the last call's, or to other values."""
        whole, is_moved = (self._key, stream, state[0]), False
        with _lock:
            entry = _entries.get(whole)
            if entry is None:
                entry, is_moved = self._gone(stream), True
                if entry is not None:
                    del _entries[entry.whole]
                    _entries[whole] = entry
                    entry.whole = whole
            elif entry.state == state:
                _entries.move_to_end(whole)
                self._set_last(entry)
                same: _Made = entry.made
                return same
            elif entry.state is None:  # another thread writes it
                entry = None
            # What is left has older values, for which nobody asks again.
            if entry is not None:
                entry.state = None  # from here on this thread alone writes it
                older: _Made = entry.made
        if entry is None:
            return self._added(tensors, stream, state, self._make(tensors, None))
        if is_moved:
            for at, storage in enumerate(entry.storages):
                storage.set(tensors[self._used[at]])
        made = self._make(tensors, older)
        if made is not older:  # it could not write there
            return self._added(tensors, stream, state, made)
        entry.state = state
        if entry is not self._last:
            self._set_last(entry)
        return made

    def _gone(self, stream: int) -> _Entry | None:
        """Return an entry of this stream whose tensors are gone, if there is one: the last, or the
        oldest. It is called under the lock."""
        last, older = self._last, self._older
        if (
            last.stream == stream
            and last.state is not None
            and last.made is not None
            and _torch.are_any_gone(last.storages)
        ):
            return last
        for _ in range(min(len(older), _TRIED)):
            entry = older.popleft()
            if entry.state is not None and entry.made is not None:
                if entry.stream == stream and _torch.are_any_gone(entry.storages):
                    return entry
                older.append(entry)  # so that another one is looked at the next time
        return None

    def _set_last(self, entry: _Entry) -> None:
        if self._last.made is not None:
            self._older.append(self._last)
        self._last = entry

    def _added(
        self, tensors: Sequence[torch.Tensor], stream: int, state: _State, made: _Made
    ) -> _Made:
        storages = []
        for number in self._used:
            storages.append(_torch.StorageRef(tensors[number]))
        entry = _Entry((self._key, stream, state[0]), stream, made, storages)
        with _lock:
            _add(entry, state)
        self._set_last(entry)
        return made


def keep(
    key: Hashable, device: torch.device, used: list[torch.Tensor], make: Callable[[], _Made]
) -> _Made:
    """Return ``make()``, cached under ``key`` until the values of ``used`` change, per stream.
    Tensors in the result must be on ``device``."""
    stream_and_state = _states_of(device, used)
    if stream_and_state is None:
        return make()
    stream, state = stream_and_state
    whole = (_number_of(key, device, used), stream, state[0])
    with _lock:
        found = _entries.get(whole)
        if found is not None and found.state == state:
            _entries.move_to_end(whole)
            same: _Made = found.made
            return same
    made = make()
    entry = _Entry(whole, stream, made, [_torch.StorageRef(x) for x in used])
    with _lock:
        _add(entry, state)
    return made


# The following two are called under the lock.


def _add(entry: _Entry, state: _State) -> None:
    """Add ``entry``, in place of one for older values. Drop those of the oldest entries whose
    tensors are gone, and the oldest beyond the limits."""
    global _bytes
    replaced = _entries.get(entry.whole)
    if replaced is not None:
        _drop(replaced)
    for old, found in tuple(itertools.islice(_entries.items(), _LOOKED_AT)):
        if found.state is not None and _torch.are_any_gone(found.storages):
            _drop(found)
        else:
            _entries.move_to_end(old)  # or those behind it would never be looked at
    _entries[entry.whole] = entry
    _bytes += entry.size
    entry.state = state
    while len(_entries) > 1 and (len(_entries) > _MOST or _bytes > _MOST_BYTES):
        _drop(next(iter(_entries.values())))


def _drop(entry: _Entry) -> None:
    global _bytes
    del _entries[entry.whole]
    _bytes -= entry.size
    entry.state = None
    entry.made = None


def clear() -> None:
    """Empty the cache."""
    with _lock:
        for entry in tuple(_entries.values()):
            _drop(entry)


_this_thread = threading.local()


def is_uncounted() -> bool:
    """Return whether this thread is inside of ``uncounted``."""
    return getattr(_this_thread, "depth", 0) > 0


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Keep nothing that depends on captured tensors, on this thread.

    In code of torch.compile a buffer may hold one document map after another: compiled kernels
    write to its address, and PyTorch counts no change.
    """
    _this_thread.depth = getattr(_this_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _this_thread.depth -= 1


def _index_of(device: torch.device) -> int | None:
    """Return the index of a device, or that of the current GPU if ``device`` has none."""
    index: int | None = device.index
    return _torch.current_device() if index is None and device.type == "cuda" else index


def _states_of(device: torch.device, used: list[torch.Tensor]) -> tuple[int, _State] | None:
    """Return the stream, and what identifies the tensors in ``used`` and their values. Return None
    if nothing does: a captured graph runs again with other values."""
    stream, index = 0, _index_of(device)
    if device.type == "cuda" and index is not None:
        if _torch.is_capturing():
            return None
        stream = _torch.current_stream(index)
    state = _state_of(used)
    return None if state is None else (stream, state)


def _state_of(used: list[torch.Tensor]) -> _State | None:
    """Return what identifies the tensors in ``used`` and their values. Return None if nothing does:
    PyTorch does not count the changes of an inference_mode tensor, nor those that compiled code
    makes."""
    if used and is_uncounted():
        return None
    place: _Place = ()
    versions: tuple[int, ...] = ()
    for x in used:
        if x.is_inference() or not _torch.has_storage(x):
            return None
        place += (_torch.storage_number(x), x.data_ptr())
        versions += (x._version,)
    return place, versions
