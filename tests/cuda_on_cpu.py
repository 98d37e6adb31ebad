"""Lets test files written for CUDA run on a CPU, unchanged.

``install`` makes "cuda" mean the CPU where tensors are made and moved, and answers what such files
ask of a GPU. It is for scripts that run other projects' files in a process of their own: it is
never undone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

_MAKERS = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
_SUMS = ("__add__", "__radd__", "__sub__", "__rsub__")
# Those that have nothing to do.
_IDLE = ("empty_cache", "manual_seed", "reset_peak_memory_stats", "set_device", "synchronize")


def _moved(x: Any) -> Any:
    if isinstance(x, (str, torch.device)) and str(x).startswith("cuda"):
        return "cpu"
    return x


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _moved(options["device"])
        return function(*map(_moved, args), **options)

    return run


def _as_on_gpu(function: Any) -> Any:
    """A sum of a 16-bit tensor and a number: a GPU rounds only the result, a CPU the number, too.
    Files derive tolerances from ``x + 0.3 - 0.3 - x``, which is 0 on a CPU where x is 0."""

    @functools.wraps(function)
    def run(x: torch.Tensor, other: Any) -> Any:
        if isinstance(other, float) and x.is_floating_point() and x.itemsize == 2:
            return function(x.float(), other).to(x.dtype)
        return function(x, other)

    return run


def install(capability: tuple[int, int]) -> None:
    """Have the CPU stand for a GPU of this compute capability."""
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for name in _SUMS:
        setattr(torch.Tensor, name, _as_on_gpu(getattr(torch.Tensor, name)))
    torch.nn.Module.to = _on_cpu(torch.nn.Module.to)  # type: ignore[method-assign]
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[attr-defined]
    for name in _IDLE:
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.get_device_capability = lambda *_: capability
    # FlexAttention's eager function computes gradients on a CPU as well, but refuses to.
    flex_attention: Any = importlib.import_module("torch.nn.attention.flex_attention")
    flex_attention._validate_device = lambda *_: None


@contextlib.contextmanager
def posing() -> Iterator[None]:
    """While a file is imported that asks whether there is a GPU: yes."""
    from torch.testing._internal import common_cuda

    answers: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "is_available", lambda: True),
        (torch.utils._triton, "has_triton", lambda: True),
        (common_cuda, "PLATFORM_SUPPORTS_BF16", True),
    )
    before = [getattr(module, name) for module, name, _ in answers]
    for module, name, answer in answers:
        setattr(module, name, answer)
    try:
        yield
    finally:
        for (module, name, _), old in zip(answers, before, strict=True):
            setattr(module, name, old)
