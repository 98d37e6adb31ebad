"""Rounds queries, keys or values to float8 with their scales, after a rotation where asked for.

Memory-bound: with scales per block each element is read once, where a program holds what shares a
scale, and else a second time from the L2. The rotation is a product with the Hadamard matrix on the
matrix units: its entries are ±1, so that 16-bit inputs lose nothing before float32.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...validate_fp8 import LEAST_SCALE
from ..base import Rounding
from .common import INTERPRETED, dot

_INTERPRETED = tl.constexpr(INTERPRETED)
# Elements of a program's tile: 64 float32 registers for each of 256 lanes.
_TILE = 16384
# Rows that a program measures where a scale has no end of its own.
_PART = 128


@triton.jit
def _float8(x, dtype: tl.constexpr, LEAST: tl.constexpr):
    """float32 x in ``dtype``, to nearest even. ``LEAST``: its smallest normal number."""
    if _INTERPRETED:
        # The interpreter neither rounds nor knows subnormals: it gets what needs no rounding.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        step: tl.constexpr = LEAST * 1572864.0  # 1.5 · 2²³ times the distance of subnormals
        small = (x + step) - step
        return tl.where(tl.abs(x) < LEAST, small, bits.to(tl.float32, bitcast=True)).to(dtype)
    return x.to(dtype)


@triton.jit
def _hadamard(WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Sylvester's matrix of ±1, [WIDTH, WIDTH], in blocks of SIZE along the diagonal."""
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    odd = i & j & (SIZE - 1)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return tl.where(i // SIZE == j // SIZE, 1.0 - 2.0 * odd.to(tl.float32), 0.0)


@triton.jit
def _tile(
    X, base, first, row0, rows, stride_xs, stride_xh, group, head_dim, SIGNS,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """(x of lines first … in float32, their row, their head in the group); 0 where none exists.

    A line is a row of one of the group's heads.
    """
    line = first + tl.arange(0, TILE)
    row = row0 + line // group
    head = line % group
    d = tl.arange(0, BLOCK_D)
    exists = (row < rows)[:, None] & (d < head_dim)[None, :]
    places = base + row.to(tl.int64) * stride_xs + head * stride_xh
    x = tl.load(X + (places[:, None] + d[None, :]), mask=exists, other=0.0)
    if SIZE > 0:
        signs = tl.load(SIGNS + d, mask=d < head_dim, other=0.0)
        turned = (x.to(tl.float32) * signs[None, :]).to(x.dtype)
        # A matrix of 256 would not fit the LDS: H256 is H128 on both halves, then their sum and
        # difference.
        WIDTH: tl.constexpr = 128 if BLOCK_D > 128 else BLOCK_D
        matrix = _hadamard(WIDTH, 128 if SIZE > 128 else SIZE).to(x.dtype)
        if BLOCK_D > 128:
            turned = tl.reshape(turned, (TILE * 2, WIDTH))
        y = dot(turned, matrix, tl.zeros([turned.shape[0], WIDTH], dtype=tl.float32), "ieee")
        if BLOCK_D > 128:
            halves = tl.permute(tl.reshape(y, (TILE, 2, WIDTH)), (0, 2, 1))
            if SIZE > 128:
                a, b = tl.split(halves)
                halves = tl.join(a + b, a - b)
            y = tl.reshape(tl.permute(halves, (0, 2, 1)), (TILE, BLOCK_D))
        x = y * (1.0 / tl.sqrt(SIZE * 1.0))
    return x.to(tl.float32), row, head


@triton.jit
def quantize_rows(
    X, Y, SCALES, SIGNS, stride_xb, stride_xs, stride_xh, stride_sb, stride_sh, rows, heads, group,
    head_dim, blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
    MEASURE: tl.constexpr, ROUND: tl.constexpr, HELD: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of the heads that share a key head, of X (B, rows, H, D); Y is contiguous.

    ``MEASURE``: SCALES (B, Hk, blocks) gets their scale, or where they are not to be ``ROUND``\\ ed
    their largest magnitude; otherwise it tells the scale. ``HELD``: all of it is one tile.
    """
    pid = tl.program_id(0)
    head = pid % heads
    block = pid // heads % blocks
    b = pid // heads // blocks
    base = b.to(tl.int64) * stride_xb + head.to(tl.int64) * group * stride_xh
    row0 = block * BLOCK
    d = tl.arange(0, BLOCK_D)
    lines = BLOCK * group
    place = SCALES + b * stride_sb + head * stride_sh + (block if MEASURE else 0)
    if HELD:
        x, row, member = _tile(
            X, base, 0, row0, rows, stride_xs, stride_xh, group, head_dim, SIGNS, TILE, BLOCK_D,
            SIZE,
        )  # fmt: skip
    if MEASURE:
        if HELD:
            most = tl.max(tl.abs(x))
        else:
            most = tl.max(tl.zeros([TILE], dtype=tl.float32))
            for first in range(0, lines, TILE):
                part, row, member = _tile(
                    X, base, first, row0, rows, stride_xs, stride_xh, group, head_dim, SIGNS, TILE,
                    BLOCK_D, SIZE,
                )  # fmt: skip
                most = tl.maximum(most, tl.max(tl.abs(part)))
        scale = most
        if ROUND:
            scale = tl.where(most > 0.0, tl.maximum(most / LARGEST, LEAST_SCALE), 1.0)
        tl.store(place, scale)
    else:
        scale = tl.load(place)
    if ROUND:
        for first in range(0, lines, TILE):
            if not HELD:
                x, row, member = _tile(
                    X, base, first, row0, rows, stride_xs, stride_xh, group, head_dim, SIGNS, TILE,
                    BLOCK_D, SIZE,
                )  # fmt: skip
            to = ((b.to(tl.int64) * rows + row) * heads + head) * group + member
            kept = (row < rows)[:, None] & (d < head_dim)[None, :]
            y = _float8(tl.div_rn(x, scale), Y.dtype.element_ty, LEAST)
            tl.store(Y + (to[:, None] * head_dim + d[None, :]), y, mask=kept)


def launch_shape(dim: int, lines: int, turned: bool) -> tuple[int, int, int]:
    """TILE, BLOCK_D and warps for ``lines`` of ``dim`` elements that share a scale."""
    wide = max(16, triton.next_power_of_2(dim))
    # Above 128 channels the rotation's halves change places through the LDS.
    most = _TILE // (4 if wide > 128 and turned else 1)
    tile = max(16, min(most // wide, triton.next_power_of_2(lines)))
    return tile, wide, 8 if tile * wide > _TILE // 2 else 4


def quantize(x: torch.Tensor, how: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """``base.Quantizing.quantize``."""
    heads, block, per_tensor, signs, dtype = how
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, rows, all_heads, dim = x.shape
    group = all_heads // heads
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    part = block or _PART
    blocks = -(-rows // part)
    scales = torch.empty((batch, heads, blocks), device=x.device)
    if y.numel() == 0:
        return y, scales if block else torch.ones((batch, heads), device=x.device)
    info = torch.finfo(dtype)
    tile, wide, warps = launch_shape(dim, part * group, signs is not None)

    def run(to: torch.Tensor, measure: bool, store: bool) -> None:
        quantize_rows[(batch * heads * blocks,)](
            x, y, to, x if signs is None else signs, *x.stride()[:3], *to.stride()[:2], rows, heads,
            group, dim, blocks, part, tile, wide, 0 if signs is None else dim & -dim, measure,
            store, part * group <= tile, info.max, info.tiny, LEAST_SCALE,
            num_warps=warps,
        )  # fmt: skip

    if block:
        run(scales, True, True)
        return y, scales
    run(scales, True, False)
    largest = scales.amax().expand(1, 1) if per_tensor else scales.amax(-1)
    scale = torch.where(largest > 0.0, (largest / info.max).clamp(min=LEAST_SCALE), 1.0)
    run(scale.expand(batch, heads), False, True)
    return y, scale
