"""The shortest way to run a forward on an NVIDIA GPU that has run before with other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """On the current device."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# What torch.compile's code allocates with: 1.2 µs on the host of an H200, where empty_like takes
# 2.0 and empty 3.7.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", _empty
)


class Ready:
    """A forward of known shapes: allocates out and LSE, takes five addresses, launches.

    ``launch`` takes ``blocks`` and the addresses of q, k, v, out and LSE, the last 0 where ``lse``
    is None: where nobody will ask for it. ``out`` and ``lse`` tell shapes, dtypes and the device.
    """

    __slots__ = ("blocks", "index", "launch", "lse", "out")

    def __init__(
        self, launch: Callable[..., None], blocks: int, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        self.launch = launch
        self.blocks = blocks
        self.index = out.device.index
        self.out = (tuple(out.shape), out.stride(), out.dtype)
        self.lse = None if lse is None else (tuple(lse.shape), lse.stride(), lse.dtype)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if _current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(q, k, v)
        out = empty(*self.out)
        lse, lse_address = None, 0
        if self.lse is not None:
            lse = empty(*self.lse)
            lse_address = lse.data_ptr()
        self.launch(
            self.blocks, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address
        )
        return out, lse
