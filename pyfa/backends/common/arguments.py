"""The arguments of a program's kernels in memory, patched and launched again for each call."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import _torch, abi
from ...plan import Plan
from .program import Program

# The driver's arguments for each kernel, and what puts a stream's handle into them.
Calls = tuple[Sequence[tuple[Any, ...]], Callable[[int], None]]


_OF_PARAMS = frozenset(abi.NAMES)


class TensorMap(NamedTuple):
    """What the copy engine is told of a tensor. It begins with the address of ``tensor``, which
    each launch fills in, unless that is ""."""

    data: bytes
    tensor: str


class Layout(NamedTuple):
    """``data``: the arguments of all kernels, one behind the other, addresses still missing.

    ``starts``: where those of each step begin. ``packed``: of each ``Params`` where it begins, how
    its pointers are packed, and the numbers of their addresses. ``words``: 64-bit words that hold
    an address among other things, each with its number: of tensor maps and captured tensors.
    """

    data: bytes
    starts: tuple[int, ...]
    packed: tuple[tuple[int, struct.Struct, Callable[[Sequence[int]], Any]], ...]
    words: tuple[tuple[int, int], ...]


def layout_of(program: Program, maps_of: Callable[[Plan], Sequence[TensorMap]]) -> Layout:
    """The arguments of ``program``'s kernels. ``maps_of``: the tensor maps that a plan's kernel
    finds behind its ``Params``. Steps that were given one ``Params`` share it, and at most one of
    them has maps."""
    numbers = {name: number for number, name in enumerate(program.names)}
    maps: dict[int, Sequence[TensorMap]] = {}
    for step in program.steps:
        maps[id(step.params)] = maps.get(id(step.params)) or maps_of(step.plan)
    sizes: dict[int, int] = {}
    for step in program.steps:
        sizes[id(step.params)] = max(params_bytes(step.plan), sizes.get(id(step.params), 0))
    data = b""
    starts: dict[int, int] = {}
    packed = []
    words = []
    for step in program.steps:
        if id(step.params) in starts:
            continue
        own, start = maps[id(step.params)], len(data)
        starts[id(step.params)] = start
        pointers = step.params.pointers
        of_params = tuple(item for item in pointers.items() if item[0] in _OF_PARAMS)
        packed.append((start, *_pointers(of_params, program.names)))
        # Those of captured tensors stand between numbers, which packing would overwrite.
        words += [
            ((start + abi.offset_of(member)) // 8, numbers[name])
            for member, name in pointers.items()
            if member not in _OF_PARAMS
        ]
        own_data = abi.pack(step.params.values, [each.data for each in own])
        data += own_data.ljust(sizes[id(step.params)], b"\0")
        words += [
            ((start + abi.MAPS_AT + i * abi.MAP_SIZE) // 8, numbers[each.tensor])
            for i, each in enumerate(own)
            if each.tensor
        ]
    of_steps = tuple(starts[id(step.params)] for step in program.steps)
    return Layout(data, of_steps, tuple(packed), tuple(words))


def params_bytes(plan: Plan) -> int:
    """Of the ``Params`` that the plan's kernel takes, with what its mods captured behind them."""
    return abi.SIZE + abi.captured_bytes(dict(plan.constants).get("MOD_CAPTURED"))


@functools.lru_cache(1024)
def _pointers(
    pointers: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> tuple[struct.Struct, Callable[[Sequence[int]], Any]]:
    """How ``pointers``, (member, name), are packed, and what picks their addresses."""
    named = dict(pointers)
    members = abi.in_order(named)
    pick = operator.itemgetter(*(names.index(named[member]) for member in members))
    return struct.Struct(abi.pointer_format(members)), pick


class Block:
    """The arguments of one launch at a time, and what the driver is called with.

    ``calls_of`` makes the driver's arguments for a block that begins at an address; ``set_stream``
    puts the stream's handle into them.
    """

    __slots__ = ("buffer", "calls", "set_stream", "stream", "words")

    def __init__(
        self,
        data: bytes,
        calls_of: Callable[[int], Calls],
    ) -> None:
        # Whole words, for the view: the driver is told the true size.
        self.buffer = ctypes.create_string_buffer(data, -(-len(data) // 8) * 8)
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        self.calls, self.set_stream = calls_of(ctypes.addressof(self.buffer))
        self.stream = 0
        self.set_stream(0)


def launcher(
    layout: Layout,
    index: int,
    run: Callable[..., int],
    calls_of: Callable[[int], Calls],
    recover: Callable[[int, int, tuple[Any, ...]], None],
    taken: Sequence[tuple[int, Callable[[], int]]] = (),
) -> Callable[..., None]:
    """Kernels on device ``index`` that start one behind the other on torch's current stream.

    ``run`` is the driver's function, called once a step with what ``calls_of`` made; an error goes
    to ``recover`` with the number of its step. ``taken``: words whose address a function gives at
    each launch. The result takes the addresses of a program; any thread may call it.
    """
    packed = [(each.pack_into, start, pick) for start, each, pick in layout.packed]
    words, current_stream = layout.words, _torch.current_stream
    # The driver copies the arguments before it returns; until then they are one thread's. Taking
    # the last of a list and putting it back are atomic, need no lock (0.2 µs where these take 0.02)
    # and let a signal's handler launch in between. What raises is not put back.
    free: list[Block] = []

    def launch(addresses: Sequence[int], *_: object) -> None:
        stream = current_stream(index)
        try:
            block = free.pop()
        except IndexError:
            block = Block(layout.data, calls_of)
        buffer = block.buffer
        for pack, start, pick in packed:
            pack(buffer, start, *pick(addresses))
        if words:
            of_block = block.words
            for at, number in words:
                of_block[at] = addresses[number]
        for at, take in taken:
            block.words[at] = take()
        if stream != block.stream:
            block.set_stream(stream)
            block.stream = stream
        for call in block.calls:
            error = run(*call)
            if error:
                recover(error, block.calls.index(call), call)
        free.append(block)

    return launch
