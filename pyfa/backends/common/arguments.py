"""Keeps the arguments of a program's kernels in memory, patches them for each call, and launches
the kernels with them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ... import _torch, abi
from ...plan import Plan
from ...sizes import Extent, Size, Totals, function_of
from .program import Program

# Takes the arguments of ``program.Launch``, but uses only the addresses and the totals.
Start = Callable[[Sequence[int], object, object, Totals | None], None]


class Calls(NamedTuple):
    """``steps``: the driver's arguments for each kernel. ``set_stream`` puts a stream's handle into
    them, ``set_blocks`` the grids of some steps, by their numbers."""

    steps: Sequence[tuple[Any, ...]]
    set_stream: Callable[[int], None]
    set_blocks: Callable[[Iterable[tuple[int, int]]], None]


_OF_PARAMS = frozenset(abi.NAMES)


class TensorMap(NamedTuple):
    """A tensor as described to TMA. It begins with the address of ``tensor``, which
    each launch fills in unless ``tensor`` is "". ``sizes``: the offsets of 32-bit numbers that
    depend on the totals of packed rows."""

    data: bytes
    tensor: str
    sizes: tuple[tuple[int, Size], ...] = ()


class Layout(NamedTuple):
    """``data``: the arguments of all kernels in sequence, with addresses still missing.

    ``starts``: the offset of each step's arguments. ``words``: where the addresses go, in units of
    64 bits, each with its number. ``sizes``: the offset in bytes, format and value of each number
    that depends on the totals of packed rows.
    """

    data: bytes
    starts: tuple[int, ...]
    words: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[int, str, Size], ...] = ()


def layout_of(program: Program, maps_of: Callable[[Plan], Sequence[TensorMap]]) -> Layout:
    """Lay out the arguments of ``program``'s kernels. ``maps_of`` returns the tensor maps that
    follow the ``Params`` of a plan's kernel. Steps with the same ``Params`` share it, and at most
    one of them has maps."""
    numbers = {name: number for number, name in enumerate(program.names)}
    maps: dict[int, Sequence[TensorMap]] = {}
    for step in program.steps:
        maps[id(step.params)] = maps.get(id(step.params)) or maps_of(step.plan)
    sizes: dict[int, int] = {}
    for step in program.steps:
        sizes[id(step.params)] = max(params_bytes(step.plan), sizes.get(id(step.params), 0))
    data = b""
    starts: dict[int, int] = {}
    words = []
    sizes_in: list[tuple[int, str, Size]] = []
    for step in program.steps:
        if id(step.params) in starts:
            continue
        own, start = maps[id(step.params)], len(data)
        # Tensors that mods captured follow the maps.
        maps_size = abi.MAPPED_SIZE - abi.SIZE if own else 0
        starts[id(step.params)] = start
        for member, name in step.params.pointers.items():
            before = 0 if member in _OF_PARAMS else maps_size
            words.append(((start + before + abi.offset_of(member)) // 8, numbers[name]))
        values: dict[str, float] = {}
        for member, value in step.params.values.items():
            if isinstance(value, Size):
                at = start + abi.offset_of(member)
                sizes_in.append((at, abi.format_of(member), value))
                value = 0
            values[member] = value
        own_data = abi.pack(values, [each.data for each in own])
        size = sizes[id(step.params)] + maps_size
        if own:  # the compiler rounds the size up, because the struct is aligned like its maps
            size = -(-size // abi.MAP_ALIGNMENT) * abi.MAP_ALIGNMENT
        data += own_data.ljust(size, b"\0")
        words += [
            ((start + abi.MAPS_AT + i * abi.MAP_SIZE) // 8, numbers[each.tensor])
            for i, each in enumerate(own)
            if each.tensor
        ]
        sizes_in += [
            (start + abi.MAPS_AT + i * abi.MAP_SIZE + at, "I", size)
            for i, each in enumerate(own)
            for at, size in each.sizes
        ]
    of_steps = tuple(starts[id(step.params)] for step in program.steps)
    return Layout(data, of_steps, tuple(words), tuple(sizes_in))


def params_bytes(plan: Plan) -> int:
    """Return the size of the kernel's ``Params``, including the members for captured tensors and
    block lists."""
    constants = dict(plan.constants)
    return abi.SIZE + abi.captured_bytes(constants.get("MOD_CAPTURED"), "LISTS" in constants)


class Block:
    """The arguments of one launch at a time, and the arguments of the driver's call.

    ``calls_of`` makes the driver's arguments for a block that begins at an address. ``stream`` and
    ``totals`` are those of the last launch.
    """

    __slots__ = (
        "buffer", "calls", "set_blocks", "set_stream", "sizes", "stream", "totals", "words",
    )  # fmt: skip

    def __init__(self, layout: Layout, calls_of: Callable[[int], Calls]) -> None:
        # Whole words, for the views: the driver is told the true size.
        data = layout.data
        self.buffer = ctypes.create_string_buffer(data, -(-len(data) // 8) * 8)
        whole: Any = memoryview(self.buffer).cast("B")
        # As size_t, which takes three quarters of the time of "Q".
        self.words = whole.cast("N")
        # Views, because packing numbers one by one takes longer.
        views = {each: whole.cast(each) for _, each, _ in layout.sizes}
        self.sizes = [(views[each], at // views[each].itemsize) for at, each, _ in layout.sizes]
        found = calls_of(ctypes.addressof(self.buffer))
        self.calls, self.set_stream, self.set_blocks = found
        self.stream = 0
        self.totals: Totals | None = None
        self.set_stream(0)


def launcher(
    layout: Layout,
    index: int,
    run: Callable[..., int],
    calls_of: Callable[[int], Calls],
    recover: Callable[[int, int, tuple[Any, ...]], None],
    taken: Sequence[tuple[int, Callable[[], int]]] = (),
    blocks: Sequence[Extent] = (),
) -> Start:
    """Return a function that starts kernels on device ``index`` in sequence on torch's current
    stream.

    ``run`` is the driver's launch function, called once for each kernel (a step) with the result of
    ``calls_of``. An error is passed to ``recover`` with the number of its step. ``taken``:
    positions of words, each with a function that returns the address to store there at each
    launch. ``blocks``: the grids of the steps. Each launch sets the grids that depend on the total
    numbers of rows and keys of a packed batch. The returned function takes the arguments of
    ``program.Launch`` and is thread-safe.
    """
    resize = _resize_of(layout, blocks)
    words, current_stream = layout.words, _torch.current_stream
    # The driver copies the arguments before it returns; until then only one thread may use them. To
    # pop the last item of a list and to append it again are atomic operations. They take 0.02 µs
    # instead of the 0.2 µs of a lock, and a signal handler may launch in between. A block whose
    # launch raises is not put back.
    free: list[Block] = []

    def launch(
        addresses: Sequence[int], _tensors: object, _made: object, totals: Totals | None
    ) -> None:
        stream = current_stream(index)
        try:
            block = free.pop()
        except IndexError:
            block = Block(layout, calls_of)
        if resize is not None and totals != block.totals:
            resize(block, totals)
        # A view takes 0.05 µs per address. Packing all addresses at once takes longer.
        of_block = block.words
        for at, number in words:
            of_block[at] = addresses[number]
        for at, take in taken:
            of_block[at] = take()
        if stream != block.stream:
            block.set_stream(stream)
            block.stream = stream
        for call in block.calls:
            error = run(*call)
            if error:
                recover(error, block.calls.index(call), call)
        free.append(block)

    return launch


def _resize_of(
    layout: Layout, blocks: Sequence[Extent]
) -> Callable[[Block, Totals | None], None] | None:
    """Return a function that puts into a ``Block`` what depends on the totals; None if nothing
    does."""
    grids = [(step, each) for step, each in enumerate(blocks) if isinstance(each, Size)]
    if not (layout.sizes or grids):
        return None
    at = function_of((tuple(size for *_, size in layout.sizes), tuple(size for _, size in grids)))
    steps = [step for step, _ in grids]

    def resize(block: Block, totals: Totals | None) -> None:
        assert totals is not None, "sizes depend on them"
        # The block has these totals only after everything is written.
        block.totals = None
        values, grids = at(*totals)
        for (view, number), value in zip(block.sizes, values, strict=True):
            view[number] = value
        block.set_blocks(zip(steps, grids, strict=True))
        block.totals = totals

    return resize
