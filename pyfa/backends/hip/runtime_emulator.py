"""Run the HIP kernels' gfx942 code objects on the CPU, in the project's own emulator."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ... import _torch, abi, env
from ..._torch import Empty
from ...problem import Problem
from ...sizes import Totals, value_at
from ..common.program import Launch, Program, Step, arguments_of
from .code import Code

if TYPE_CHECKING:
    from ...emulator import Counters, Coverage
    from ...emulator import Program as Loaded


class Orders:
    """The order of workgroups, wavefronts and atomics in a launch, of all that are possible.

    ``seed`` and the number of launches since ``choose`` determine the order. So two runs in one
    process differ, and a run can be repeated. ``mattered``: whether any launch had float atomics.
    """

    def __init__(self) -> None:
        self.choose(None)

    def choose(self, seed: int | None) -> None:
        """Use ``seed`` from now on; None uses ``PYFA_EMULATOR_SEED``."""
        self.seed, self.launches, self.mattered = seed, 0, False

    @property
    def rounding(self) -> int:
        """Return the seed that selects the rounding, the same in all launches; 0 for the emulator's
        own."""
        return int(env.get("PYFA_EMULATOR_SEED") if self.seed is None else self.seed)

    def next(self) -> int:
        self.launches += 1
        return self.rounding * 1_000_003 + self.launches


class EmulatorRuntime:
    """The runtime of the emulator. ``counters``: what the last launch executed; ``code``: its code
    object; ``coverage``: what all launches executed.

    ``trace``: the workgroups whose execution ``counters`` records for the timing model.
    """

    APART = True

    def __init__(self, trace: Sequence[int] = ()) -> None:
        self.trace = trace
        self.counters: Counters | None = None
        self.code: Code | None = None
        self.coverage: Coverage | None = None
        self.orders = Orders()

    def why_unavailable(self) -> str | None:
        from ...emulator import native

        return native.why_unavailable()

    def describe(self) -> str:
        return "runs HIP code on the CPU, functionally emulated"

    def why_not(self, problem: Problem) -> str | None:
        if problem.arch != "cpu":
            return f"the emulator takes tensors on the CPU; these are on {problem.arch}"
        return None

    @property
    def empty(self) -> Empty:
        return _poisoned

    def launch_of(self, program: Program, kernels: Sequence[Code]) -> Launch:
        """Return a function that runs the steps of ``program`` in order. ``kernels`` has the code
        of each step."""
        names, of_tensors = program.names, program.tensors

        def launch(
            addresses: Sequence[int], tensors: Sequence[torch.Tensor],
            made: Sequence[torch.Tensor], totals: Totals | None,
        ) -> None:  # fmt: skip
            of_names = dict(zip(names, addresses, strict=True))
            given = dict(zip(of_tensors, (*tensors, *made), strict=True))
            for step, code in zip(program.steps, kernels, strict=True):
                # A kernel may touch what it is told of, and nothing else.
                touched = {name: given[name] for name in step.params.pointers.values()}
                params = abi.pack(arguments_of(step.params, of_names, totals))
                self.run(step._replace(blocks=value_at(step.blocks, totals)), code, params, touched)

        return launch

    def run(
        self, step: Step, code: Code, params: bytes, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Run one grid. ``tensors``, by name, are all that the kernel may access."""
        from ...emulator import Coverage, Machine

        kernel = program(code.data).kernel(code.kernel.name)
        # Sums of floats depend on the order: on one thread the seed alone says it.
        self.orders.mattered |= kernel.adds_floats
        workers = 1 if kernel.adds_floats else _cores()
        machine = Machine(seed=self.orders.next(), threads=workers, rounding=self.orders.rounding)
        for address, nbytes, name in _spans(tensors):
            machine.map(address, nbytes, name)
        self.code = code
        self.counters = machine.launch(
            kernel,
            grid=(value_at(step.blocks, None), 1, 1),
            block=(step.threads,),
            kernarg=params,
            trace=self.trace,
        )
        self.coverage = self.coverage or Coverage()
        self.coverage.note(code.digest, kernel, self.counters)


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory filled with NaN and -1 (a fresh page would hold zeros), so that a row that no
    kernel writes is detected."""
    x = _torch.empty_cpu(shape, strides, dtype)
    x.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]  # torch's stubs lack it
    return x


def _cores() -> int:
    """Return how many cores this process may use, if the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=256)  # the full level runs 328, and decoding one takes 65 ms
def program(data: bytes) -> Loaded:
    """Return the decoded code object."""
    from ...emulator import load

    return load(data)


def _spans(tensors: Mapping[str, torch.Tensor]) -> list[tuple[int, int, str]]:
    """Return (address, bytes, name) of each tensor, from its first to its last element.

    Interleaved views, such as q, k and v of one packed tensor, become one span.
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


def faults(data: bytes) -> list[str]:
    """Return a sentence for each pair of instructions of a code object that are closer together
    than the wait states of gfx942 allow."""
    from ...emulator import hazards

    return [str(found) for found in hazards.check(data)]
