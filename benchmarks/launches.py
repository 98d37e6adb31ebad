"""Save launches in the emulator, with their memory before and after, to repeat them.

A kept launch gives the same bytes again: the emulator's orders depend on a seed alone, and it runs
on one thread here. So what another code leaves in memory can be compared byte by byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import torch

from pyfa.backends.common.program import Step
from pyfa.backends.hip.code import Code
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime, _spans


class Kept:
    """One launch of ``case``: ``executed`` are the addresses of its code that it has executed."""

    def __init__(
        self, case: str, step: Step, code: Code, params: bytes, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.case, self.step, self.code, self.params = case, step, code, params
        self.tensors = tensors  # as long as they live, the addresses in params hold
        self.spans = [(address, nbytes) for address, nbytes, _ in _spans(tensors)]
        self.before = self.memory()

    def memory(self) -> list[bytes]:
        return [ctypes.string_at(address, nbytes) for address, nbytes in self.spans]

    def run(self, runtime: Any, orders: tuple[int | None, int]) -> None:
        self.orders = orders
        begin = time.perf_counter()
        _run(runtime, self.step, self.code, self.params, self.tensors)
        self.seconds = time.perf_counter() - begin
        self.executed = frozenset(runtime.counters.executed)
        self.after = self.memory()

    def again(self, runtime: Any) -> bool:
        """Makes the launch once more: whether it left the same bytes. Raises what it raises."""
        for (address, _), content in zip(self.spans, self.before, strict=True):
            ctypes.memmove(address, content, len(content))
        runtime.orders.seed, runtime.orders.launches = self.orders
        try:
            _run(runtime, self.step, self.code, self.params, self.tensors)
        finally:
            runtime.orders.choose(None)
        return self.memory() == self.after


_run = EmulatorRuntime.run


@contextlib.contextmanager
def keeping(runtime: Any, case: str) -> Iterator[list[Kept]]:
    """The launches that are made meanwhile. One that raises is not among them."""
    made: list[Kept] = []

    def run(self: Any, step: Step, code: Code, params: bytes, tensors: Any) -> None:
        kept = Kept(case, step, code, params, dict(tensors))
        kept.run(self, (self.orders.seed, self.orders.launches))
        made.append(kept)

    EmulatorRuntime.run = run  # type: ignore[method-assign]
    try:
        yield made
    finally:
        EmulatorRuntime.run = _run  # type: ignore[method-assign]
