"""Block lists: the tiles of keys that a tile of rows visits under a mask_mod.

A list is made for the tile sizes of one kernel. For each tile of rows it names, in ascending order,
the tiles of keys in which the mask_mod leaves any key visible. (If a kernel owns keys and streams
rows, the roles are exchanged.) A tile is *full* if the mask_mod masks nothing in it; there the
kernel does not evaluate the mask_mod. Lists depend on the mask_mod alone: kernels apply windows and
lengths in addition.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import mods
from ..mods import Function
from ..problem import Call, Form
from . import build, kept

__all__ = [
    "FULL",
    "Lists",
    "Tiles",
    "Visits",
    "asks_for",
    "bound_kept_lists",
    "bound_lists",
    "is_exact",
    "keys_visited",
    "lists_of",
    "make_lists",
    "sizes_of",
    "states_across",
    "visits_of",
    "watched",
]

FULL = -(1 << 31)
"""The bit of an entry that says full: its sign."""

Tiles = build.Tiles
asks_for = build.asks_for
keys_visited = build.keys_visited


class Lists(NamedTuple):
    """``counts`` int32 (B', H', tiles) and ``entries`` int32 (B', H', tiles, most), contiguous.

    B' is 1 if the mask_mod does not depend on b, and H' is 1 if it does not depend on h: one list
    then serves all. The first ``counts`` entries of a row are the numbers of the tiles to visit,
    ascending, with the bit ``FULL`` if a tile is full. The remaining entries are ``most``, the
    number of all tiles, which stands for a tile beyond the end.
    """

    counts: torch.Tensor
    entries: torch.Tensor


class Visits(NamedTuple):
    """The number of tiles of a call, over all rows and keys and the leading dimensions (B', H') of
    the lists, and how many of these tiles are partial and how many full. The others are skipped."""

    tiles: int
    partial: int
    full: int

    @property
    def skipped(self) -> int:
        return self.tiles - self.partial - self.full


# Operations whose results differ between PyTorch's operators and compiled code, because compilers
# may fuse or approximate them.
_INEXACT = frozenset(
    ("mul", "div", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos")
)


def is_exact(function: Function) -> bool:
    """Return whether every backend computes the mask_mod with the same bits. Only then do a list
    and the kernel that uses it agree on each key. For any other mask_mod every tile is visited, as
    partial."""
    return not any(op.type == "f" and op.name in _INEXACT for op in function.ops)


@functools.lru_cache(maxsize=1024)
def _is_exact(digest: str) -> bool:
    mask = mods.of(digest).mask
    return mask is not None and is_exact(mask)


def lists_of(call: Call, tiles: Tiles, make: Callable[[Call, Tiles], Lists] | None = None) -> Lists:
    """Return the block lists of ``call``'s mask_mod for ``tiles``: cached ones, or new ones built
    on the current stream by ``make`` or, without ``make``, by PyTorch's operators.

    They are built again if a captured tensor was changed in place.
    """
    mask = mask_of(call)
    if not _is_exact(call.mods):
        sizes, device = build.counts_of(call, tiles), call.q.device
        return kept.find(call, mask, ("all", tiles), lambda: _all_partial(sizes, device), False)

    def made() -> Lists:
        return _watched(call, tiles, (make or make_lists)(call, tiles))

    return kept.find(call, mask, ("lists", tiles), made)


def bound_lists(
    call: Call,
    form: Form,
    tiles: Tiles,
    make: Callable[[Sequence[torch.Tensor], Lists | None], Lists],
) -> Callable[[Sequence[torch.Tensor]], Lists]:
    """Return ``lists_of`` as a function of the tensors of ``form``, for calls that differ from
    ``call`` only in values and addresses. ``make`` is such a function, too; it may write into the
    memory of earlier lists, if it is given some."""
    mask = mask_of(call)

    def watched_make(tensors: Sequence[torch.Tensor], older: Lists | None) -> Lists:
        return _watched(form.fill(tensors)[0], tiles, make(tensors, older))

    if is_exact(mask):
        bound = watched_make if _watchers else make
        return kept.Bound(call, form, mask, ("lists", tiles), bound)
    sizes, device = build.counts_of(call, tiles), call.q.device
    return kept.Bound(
        call, form, mask, ("all", tiles), lambda *_: _all_partial(sizes, device), False
    )


def bound_kept_lists(
    call: Call,
    form: Form,
    what: Hashable,
    make: Callable[[Sequence[torch.Tensor], Lists | None], Lists],
) -> Callable[[Sequence[torch.Tensor]], Lists]:
    """Return ``make``, which makes lists of the kind ``what`` of ``call``'s mask_mod, cached until
    a captured tensor changes. See ``bound_lists``."""
    return kept.Bound(call, form, mask_of(call), what, make)


_Watcher = Callable[[Call, Tiles, Lists], None]
_watchers: list[_Watcher] = []


def _watched(call: Call, tiles: Tiles, lists: Lists) -> Lists:
    for watcher in _watchers:
        watcher(call, tiles, lists)
    return lists


@contextlib.contextmanager
def watched(watcher: _Watcher) -> Iterator[None]:
    """Call ``watcher`` with the lists that are made in this process, except those in which every
    tile is partial because the mask_mod is not exact, and those of calls that repeat a call made
    before without any watcher."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def sizes_of(call: Call, tiles: Tiles) -> tuple[int, int, int, int]:
    """Return the shape of ``Lists.entries``."""
    batch, heads = build.lines_of(call, mask_of(call))
    owned, streamed = build.counts_of(call, tiles)
    return batch, heads, owned, streamed


def states_across(call: Call, rows: int, keys: int) -> list[list[int]]:
    """Return EMPTY, PARTIAL or WHOLE for each tile of rows and keys, combined over all sequences
    and heads: EMPTY if the tile is empty for all of them, WHOLE if it is full for all. Waits for
    the device."""
    mask = mask_of(call)

    def make() -> list[list[int]]:
        with torch.no_grad():
            states = build.states_of(call, mask, Tiles(rows, keys))
        if states.numel() == 0:
            return [[build.EMPTY] * states.shape[3]] * states.shape[2]
        some, whole = states.amax((0, 1)) != build.EMPTY, states.amin((0, 1)) == build.WHOLE
        found: list[list[int]] = (some.int() + whole.int()).tolist()
        return found

    return kept.find(call, mask, ("across", rows, keys), make)


# How many scores a mask_mod is asked for by ``explain``: 1 s on 2 CPU cores, 0.1 s on a GPU.
_QUICK = {"cpu": 1 << 26, "cuda": 1 << 34}


def is_quick(call: Call) -> bool:
    """Return whether the mask_mod can be evaluated for all tiles in a short time. Always False for
    tensors without values."""
    mask = mask_of(call)
    batch, heads = build.lines_of(call, mask)
    lines = batch * heads
    most = _QUICK.get(call.q.device.type, 0)
    return lines * call.max_seqlen_q * call.max_seqlen_k <= most


def visits_of(call: Call, tiles: Tiles) -> Visits:
    """Return how many tiles ``lists_of`` visits. Waits for the device."""
    counts, entries = lists_of(call, tiles)
    visited = int(counts.sum())
    full = int((entries < 0).sum())
    return Visits(counts.numel() * entries.shape[-1], visited - full, full)


def mask_of(call: Call) -> Function:
    """Return the mask_mod of ``call``, which must have one."""
    mask = mods.of(call.mods).mask if call.mods else None
    assert mask is not None, "lists are of calls with a mask_mod"
    return mask


def make_lists(call: Call, tiles: Tiles) -> Lists:
    """Return new lists of ``call``'s mask_mod, by PyTorch's operators."""
    with torch.no_grad():
        states = build.states_of(call, mask_of(call), tiles)
        return Lists(*build.listed(states, FULL))


def _all_partial(sizes: tuple[int, int], device: torch.device) -> Lists:
    owned, streamed = sizes
    counts = torch.full((1, 1, owned), streamed, dtype=torch.int32, device=device)
    entries = torch.arange(streamed, dtype=torch.int32, device=device)
    return Lists(counts, entries.expand(1, 1, owned, streamed).contiguous())
