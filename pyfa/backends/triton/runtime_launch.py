"""Launches of Triton's kernels through the CUDA driver itself: the arguments are one packed struct.

On the host of an H200 a launch of attention's 57 arguments took 6.0 µs this way, where Triton's
launcher took 12.0 in the same run.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...sizes import Extent, Size, Totals, value_at
from ..common import libcuda
from ..common.arguments import Layout
from .specs import Spec

_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "fp32": "f"}


class Code:
    """A compiled kernel as the driver sees it. ``formats``: the formats of its parameters. The last
    ``own`` parameters are Triton's; the first of these points to ``scratch`` bytes per program for
    the copy engine's descriptors."""

    def __init__(self, compiled: Any, formats: list[str], own: int, index: int) -> None:
        self.function: int = compiled.function
        self.threads: int = 32 * compiled.metadata.num_warps
        self.shared: int = compiled.metadata.shared
        self.scratch: int = compiled.metadata.global_scratch_size
        self.formats = formats
        self.own = own
        self.index = index


def prepare(
    code: Code, programs: Extent, arguments: Sequence[Any], slots: Sequence[tuple[int, int]]
) -> Callable[[Sequence[Any], Totals | None], None]:
    """Return a function that launches ``programs`` programs of ``code`` with ``arguments``.

    Each call supplies some of the pointers. ``slots`` has a pair for each of these: its index in
    ``arguments``, and its index in the addresses that the call passes.
    """
    known = [0 if isinstance(x, Size) else x for x in arguments]
    packed = struct.pack("".join(code.formats), *known, *(0,) * code.own)
    ends = [struct.calcsize("".join(code.formats[: i + 1])) for i in range(len(code.formats))]
    at = [end // 8 - 1 for end in ends]  # of pointers, the word
    words = [(at[argument], number) for argument, number in slots]
    sizes = tuple(
        (end - struct.calcsize(each), each, x)
        for end, each, x in zip(ends, code.formats, arguments, strict=False)
        if isinstance(x, Size)
    )
    kernel = libcuda.Kernel(code.function, code.threads, code.shared)
    if code.scratch:
        # The last address that the launch below gives is that of the scratch memory.
        words.append((at[len(arguments)], -1))
    layout = Layout(packed, (0,), tuple(words), sizes)
    launch = libcuda.launcher(code.index, [libcuda.Launch(kernel, programs)], layout)

    def run(addresses: Sequence[Any], totals: Totals | None) -> None:
        launch(addresses, (), (), totals)

    if not code.scratch:
        return run
    device = torch.device("cuda", code.index)

    def run_with_scratch(addresses: Sequence[Any], totals: Totals | None) -> None:
        # Freed when this returns, and so given to nothing but what the stream runs later.
        size = value_at(programs, totals) * code.scratch
        scratch = torch.empty(size, dtype=torch.int8, device=device)
        run([*addresses, scratch.data_ptr()], totals)

    return run_with_scratch


def code_of(compiled: Any, spec: Spec, index: int | None) -> Code | None:
    """Return ``compiled`` for direct launches, or None if only Triton's launcher can launch it."""
    driver = libcuda.library()
    metadata = compiled.metadata
    # Arguments that one variant compiles in still come with every call.
    constant = any(not name.isupper() for name in spec.constants)
    special = metadata.num_ctas != 1 or any(
        getattr(metadata, name, False)
        for name in ("launch_cooperative_grid", "launch_pdl", "profile_scratch_size")
    )  # fmt: skip
    if driver is None or index is None or constant or special:
        return None
    kinds = [kind for kind in spec.signature.values() if kind != "constexpr"]
    places = _places(driver, compiled.function)
    own = len(places) - len(kinds)
    if own < (metadata.global_scratch_size > 0):
        return None
    formats = ["Q" if kind[0] == "*" else _FORMATS[kind] for kind in kinds] + ["Q"] * own
    sizes = [struct.calcsize(each) for each in formats]
    ends = [struct.calcsize("".join(formats[: i + 1])) for i in range(len(formats))]
    if places != [(end - size, size) for end, size in zip(ends, sizes, strict=True)]:
        return None
    return Code(compiled, formats, own, index)


def _places(driver: Any, function: int) -> list[tuple[int, int]]:
    """Return (offset, size) of each parameter, as the driver read them from the code."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver.cuFuncGetParamInfo(
        function, len(found), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append((offset.value, size.value))
    return found
