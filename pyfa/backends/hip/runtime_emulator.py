"""Runs the HIP kernels' gfx942 code objects on the CPU, in the project's own emulator."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...problem import Problem
from .code import Code

if TYPE_CHECKING:
    from ...emulator import Counters, Program


class EmulatorRuntime:
    """``counters`` holds what the last launch executed, ``code`` the code object that it ran.

    ``trace``: workgroups whose execution ``counters`` is to hold for the timing model.
    """

    def __init__(self, trace: Sequence[int] = ()) -> None:
        self.trace = trace
        self.counters: Counters | None = None
        self.code: Code | None = None

    def why_unavailable(self) -> str | None:
        from ...emulator import native

        return native.why_unavailable()

    def why_not(self, problem: Problem) -> str | None:
        if problem.arch != "cpu":
            return f"the emulator takes tensors on the CPU; these are on {problem.arch}"
        return None

    def launch(
        self,
        code: Code,
        grid: tuple[int, int, int],
        threads: int,
        params: bytes,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        from ...emulator import Machine

        machine = Machine(threads=os.cpu_count() or 1)
        for address, nbytes, name in _spans(tensors):
            machine.map(address, nbytes, name)
        kernel = program(code.data).kernel(code.kernel.name)
        self.code = code
        self.counters = machine.launch(
            kernel, grid=grid, block=(threads,), kernarg=params, trace=self.trace
        )


@functools.lru_cache(maxsize=64)
def program(data: bytes) -> Program:
    """The decoded code object."""
    from ...emulator import load

    return load(data)


def _spans(tensors: Mapping[str, torch.Tensor]) -> list[tuple[int, int, str]]:
    """(address, bytes, name) from each tensor's first to its last element.

    Views that interleave, as q, k and v cut from one packed tensor, become one span.
    """
    spans: list[tuple[int, int, str]] = []
    for name, x in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if x.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        begin, end = x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
        if spans and begin < spans[-1][0] + spans[-1][1]:
            start, nbytes, names = spans.pop()
            spans.append((start, max(start + nbytes, end) - start, f"{names}, {name}"))
        else:
            spans.append((begin, end - begin, name))
    return spans
