"""The shortest way to run on an NVIDIA GPU what has run before with other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import Gradients, OtherAlignment, Repeat, RepeatBackward
from . import calls

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """On the current device."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# What torch.compile's code allocates with: 1.2 µs on the host of an H200, where empty_like takes
# 2.0 and empty 3.7.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", _empty
)


_Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def like(x: torch.Tensor) -> _Like:
    """What ``empty`` takes for a tensor as ``x``."""
    return tuple(x.shape), x.stride(), x.dtype


def _addresses(offsets: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Of queries' and keys' offsets, which may be one tensor."""
    return offsets[0].data_ptr(), offsets[-1].data_ptr()


def ready_forward(
    launch: Callable[..., None],
    blocks: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    aligned: bool = True,
) -> Repeat:
    """A forward of known shapes: allocates out and LSE, takes addresses, launches.

    ``launch`` takes ``blocks`` and the addresses of q, k, v, out and LSE, the last 0 where ``lse``
    is None: where nobody will ask for it; behind them those of a packed call's offsets. ``out`` and
    ``lse`` tell shapes, dtypes and the device, ``aligned`` whether the addresses of q, k and v are
    multiples of 16.
    """
    # Not an object with ``__call__``, which takes 0.1 µs more.
    index, grids = out.device.index, (blocks,)
    out_like, lse_like = like(out), None if lse is None else like(lse)

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if _current_device() != index:
            with torch.cuda.device(index):
                return forward(q, k, v, *offsets)
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if ((at_q | at_k | at_v) & 15 == 0) is not aligned:
            raise OtherAlignment
        made = empty(*out_like)
        at_lse, made_lse = 0, None
        if lse_like is not None:
            made_lse = empty(*lse_like)
            at_lse = made_lse.data_ptr()
        if not offsets:
            launch(grids, at_q, at_k, at_v, made.data_ptr(), at_lse)
            return made, made_lse
        calls.fill(made, made_lse)
        launch(grids, at_q, at_k, at_v, made.data_ptr(), at_lse, *_addresses(offsets))
        return made, made_lse

    return forward


def ready_backward(launch: Callable[..., None], made: Gradients, workspace: int) -> RepeatBackward:
    """A backward of known shapes: allocates dq, dk, dv and a workspace, takes addresses, launches.

    ``launch`` takes those of q, k, v, out, LSE, dout, dq, dk, dv and of the ``workspace``, so many
    float32; behind them those of a packed call's offsets. ``made`` tells shapes, dtypes and the
    device.
    """
    index = made.dq.device.index
    dq_like, dk_like, dv_like = (like(x) for x in made[:3])
    size = (workspace,)

    def backward(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, *offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        if _current_device() != index:
            with torch.cuda.device(index):
                return backward(dout, q, k, v, out, lse, *offsets)
        at_q, at_k, at_v, at_dout = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr()
        at_out, at_lse = out.data_ptr(), lse.data_ptr()
        if (at_q | at_k | at_v | at_dout | at_out | at_lse) & 15:
            raise OtherAlignment
        dq, dk, dv = empty(*dq_like), empty(*dk_like), empty(*dv_like)
        work = empty(size, (1,), torch.float32)
        at_offsets: tuple[int, ...] = ()
        if offsets:
            at_offsets = _addresses(offsets)
            for x in (dq, dk, dv):
                x.zero_()  # rows of no sequence stay so; whether there are any, the device knows
        launch(
            at_q, at_k, at_v, at_out, at_lse, at_dout, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
            work.data_ptr(), *at_offsets,
        )  # fmt: skip
        return dq, dk, dv

    return backward
