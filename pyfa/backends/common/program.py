"""A pass as data: what it allocates, which kernels it launches, and what each one reads.

``forward``, ``decode``, ``backward`` and ``append`` describe a pass once, as a ``Program``; the
launcher of a driver turns it into a function of the tensors. So the first call and later calls run
the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ... import _torch
from ..._torch import Like
from ...plan import Plan
from ...problem import Call
from ..base import OtherAlignment, Run

Values = Mapping[str, int | float]
_Result = TypeVar("_Result")

# Takes the addresses of all that a program names, its inputs and what it made.
Launch = Callable[[list[int], Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Params(NamedTuple):
    """The ``Params`` of one or more kernels: numbers, and the name of the tensor for each
    pointer."""

    values: Values
    pointers: Mapping[str, str]


class Step(NamedTuple):
    """One launch of ``blocks`` workgroups with ``threads`` threads each."""

    plan: Plan
    blocks: int
    threads: int
    params: Params


class Program:
    """One pass over tensors of known shapes on the device of ``example``.

    ``inputs`` are the names of the tensors that each call passes, in order. The buffers that the
    program makes follow, in the order of ``make``, and then slices of buffers.
    """

    def __init__(self, inputs: Iterable[str], example: torch.Tensor) -> None:
        self.inputs = tuple(inputs)
        self.device = example.device
        self.likes: list[Like] = []
        self.fills: list[tuple[int, float]] = []
        self.steps: list[Step] = []
        self.made: list[str] = []
        self._parts: dict[str, tuple[str, int]] = {}

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
        size = 0
        for name, (shape, _strides, dtype) in parts.items():
            self._parts[name] = ("workspace", size)
            size += -(-torch.Size(shape).numel() * dtype.itemsize // 512) * 512
        self.make("workspace", ((size,), (1,), torch.uint8))

    def add(self, plan: Plan, blocks: int, threads: int, params: Params) -> None:
        """Record a launch of ``plan`` after the steps recorded before; nothing if ``blocks`` is
        0."""
        if blocks:
            self.steps.append(Step(plan, blocks, threads, params))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all addresses that a launch takes, in order."""
        return (*self.inputs, *self.made, *self._parts)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names that are whole tensors."""
        return (*self.inputs, *self.made)

    def parts(self) -> list[tuple[int, int]]:
        """Return, for each slice of a buffer, the number of its buffer among the names and its
        offset in bytes."""
        names = self.names
        return [(names.index(of), offset) for of, offset in self._parts.values()]


def like(shape: Iterable[int], dtype: torch.dtype) -> Like:
    """Describe a contiguous tensor."""
    sizes = tuple(shape)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return sizes, tuple(reversed(strides)), dtype


def run_of(
    program: Program,
    launch: Launch,
    empty: Callable[..., torch.Tensor],
    aligned: int | None = 3,
    on_16: bool = True,
) -> Run:
    """Return ``program`` as a function of its inputs that returns the buffers it made.

    The first ``aligned`` inputs must be 16-byte aligned; with ``on_16`` False at least one of them
    must be misaligned. Otherwise the function raises ``OtherAlignment``. With ``aligned`` None
    nothing is checked.
    """
    likes, fills, parts = tuple(program.likes), tuple(program.fills), tuple(program.parts())
    index = program.device.index if program.device.type == "cuda" else None
    more, current_device = tuple(range(3, aligned or 0)), _torch.current_device
    anywhere = aligned is None

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
        launch(addresses, tensors, made)
        return made

    return run


# Totals of packed rows for which a bound call keeps what it launches.
MOST_TOTALS = 8


def for_any_total(
    call: Call,
    run: Callable[..., _Result],
    bind: Callable[..., Callable[..., _Result]],
    first: int = 0,
) -> Callable[..., _Result]:
    """Extend ``run``, which is bound for ``call``, to all calls that differ from it also in the
    number of packed rows.

    In packed training the total differs at each step. Everything else stays valid; only what
    depends on the total is recomputed, by ``bind`` with the inputs of ``run``. Among these q is
    number ``first``, and k the next.
    """
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None:
        return run
    second = first + 1
    runs = {(call.q.shape[0], call.k.shape[0]): run}

    def run_any_total(*given: Any) -> _Result:
        totals = given[first].shape[0], given[second].shape[0]
        found = runs.get(totals)
        if found is None:
            if len(runs) >= MOST_TOTALS:
                runs.clear()
            found = runs[totals] = bind(*given)
        return found(*given)

    return run_any_total


def arguments_of(params: Params, addresses: Mapping[str, int]) -> dict[str, int | float]:
    """Return the members of ``Params`` with the pointers filled in."""
    return {
        **params.values,
        **{member: addresses[name] for member, name in params.pointers.items()},
    }
