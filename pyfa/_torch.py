"""Every private name of PyTorch that pyfa uses, each with a fallback.

Either PyTorch has no public equivalent, or the name is on the path of a repeated call, where the
public functions cost 2 to 20 times as much on the host of an H200 (``torch.cuda.current_stream`` 4
µs instead of 0.1, ``torch.empty`` 3.7 instead of 1.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])
_C: Any = torch._C
_guards: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)

Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype: what the functions below allocate by."""
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _public_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


def _empty_cuda(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _empty_cpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype)


current_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _public_stream)
"""The handle of torch's current stream on a device."""

current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)

is_capturing: Callable[[], bool] = getattr(
    _C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

empty_cuda: Empty = getattr(_guards, "_empty_strided_cuda", _empty_cuda)
"""An uninitialized tensor on the current GPU."""

empty_cpu: Empty = getattr(_guards, "_empty_strided_cpu", _empty_cpu)

is_deterministic: Callable[[], bool] = getattr(
    _C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)

# torch.compile's guards of tensors; None where this PyTorch has none.
TensorGuards: Any = getattr(_guards, "TensorGuards", None)


has_storage: Callable[[torch.Tensor], bool] = getattr(_C, "_has_storage", lambda x: True)
"""Return whether a tensor has memory. Under vmap a tensor represents many and has none."""


_FakeTensor: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())


def has_values(x: torch.Tensor) -> bool:
    """Return whether a tensor has values: not on the meta device, nor in PyTorch's
    ``FakeTensorMode``."""
    return not x.is_meta and not isinstance(x, _FakeTensor)


outside_modes: Callable[[], AbstractContextManager[Any]] = getattr(
    _C, "_DisableTorchDispatch", contextlib.nullcontext
)
"""A context in which tensors have values even if a mode, such as ``FakeTensorMode``, is active."""


# What torch.multiprocessing.reductions.StorageWeakRef calls, which takes four times as long.
_Storage: Any = torch.UntypedStorage
_expired: Callable[[int], bool] = _Storage._expired
_free_weak_ref: Callable[[int], None] = _Storage._free_weak_ref


class StorageRef:
    """A weak reference to a tensor's memory. While it exists, no other memory has the same
    ``number``."""

    __slots__ = ("_free", "number")

    def __init__(self, x: torch.Tensor) -> None:
        storage: Any = x.untyped_storage()
        self._free = _free_weak_ref  # this module may be cleared before the last reference
        self.number: int = storage._weak_ref()

    def set(self, x: torch.Tensor) -> None:
        """Refer to the memory of ``x`` from here on."""
        storage: Any = x.untyped_storage()
        before, self.number = self.number, storage._weak_ref()
        self._free(before)

    def __del__(self) -> None:
        self._free(self.number)


def are_any_gone(refs: Iterable[StorageRef]) -> bool:
    """Return whether any of the memory has been freed."""
    for ref in refs:  # noqa: SIM110  (a generator takes another call)
        if _expired(ref.number):
            return True
    return False


def storage_number(x: torch.Tensor) -> int:
    """Return ``StorageRef.number`` of a tensor's memory, valid while the tensor exists."""
    storage: Any = x.untyped_storage()
    number: int = storage._cdata
    return number


def run_backward_directly(function: type[torch.autograd.Function]) -> None:
    """Let autograd's engine call ``backward`` of ``function`` directly, without the methods that
    look it up at each call."""
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward


def _zero() -> int:
    return 0


def _none() -> None:
    return None


_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", _zero)
_transform: Callable[[], Any] = getattr(
    getattr(_C, "_functorch", None), "peek_interpreter_stack", _none
)
_autocasts: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_tracing: Callable[[], Any] = getattr(_C, "_get_tracing_state", _none)


def in_transform() -> bool:
    """Return whether a ``torch.func`` transform (grad, vmap, jvp) is active."""
    return _transform() is not None


def in_forward_mode() -> bool:
    """Return whether a level of forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Return whether torch.compile or torch.jit is recording operations."""
    return torch.compiler.is_compiling() or _tracing() is not None


def is_plain(q: torch.Tensor) -> bool:
    """Return whether eager code may use the address of ``q``: no subclass, mode or transform."""
    return (
        type(q) is torch.Tensor
        and _modes() == 0
        and _transform() is None
        and forward_ad._current_level < 0
    )


def is_unwatched(*tensors: torch.Tensor) -> bool:
    """Return whether only eager code sees a call with these tensors: all are plain, without the
    negative bit, and no compiler, mode, transform or autocast is active. Sparse and nested tensors
    do not count as plain, because evaluating PyTorch's guards on one aborts the process."""
    return (
        not torch.compiler.is_compiling()
        and all(
            type(x) is torch.Tensor and x.layout is torch.strided and not x.is_nested
            for x in tensors
        )
        and _modes() == 0
        and _transform() is None
        and forward_ad._current_level < 0
        and not _autocasts()
        and not any(x.is_neg() for x in tensors)
    )


def runs_while_compiling(function: F) -> F:
    """Let torch.compile call ``function`` while it compiles and take its result as a constant.

    This is ``torch.compiler.assume_constant_result``, which imports torch.compile for it (1 to 4
    s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def hand_to_backward(name: str, value: object) -> None:
    """Keep ``value`` in this thread's state, which autograd copies to the threads of a backward."""
    if hasattr(_C, "_stash_obj_in_tls"):
        _C._stash_obj_in_tls(name, value)


def handed_to_backward(name: str) -> Any:
    """Return what the thread that called ``backward`` had kept; None outside of a backward."""
    if not hasattr(_C, "_stash_obj_in_tls") or _C._current_graph_task_id() == -1:
        return None
    return _C._get_obj_in_tls(name) if _C._is_key_in_tls(name) else None
