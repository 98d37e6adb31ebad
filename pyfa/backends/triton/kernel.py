"""One compiled kernel on one device, and how tensors are passed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import _allocation, driver
from triton.runtime.errors import OutOfResources

from ... import _torch
from ...sizes import Extent, Totals, value_at
from . import runtime_launch, specs
from .specs import INTERPRETED, Spec


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Allocate scratch on the current stream, which Triton requests for kernels that build
    descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


# Takes addresses, or tensors if kernels are interpreted, and the totals of packed rows.
Launch = Callable[[Sequence[Any], Totals | None], None]


class Slot(NamedTuple):
    """An argument that changes with each call: a pointer, by the name of its tensor."""

    name: str


class Kernel:
    """A compiled kernel on one device, launched without Triton's argument binder: for sixty
    arguments a launch takes 5 µs instead of 15."""

    def __init__(self, spec: Spec, index: int | None) -> None:
        self._spec = spec
        self._index: Any = index
        if INTERPRETED:
            return
        # Arguments that became constants in this variant still have a place in the launcher's list.
        names = enumerate(spec.signature)
        self._gaps = [at for at, n in names if n.isupper() and n in spec.constants]
        with torch.cuda.device(index):
            compiled = _loaded(spec)
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._scratch = compiled.metadata.global_scratch_size > 0
        self._keep = compiled
        self._code = runtime_launch.code_of(compiled, spec, index)

    def bind(
        self, programs: Extent, arguments: Sequence[Any], numbers: Mapping[str, int]
    ) -> Launch:
        """Return a function that launches a grid of ``programs`` with these ``arguments``. The
        caller of that function passes the values of the ``Slot`` arguments: addresses, or tensors
        if kernels are interpreted. ``numbers`` gives the index of each slot among these values."""
        slots = [
            (at, numbers[each.name]) for at, each in enumerate(arguments) if type(each) is Slot
        ]
        arguments = [0 if type(each) is Slot else each for each in arguments]
        kept = [] if INTERPRETED else [x for x in arguments if isinstance(x, torch.Tensor)]
        if kept:
            arguments = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
            launch_kept = self._bound(programs, arguments, slots)
            return lambda given, totals, _kept=kept: launch_kept(given, totals)  # type: ignore[misc]
        return self._bound(programs, arguments, slots)

    def _bound(
        self, programs: Extent, arguments: list[Any], slots: list[tuple[int, int]]
    ) -> Launch:
        if not INTERPRETED and self._code is not None:
            return runtime_launch.prepare(self._code, programs, arguments, slots)
        template = list(arguments)

        def launch(given: Sequence[Any], totals: Totals | None) -> None:
            filled = [value_at(x, totals) for x in template]
            for argument, number in slots:
                filled[argument] = given[number]
            self._start(value_at(programs, totals), filled)

        return launch

    def _start(self, programs: int, args: Sequence[Any]) -> None:
        """Launch through Triton, because the direct launch needs NVIDIA's driver."""
        if INTERPRETED:
            constants = _constants(self._spec)
            names = [name for name in self._spec.signature if name not in constants]
            self._spec.function[(programs,)](
                **dict(zip(names, args, strict=True)),
                **{name: self._spec.constants[name] for name in constants},
            )
            return
        stream = _torch.current_stream(self._index)
        args = list(args)
        for at in self._gaps:
            args.insert(at, None)
        if not self._scratch:
            self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None,
                      *args)  # fmt: skip
            return
        token = _allocation._allocator.set(_allocate)
        try:
            self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None,
                      *args)  # fmt: skip
        finally:
            _allocation._allocator.reset(token)


def _loaded(spec: Spec) -> Any:
    """Compile ``spec`` for the current device and load it, with fewer stages if the shared memory
    is too small for those of the plan."""
    while True:
        compiled = specs.compile_for(spec, driver.active.get_current_target())
        try:
            compiled.run  # noqa: B018  (loads the code object)
            return compiled
        except OutOfResources:
            stages = spec.options.get("num_stages", 1)
            if stages <= 1:
                raise
            spec = spec._replace(options=spec.options | {"num_stages": stages - 1})


def _constants(spec: Spec) -> list[str]:
    """Return the names of the compile-time constants of ``spec``: upper-case parameters with a
    given constant."""
    return [p for p in spec.signature if p.isupper() and p in spec.constants]


if INTERPRETED:
    no_int: Any = torch.zeros(1, dtype=torch.int32)
    no_float: Any = torch.zeros(1)
    no_seed: Any = torch.zeros(1, dtype=torch.int64)
else:
    no_int = no_float = no_seed = 0
