"""Tensor maps: descriptions of tensors for Hopper's copy engine (TMA), encoded by the driver.

A map describes a tensor (B, S, H, D), or (total, H, D), as four dimensions, the contiguous one
first. It also fixes the box that one copy moves: some rows of one panel of a head. Its 128 bytes
are opaque. On every driver seen so far the first eight bytes are the address, so a map is encoded
once and patched. On any other driver it is encoded again for every launch.
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
from ...sizes import Size
from ..common import libcuda
from ..common.arguments import TensorMap
from ..native.plans import values_of

# CU_TENSOR_MAP_DATA_TYPE_…; float8 are bytes.
_DTYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: 0}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_…, by bytes
_NO_INTERLEAVE, _ZEROS = 0, 0
_PROMOTIONS = {128: 2, 256: 3}  # CU_TENSOR_MAP_L2_PROMOTION_…, by bytes
_address = struct.Struct("<Q")


class Box(NamedTuple):
    """The region that one copy moves: ``rows`` by a panel of a head that is ``head`` wide.

    ``rows`` and ``head`` are numbers, or names of constants of the plan. Of a head with at most
    ``short`` bytes, L2 fetches 128 bytes at once, as many as a row of the box has; of a longer one
    256: see docs/kernels/cuda_sm90_forward.md and cuda_sm90_latent.md.
    """

    tensor: str
    rows: str | int
    head: str | int
    short: int = 0


# The boxes of each kernel, in the order of its maps.
BOXES: dict[str, tuple[Box, ...]] = {
    "cuda/sm90/attn_fwd.cu": (
        Box("q", 64, "HEAD_DIM", short=256),
        Box("k", "BLOCK_K", "HEAD_DIM", short=256),
        Box("v", "BLOCK_K", "HEAD_DIM_V", short=256),
        Box("bias", 64, 64),
    ),
    "cuda/sm90/attn_latent.cu": (Box("k", "BLOCK_K", "HEAD_DIM", short=1152),),
    "cuda/sm90/attn_bwd.cu": (
        Box("q", "BLOCK_Q", "HEAD_DIM"),
        Box("k", "BLOCK_K", "HEAD_DIM"),
        Box("v", "BLOCK_K", "HEAD_DIM_V"),
        Box("dout", "BLOCK_Q", "HEAD_DIM_V"),
        Box("dk", 16, "HEAD_DIM"),
        Box("dv", 16, "HEAD_DIM_V"),
        Box("bias", "BLOCK_Q", 64),
    ),
}
# Tensors that a program makes itself and that have a map.
MADE = ("rotated_q", "dk", "dv")
# The constants of plans that read tiles of a bias: in ``TERMS`` of the backward, and ``SCORE`` of
# the forward.
BIAS_TILES, BIAS_SCORE = 32, 6


class Described(NamedTuple):
    """A map without the address: sizes and box in elements, strides in bytes."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    promotion: int

    def encode(self, address: int) -> bytes:
        driver, rank = libcuda.library(), len(self.sizes)
        if driver is None:
            raise RuntimeError("there is no CUDA driver")
        # The address of the map must be a multiple of 64.
        room = ctypes.create_string_buffer(abi.MAP_SIZE + abi.MAP_ALIGNMENT)
        at = -(-ctypes.addressof(room) // abi.MAP_ALIGNMENT) * abi.MAP_ALIGNMENT
        encode = functools.partial(
            driver.cuTensorMapEncodeTiled,
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
            ctypes.c_int(_PROMOTIONS[self.promotion]),
            ctypes.c_int(_ZEROS),
        )
        error = encode()
        # A thread of autograd may not have used its device yet.
        if error == libcuda.NO_CONTEXT and libcuda.use_primary_context(torch.cuda.current_device()):
            error = encode()
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}: {self}")
        return ctypes.string_at(at, abi.MAP_SIZE)


def panel(head: int, itemsize: int) -> int:
    """Return the elements of a panel: 128 bytes, or 64 or 32 if the head is not a multiple of
    that."""
    row = head * itemsize
    return next(width for width in (128, 64, 32) if row % width == 0) // itemsize


def maps_of(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    pointers: Mapping[str, str],
    addresses: Mapping[str, int] | None = None,
) -> list[TensorMap]:
    """Return the maps that follow the ``Params`` of ``plan``'s kernel; empty if it takes none.

    ``pointers``: the names among ``tensors`` that the members of ``Params`` point to. Each launch
    fills in the addresses and the numbers of packed rows, unless ``addresses`` are given.
    """
    boxes = BOXES.get(plan.kernel, ())
    constants = values_of(plan) if boxes else {}

    def number(x: str | int) -> int:
        return x if isinstance(x, int) else constants[x]

    def rows_of(box: Box) -> int:
        of_page = constants.get("PAGE_ROWS", 0) if box.tensor in ("k", "v") else 0
        return of_page or number(box.rows)

    def made(box: Box) -> TensorMap:
        name = pointers[box.tensor]
        x, rows, heads = tensors[name], rows_of(box), 1
        if "PACKED" in constants and box.tensor == "q":
            heads = x.shape[-2] // tensors[pointers["k"]].shape[-2]
            rows //= heads
        if box.tensor == "bias":
            x = whole_dimensions(x)
        head = number(box.head)
        promotion = 128 if head * x.itemsize <= box.short else 256
        described = describe(x, rows, panel(head, x.itemsize), heads, promotion)
        if addresses is not None:
            return TensorMap(described.encode(addresses[name]), "")
        total = Size("k" if box.tensor in ("k", "v", "dk", "dv") else "q")
        sizes = ((rows_at(), total + -1),) if x.dim() == 3 and x.shape[0] else ()
        return TensorMap(_encoded(described), name, sizes)

    tiles = constants.get("SCORE") == BIAS_SCORE or constants.get("TERMS", 0) & BIAS_TILES
    return [made(box) for box in boxes if tiles or box.tensor != "bias"]


def whole_dimensions(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias as (B | 1, Sq, H | 1, Sk), without the copies of a broadcast dimension."""
    for dim in (0, 1):
        if not bias.stride(dim):
            bias = bias.narrow(dim, 0, 1)
    return bias.transpose(1, 2)


def describe(
    x: torch.Tensor, rows: int, width: int, boxed_heads: int = 1, promotion: int = 256
) -> Described:
    """Describe the tensor map of ``x``. A box has ``boxed_heads`` heads, one after the other. Of
    each head it has ``rows`` rows of ``width`` elements. L2 fetches ``promotion`` bytes at once."""
    shape, strides = tuple(x.shape), x.stride()
    packed = len(shape) == 3
    if packed:
        shape, strides = (1, *shape), (0, *strides)
    batch, length, heads, dim = (max(size, 1) for size in shape)
    by_batch, by_row, by_head, _ = strides
    return Described(
        _DTYPES[x.dtype],
        (dim, length, heads, batch),
        # The stride of a dimension with one element may be anything, also 0. A packed tensor with
        # one row may have more rows in the next call.
        tuple(
            step * x.itemsize if size > 1 else 16
            for size, step in ((length + packed, by_row), (heads, by_head), (batch, by_batch))
        ),
        (width, rows, boxed_heads, 1),
        _SWIZZLES[width * x.itemsize],
        promotion,
    )


def _encoded(described: Described) -> bytes:
    """Return the map of a tensor at any address. Encoding takes 20 µs, and the number of rows of a
    packed tensor differs at each step, so the offset of this number in the map is determined once.
    """
    dim, rows, *rest = described.sizes
    data = bytearray(_encoded_as_is(described._replace(sizes=(dim, _ROWS, *rest))))
    _rows.pack_into(data, rows_at(), rows - 1)
    return bytes(data)


@functools.lru_cache(1024)
def _encoded_as_is(described: Described) -> bytes:
    return described.encode(_HERE)


_rows = struct.Struct("<I")
_ROWS = 4096  # rows of the maps from which other maps are made


@functools.cache
def rows_at() -> int:
    """Return the byte offset of the number of rows, less 1, in this driver's maps; 0 if maps with
    different numbers of rows differ elsewhere, too."""
    numbers = (_ROWS, 1, 77_777, (1 << 31) - 9)
    maps = [_EXAMPLE._replace(sizes=(128, n, 16, 2)).encode(_HERE) for n in numbers]
    for at in range(_address.size, abi.MAP_SIZE, _rows.size):
        if all(_rows.unpack_from(x, at)[0] == n - 1 for x, n in zip(maps, numbers, strict=True)):
            others = {x[:at] + x[at + _rows.size :] for x in maps}
            return at if len(others) == 1 else 0
    return 0


_HERE, _THERE = 1 << 30, (1 << 47) - (1 << 20) + 16  # addresses: encoding reads nothing there


_EXAMPLE = Described(9, (128, 4096, 16, 2), (4096, 256, 1 << 24), (64, 64, 1, 1), 3, 256)


@functools.cache
def movable() -> bool:
    """Return whether this driver encodes the address of a tensor map only in its first eight bytes,
    and the number of rows only at the offset that ``rows_at`` returns."""
    here, there = _EXAMPLE.encode(_HERE), _EXAMPLE.encode(_THERE)
    leads = _address.unpack_from(here)[0] == _HERE and _address.unpack_from(there)[0] == _THERE
    moves = leads and here[_address.size :] == there[_address.size :]
    return moves and rows_at() > 0
