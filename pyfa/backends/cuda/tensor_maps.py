"""Tensor maps: what Hopper's copy engine (TMA) is told of a tensor, encoded by the driver.

A map describes a tensor (B, S, H, D), or (total, H, D), as four dimensions, the contiguous one
first, and boxes of some rows by one panel of a head. Its 128 bytes are opaque. On every driver seen
the address is the first eight, so that a map is encoded once and moved; where that is not so, it
is encoded anew for every address.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ... import abi
from ...plan import Plan
from ..common import libcuda

# CU_TENSOR_MAP_DATA_TYPE_…; float8 are bytes.
_DTYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: 0}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_…, by bytes
_NO_INTERLEAVE, _L2_256_BYTES, _ZEROS = 0, 3, 0
_address = struct.Struct("<Q")


class Box(NamedTuple):
    """What one copy moves of a tensor: ``rows`` by a panel of a head that is ``head`` wide.

    Both name a constant of the plan, or are numbers.
    """

    tensor: str
    rows: str | int
    head: str | int


# By kernel, in the order in which it finds them.
BOXES: dict[str, tuple[Box, ...]] = {
    "cuda/sm90/attn_fwd.cu": (
        Box("q", 64, "HEAD_DIM"),
        Box("k", "BLOCK_K", "HEAD_DIM"),
        Box("v", "BLOCK_K", "HEAD_DIM_V"),
    ),
    "cuda/sm90/attn_bwd.cu": (
        Box("q", "BLOCK_Q", "HEAD_DIM"),
        Box("k", "BLOCK_K", "HEAD_DIM"),
        Box("v", "BLOCK_K", "HEAD_DIM_V"),
        Box("dout", "BLOCK_Q", "HEAD_DIM_V"),
    ),
}


class _Described(NamedTuple):
    """A map but for the address: sizes and box in elements, strides in bytes."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def encode(self, address: int) -> bytes:
        driver, rank = libcuda.library(), len(self.sizes)
        if driver is None:
            raise RuntimeError("there is no CUDA driver")
        # The map has to lie at a multiple of 64.
        room = ctypes.create_string_buffer(abi.MAP_SIZE + abi.MAP_ALIGNMENT)
        at = -(-ctypes.addressof(room) // abi.MAP_ALIGNMENT) * abi.MAP_ALIGNMENT
        error = driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            ctypes.c_int(self.dtype),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*(1 for _ in self.box)),
            ctypes.c_int(_NO_INTERLEAVE),
            ctypes.c_int(self.swizzle),
            ctypes.c_int(_L2_256_BYTES),
            ctypes.c_int(_ZEROS),
        )
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}: {self}")
        return ctypes.string_at(at, abi.MAP_SIZE)


def panel(head: int, itemsize: int) -> int:
    """Elements of a panel: what 128 bytes hold, or 64 or 32 where heads are no multiple of that."""
    row = head * itemsize
    return next(width for width in (128, 64, 32) if row % width == 0) // itemsize


def maps_of(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, ...]:
    """The maps that ``plan``'s kernel takes behind ``Params``, none for one that takes none."""
    boxes = BOXES.get(plan.kernel, ())
    constants = {name: int(value) for name, value in plan.constants} if boxes else {}

    def number(x: str | int) -> int:
        return x if isinstance(x, int) else constants[x]

    def made(box: Box) -> bytes:
        x = tensors[box.tensor]
        return tensor_map(x, number(box.rows), panel(number(box.head), x.itemsize))

    return tuple(made(box) for box in boxes)


def tensor_map(x: torch.Tensor, rows: int, width: int) -> bytes:
    """The map of a tensor whose boxes are ``rows`` rows by ``width`` elements of one head."""
    whole = x if x.dim() == 4 else x.unsqueeze(0)
    batch, length, heads, dim = (max(size, 1) for size in whole.shape)
    by_batch, by_row, by_head, _ = whole.stride()
    described = _Described(
        _DTYPES[x.dtype],
        (dim, length, heads, batch),
        # Of a dimension without a second element the stride may be anything, also 0.
        tuple(
            step * x.itemsize if size > 1 else 16
            for size, step in ((length, by_row), (heads, by_head), (batch, by_batch))
        ),
        (width, rows, 1, 1),
        _SWIZZLES[width * x.itemsize],
    )
    address = x.data_ptr()
    if not movable():
        return described.encode(address)
    return _address.pack(address) + _encoded(described)[_address.size :]


@functools.lru_cache(1024)
def _encoded(described: _Described) -> bytes:
    return described.encode(_HERE)


_HERE, _THERE = 1 << 30, (1 << 47) - (1 << 20) + 16  # addresses: encoding reads nothing there


@functools.cache
def movable() -> bool:
    """Whether this driver's maps of two addresses differ in nothing but their first eight bytes."""
    example = _Described(9, (128, 4096, 16, 2), (4096, 256, 1 << 24), (64, 64, 1, 1), 3)
    here, there = example.encode(_HERE), example.encode(_THERE)
    leads = _address.unpack_from(here)[0] == _HERE and _address.unpack_from(there)[0] == _THERE
    return leads and here[_address.size :] == there[_address.size :]
