"""A pass as data: what it allocates, which kernels it launches, and what each one reads.

``forward``, ``decode``, ``backward`` and ``append`` describe a pass once, as a ``Program``; the
launcher of a driver turns it into a function of the tensors. So the first call and later calls run
the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ... import _torch
from ..._torch import Empty
from ...plan import Plan
from ...problem import Call
from ...sizes import Extent, Shape, Size, Totals, function_of, value_at
from ..base import OtherAlignment, Run

Like = tuple[Shape, Shape, torch.dtype]
"""Shape, strides and dtype of a buffer."""
_Bound = TypeVar("_Bound", bound=Callable[..., Any])

# Takes the addresses of all tensors that a program names, its inputs, the buffers that it made, and
# the totals of packed rows if any size depends on them.
Launch = Callable[[list[int], Sequence[torch.Tensor], Sequence[torch.Tensor], Totals | None], None]


class Params(NamedTuple):
    """The ``Params`` of one or more kernels: numbers, and the name of the tensor for each
    pointer."""

    values: Mapping[str, float | Size]
    pointers: Mapping[str, str]


class Step(NamedTuple):
    """One launch of ``blocks`` workgroups with ``threads`` threads each."""

    plan: Plan
    blocks: Extent
    threads: int
    params: Params


class Program:
    """One pass over tensors of known shapes on the device of ``example``.

    A launch takes addresses in this order: ``inputs``, the names of the tensors that each call
    passes; the buffers that the program makes, in the order of ``make``; slices of buffers.
    """

    def __init__(self, inputs: Iterable[str], example: torch.Tensor) -> None:
        self.inputs = tuple(inputs)
        self.device = example.device
        self.likes: list[Like] = []
        self.fills: list[tuple[int, float]] = []
        self.steps: list[Step] = []
        self.made: list[str] = []
        self._parts: dict[str, tuple[str, Extent]] = {}

    def make(self, name: str, like: Like, fill: float | None = None) -> None:
        """Record a buffer that every call allocates and, with ``fill``, fills."""
        if fill is not None:
            self.fills.append((len(self.made), fill))
        self.made.append(name)
        self.likes.append(like)

    def make_workspace(self, parts: Mapping[str, Like], apart: bool) -> None:
        """Record scratch buffers of a call, in one allocation unless they must be ``apart``.

        Each begins at a multiple of 512 bytes, as PyTorch's allocator would place it.
        """
        if apart or len(parts) == 1:
            for name, like in parts.items():
                self.make(name, like)
            return
        size: Extent = 0
        for name, (shape, _strides, dtype) in parts.items():
            self._parts[name] = ("workspace", size)
            size = size + -(-(count(shape) * dtype.itemsize) // 512) * 512
        self.make("workspace", ((size,), (1,), torch.uint8))

    def add(self, plan: Plan, blocks: Extent, threads: int, params: Params) -> None:
        """Record a launch of ``plan`` as the next step. Do nothing if ``blocks`` is 0."""
        if blocks:
            self.steps.append(Step(plan, blocks, threads, params))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all addresses that a launch takes, in order."""
        return (*self.inputs, *self.made, *self._parts)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of whole tensors: the inputs and the buffers, without the slices of
        buffers."""
        return (*self.inputs, *self.made)

    @functools.cached_property
    def of_parts(self) -> tuple[int, ...]:
        """Return, for each slice of a buffer, the number of its buffer among the names."""
        return tuple(self.names.index(of) for of, _ in self._parts.values())

    @property
    def sizes(self) -> tuple[tuple[Like, ...], tuple[Extent, ...]]:
        """Return the buffers, and the slices' offsets in bytes."""
        return tuple(self.likes), tuple(offset for _, offset in self._parts.values())

    @functools.cached_property
    def sizes_at(self) -> Callable[[int, int], Any]:
        """Return ``sizes`` as a function of the totals."""
        return function_of(self.sizes)


def count(shape: Iterable[Extent]) -> Extent:
    """Return the number of elements."""
    found: Extent = 1
    for size in shape:
        found = found * size
    return found


def like(shape: Iterable[Extent], dtype: torch.dtype) -> Like:
    """Describe a contiguous tensor."""
    sizes = tuple(shape)
    strides: list[Extent] = []
    step: Extent = 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * (size or 1)
    return sizes, tuple(reversed(strides)), dtype


def run_of(
    program: Program,
    launch: Launch,
    empty: Empty,
    aligned: int | None = 3,
    on_16: bool = True,
) -> Callable[[Totals | None], Run]:
    """Return, for the totals of its inputs, ``program`` as a function of these inputs that returns
    the buffers it made. The totals are None if no size depends on them.

    The first ``aligned`` inputs must be 16-byte aligned; with ``on_16`` False at least one of them
    must be misaligned. Otherwise the function raises ``OtherAlignment``. With ``aligned`` None
    nothing is checked.
    """
    fills, of_parts = tuple(program.fills), program.of_parts
    index = program.device.index if program.device.type == "cuda" else None
    more, current_device = tuple(range(3, aligned or 0)), _torch.current_device
    anywhere = aligned is None

    # For new totals, only this function is called again.
    def sized(totals: Totals | None) -> Run:
        likes, offsets = program.sizes if totals is None else program.sizes_at(*totals)
        parts = tuple(zip(of_parts, offsets, strict=True))

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            if index is not None and current_device() != index:
                with torch.cuda.device(index):
                    return run(*tensors)
            addresses = [x.data_ptr() for x in tensors]
            if not anywhere:
                bits = addresses[0] | addresses[1] | addresses[2]
                for number in more:
                    bits |= addresses[number]
                if (bits & 15 == 0) is not on_16:
                    raise OtherAlignment
            made = []
            for each in likes:
                x = empty(*each)
                made.append(x)
                addresses.append(x.data_ptr())
            for number, value in fills:
                made[number].fill_(value)
            for number, offset in parts:
                addresses.append(addresses[number] + offset)
            launch(addresses, tensors, made, totals)
            return made

        return run

    return sized


_MOST_TOTALS = 8  # of which a bound call keeps sizes


def for_any_total(
    call: Call,
    given: Sequence[Any],
    bind: Callable[..., Callable[[Totals | None], _Bound]],
    first: int = 0,
    kind_of: Callable[[int, int], Hashable] = lambda q, k: None,
) -> _Bound:
    """Bind ``call`` for inputs like ``given``, with any number of packed rows.

    In packed training the totals differ at each step. ``bind`` takes inputs to a function of the
    totals, which evaluates the sizes that depend on them. ``bind`` is called once for each kind of
    totals: the kind is which totals are 0, and the result of ``kind_of``. ``first`` is the index of
    q among the inputs; k is the next input.
    """
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None:
        return bind(*given)(None)
    second = first + 1
    kinds: dict[Hashable, Callable[[Totals | None], _Bound]] = {}
    runs: dict[Totals, _Bound] = {}

    def run_for(totals: Totals, given: Sequence[Any]) -> _Bound:
        q, k = totals
        kind = (q > 0, k > 0, kind_of(q, k))
        of_kind = kinds.get(kind)
        if of_kind is None:
            of_kind = kinds[kind] = bind(*given)
        if len(runs) >= _MOST_TOTALS:
            runs.clear()
        found = runs[totals] = of_kind(totals)
        return found

    def run_any_total(*given: Any) -> Any:
        totals = given[first].shape[0], given[second].shape[0]
        return (runs.get(totals) or run_for(totals, given))(*given)

    run_for((given[first].shape[0], given[second].shape[0]), given)
    return cast(_Bound, run_any_total)  # takes what each of them takes


def arguments_of(
    params: Params, addresses: Mapping[str, int], totals: Totals | None = None
) -> dict[str, float]:
    """Return the members of ``Params`` with the pointers and sizes filled in."""
    found = {member: value_at(x, totals) for member, x in params.values.items()}
    return found | {member: addresses[name] for member, name in params.pointers.items()}
