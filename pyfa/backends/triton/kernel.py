"""One compiled kernel on one device, and how tensors are given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import _allocation, driver
from triton.runtime.errors import OutOfResources

from . import runtime_launch, specs
from .specs import INTERPRETED, Spec


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """What Triton asks for kernels that build descriptors: scratch of the current stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Kernel:
    """A compiled kernel on one device, launched past Triton's argument binder (which takes 15 µs
    for sixty arguments, against 5)."""

    def __init__(self, spec: Spec, index: int | None) -> None:
        self._spec = spec
        self._index: Any = index
        if INTERPRETED:
            return
        # Arguments that became constants in this variant still have a place in the launcher's list.
        names = list(spec.signature)
        self._tail = (None,) * sum(name.isupper() and name in spec.constants for name in names)
        with torch.cuda.device(index):
            compiled = _loaded(spec)
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._scratch = compiled.metadata.global_scratch_size > 0
        self._keep = compiled
        self._code = runtime_launch.code_of(compiled, spec, index)
        self._launch: Callable[..., None] | None = None

    def __call__(self, programs: int, *args: Any) -> None:
        if INTERPRETED:
            names = [name for name in self._spec.signature if name not in _constants(self._spec)]
            self._spec.function[(programs,)](
                **dict(zip(names, args, strict=True)),
                **{name: self._spec.constants[name] for name in _constants(self._spec)},
            )
            return
        if self._code is not None:
            if self._launch is None:
                self._launch = runtime_launch.prepare(self._code, args, len(args))
            self._launch((programs,), *args)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if not self._scratch:
            self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None,
                      *args, *self._tail)  # fmt: skip
            return
        token = _allocation._allocator.set(_allocate)
        try:
            self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None,
                      *args, *self._tail)  # fmt: skip
        finally:
            _allocation._allocator.reset(token)

    def prepared(self, count: int, rest: tuple[Any, ...]) -> Callable[..., None]:
        """The kernel as a function of the number of programs, as a tuple of one, and its first
        ``count`` arguments, which are addresses."""
        if INTERPRETED or self._code is None:
            return lambda programs, *first: self(*programs, *first, *rest)
        return runtime_launch.prepare(self._code, (*(0,) * count, *rest), count)


def _loaded(spec: Spec) -> Any:
    """``spec`` compiled for the current device and loaded, with fewer stages where its shared
    memory is too small for those of the plan."""
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
    """The parameters that every variant compiles in: a kernel's last ones, in upper case."""
    return [p for p in spec.signature if p.isupper() and p in spec.constants]


if INTERPRETED:
    no_int: Any = torch.zeros(1, dtype=torch.int32)
    no_float: Any = torch.zeros(1)
    no_seed: Any = torch.zeros(1, dtype=torch.int64)

    def address(x: torch.Tensor) -> Any:
        return x
else:
    no_int = no_float = no_seed = 0
    address: Any = torch.Tensor.data_ptr  # type: ignore[no-redef]
