"""Round queries, keys and values to float8 with their scales, after a rotation if requested.

The kernel is memory-bound. With scales per block each element is read once if one program holds all
elements of a scale, otherwise a second time from the L2. The rotation is a product with the signed
Hadamard matrix on the matrix units. Its entries are ±1, so 16-bit inputs lose nothing before
float32. Programs that rotate process several blocks, so that one block is in flight while another
is rotated. Tensors of one shape share a launch: on an H200 three launches of 64 MB took 95 µs, one
launch of as many rows 82.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import device as devices
from ...validate_fp8 import LEAST_SCALE
from ..base import Rounding
from ..common.calls import with_rows
from .common import INTERPRETED, dot
from .kernel import Kernel, Launch, Slot, no_float
from .plans import KINDS
from .specs import Spec

_INTERPRETED = tl.constexpr(INTERPRETED)
# Elements that a program holds: 64 float32 registers for each lane of 8 warps.
_HELD = 16384
# Rows that a program measures where a scale has no end of its own.
_ROWS = 128
# Channels that one product turns: the matrix is 32 KB of shared memory, and of the LDS's 64.
_WIDTH = tl.constexpr(128)
# Layouts whose launches are kept, so that serving does not grow the table without end.
_MOST_READY = 1024


@triton.jit
def _float8(x, dtype: tl.constexpr, LEAST: tl.constexpr):
    """Round float32 x to ``dtype``, to nearest even. ``LEAST``: its smallest normal number."""
    if _INTERPRETED:
        # The interpreter neither rounds nor knows subnormals: it gets what needs no rounding.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        step: tl.constexpr = LEAST * 1572864.0  # 1.5 · 2²³ times the distance of subnormals
        small = (x + step) - step
        return tl.where(tl.abs(x) < LEAST, small, bits.to(tl.float32, bitcast=True)).to(dtype)
    return x.to(dtype)


@triton.jit
def _matrix(SIGNS, first, head_dim, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Return diag(signs)·H for channels first … first+WIDTH: Sylvester's ±1 in blocks of SIZE."""
    i = tl.arange(0, WIDTH)
    j = tl.arange(0, WIDTH)[None, :]
    signs = tl.load(SIGNS + first + i, mask=first + i < head_dim, other=0.0)[:, None]
    i = i[:, None]
    odd = i & j & (SIZE - 1)
    odd = odd ^ (odd >> 4)
    odd = (0x6996 >> (odd & 15)) & 1  # the parity of four bits
    return tl.where(i // SIZE == j // SIZE, tl.where(odd == 1, -signs, signs), 0.0)


@triton.jit
def _turned(x, matrix):
    """Return x·matrix in float32."""
    y = tl.zeros([x.shape[0], x.shape[1]], dtype=tl.float32)
    if x.dtype == tl.float32:
        # Three times eight bits, which the matrix units take and which are all there are.
        high = x.to(matrix.dtype)
        rest = x - high.to(tl.float32)
        middle = rest.to(matrix.dtype)
        y = dot((rest - middle.to(tl.float32)).to(matrix.dtype), matrix, y, "ieee")
        y = dot(middle, matrix, y, "ieee")
        x = high
    return dot(x, matrix, y, "ieee")


@triton.jit
def _load(
    X, base, line, row0, rows, stride_s, stride_h, first, head_dim,
    WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load channels first … first+WIDTH of lines; 0 if a line does not exist.

    A line is a row of one of the group's heads.
    """
    row = row0 + line // GROUP
    places = base + row.to(tl.int64) * stride_s
    if GROUP > 1:
        places += (line % GROUP).to(tl.int64) * stride_h
    d = first + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (d < head_dim)[None, :]
    return tl.load(X + (places[:, None] + d[None, :]), mask=inside, other=0.0)


@triton.jit
def _tile(
    X, base, line, row0, rows, stride_s, stride_h, head_dim, first, second,
    BLOCK_D: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return lines in float32, rotated if SIZE > 0 (without the rotation's factor) by ``first``
    and, above 128 channels, ``second``."""
    WIDTH: tl.constexpr = BLOCK_D if SIZE == 0 else first.shape[0]
    x = _load(X, base, line, row0, rows, stride_s, stride_h, 0, head_dim, WIDTH, GROUP)
    if SIZE == 0:
        y = x.to(tl.float32)
    else:
        y = _turned(x, first)
    if BLOCK_D > WIDTH:
        x = _load(X, base, line, row0, rows, stride_s, stride_h, WIDTH, head_dim, WIDTH, GROUP)
        z = _turned(x, second)
        if SIZE > WIDTH:
            # H256 is H128 on both halves, then their sum and difference.
            y, z = y + z, y - z
        y = tl.reshape(tl.permute(tl.join(y, z), (0, 2, 1)), (line.shape[0], BLOCK_D))
    return y


@triton.jit
def _parts(
    start, stop, X0, X1, X2, Y0, Y1, Y2, SCALES, MOST, first, second, stride_b, stride_s, stride_h,
    rows, heads, head_dim, blocks, parts, shared, programs,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, MEASURE: tl.constexpr, ROUND: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Process every ``programs``-th of parts start … stop; each tensor has ``parts``."""
    LINES: tl.constexpr = BLOCK * GROUP
    HELD: tl.constexpr = LINES <= TILE
    d = tl.arange(0, BLOCK_D)
    line = tl.arange(0, TILE)
    for each in tl.range(start, stop, programs):
        which = each // parts
        X = tl.where(which == 0, X0, tl.where(which == 1, X1, X2))
        Y = tl.where(which == 0, Y0, tl.where(which == 1, Y1, Y2))
        part = each % parts
        head = part % heads
        block = part // heads % blocks
        b = part // heads // blocks
        base = b.to(tl.int64) * stride_b + head.to(tl.int64) * GROUP * stride_h
        row0 = block * BLOCK
        end = tl.minimum(row0 + BLOCK, rows)  # a part's last tile may reach beyond it
        place = (which * parts + (b * heads + head) * blocks + block) // shared
        if HELD:
            x = _tile(
                X, base, line, row0, end, stride_s, stride_h, head_dim, first, second, BLOCK_D,
                SIZE, GROUP,
            )  # fmt: skip
        if MEASURE:
            if HELD:
                most = tl.max(tl.abs(x))
            else:
                tops = tl.zeros([TILE], dtype=tl.float32)
                for begin in tl.range(0, LINES, TILE):
                    some = _tile(
                        X, base, begin + line, row0, end, stride_s, stride_h, head_dim, first,
                        second, BLOCK_D, SIZE, GROUP,
                    )  # fmt: skip
                    tops = tl.maximum(tops, tl.max(tl.abs(some), 1))
                most = tl.max(tops)
            most *= UNIT
            if not ROUND:
                # The bits of nonnegative numbers have the order of the numbers.
                bits = most.to(tl.int32, bitcast=True)
                tl.atomic_max(MOST + place, bits, sem="relaxed")
        else:
            most = tl.load(MOST + place).to(tl.float32, bitcast=True)
        if ROUND:
            least = tl.maximum(tl.div_rn(most, LARGEST), LEAST_SCALE)
            scale = tl.where(most > 0.0, least, 1.0)
            tl.store(SCALES + place, scale)
            # A division for each element would take longer than the memory does.
            factor = tl.div_rn(1.0, scale) * UNIT
            for begin in tl.range(0, LINES, TILE):
                if not HELD:
                    x = _tile(
                        X, base, begin + line, row0, end, stride_s, stride_h, head_dim, first,
                        second, BLOCK_D, SIZE, GROUP,
                    )  # fmt: skip
                row = row0 + (begin + line) // GROUP
                member = (begin + line) % GROUP
                to = ((b.to(tl.int64) * rows + row) * heads + head) * GROUP + member
                inside = (row < end)[:, None] & (d < head_dim)[None, :]
                y = _float8(x * factor, Y.dtype.element_ty, LEAST)
                tl.store(Y + (to[:, None] * head_dim + d[None, :]), y, mask=inside)


@triton.jit
def quantize_rows(
    X0, X1, X2, Y0, Y1, Y2, SCALES, MOST, SIGNS, stride_b, stride_s, stride_h, rows, heads,
    head_dim, blocks, parts, tensors, turned, shared, programs,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, MEASURE: tl.constexpr, ROUND: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Round up to three X (B, rows, H, D) into the contiguous Y; the first ``turned`` of them are
    rotated.

    A part is BLOCK rows of the GROUP heads that share a KV head. One scale covers ``shared``
    consecutive parts in the order (tensor, sequence, KV head, block), and is written to SCALES. If
    a scale covers more than one part, a first launch (MEASURE without ROUND) raises MOST to the
    bits of the largest magnitude, and a second launch reads it. ``UNIT``: the rotation's 1/√SIZE.
    """
    begin = tl.program_id(0)
    if SIZE > 0:
        WIDTH: tl.constexpr = _WIDTH if BLOCK_D > _WIDTH else BLOCK_D
        MIXED: tl.constexpr = WIDTH if SIZE > WIDTH else SIZE
        given: tl.constexpr = X0.dtype.element_ty
        kind: tl.constexpr = tl.bfloat16 if given == tl.float32 else given
        first = _matrix(SIGNS, 0, head_dim, WIDTH, MIXED).to(kind)
        second = None
        if BLOCK_D > WIDTH:
            second = _matrix(SIGNS, WIDTH, head_dim, WIDTH, MIXED).to(kind)
        _parts(
            begin, turned * parts, X0, X1, X2, Y0, Y1, Y2, SCALES, MOST, first, second, stride_b,
            stride_s, stride_h, rows, heads, head_dim, blocks, parts, shared, programs, GROUP,
            BLOCK, TILE, BLOCK_D, SIZE, UNIT, MEASURE, ROUND, LARGEST, LEAST, LEAST_SCALE,
        )  # fmt: skip
        # Continue where the loop above ended: a program that rotated one part less rounds one part
        # more.
        begin += tl.cdiv(tl.maximum(turned * parts - begin, 0), programs) * programs
    _parts(
        begin, tensors * parts, X0, X1, X2, Y0, Y1, Y2, SCALES, MOST, None, None, stride_b,
        stride_s, stride_h, rows, heads, head_dim, blocks, parts, shared, programs, GROUP, BLOCK,
        TILE, BLOCK_D, 0, 1.0, MEASURE, ROUND, LARGEST, LEAST, LEAST_SCALE,
    )  # fmt: skip


class Shape(NamedTuple):
    """A launch. ``programs``: programs per unit of the device; 0 for one per part."""

    tile: int
    wide: int
    warps: int
    stages: int
    programs: int


@functools.cache
def launch_shape(dim: int, lines: int, turned: bool, width: int, arch: str) -> Shape:
    """Return how to process ``lines`` of ``dim`` elements of ``width`` bytes that share a scale.

    The figures in the code are bandwidths of three launches of 64 MB on an H200, relative to that
    of a copy.
    """
    wide = max(16, triton.next_power_of_2(dim))
    lines = triton.next_power_of_2(lines)
    if not turned:
        # A tile that is too large is read in two parts, or in more parts of 64 KB: with 8 warps
        # 0.81 for 128 rows of 256 channels, which 16 warps could hold (0.79), 0.86 for 512 rows of
        # 128, and 0.60 by 32 KB, where more programs run at once than the L2 holds rows for.
        tile = lines if lines * wide <= _HELD else min(lines // 2, 4 * _HELD // width // wide)
        tile = max(16, tile)
        return Shape(tile, wide, min(8, max(4, tile * wide // 2048)), 1, 0)
    # If the matrix units read their operands from registers, the registers hold half as many sums,
    # and a quarter if a float32 product is three products.
    held = 2 * _HELD
    if arch != "sm_90a" or width > 2:
        held //= width
    tile = max(16, lines if lines * wide <= held else min(held, _HELD) // wide)
    warps = min(16, max(4, tile * wide // 2048))
    if arch.startswith("gfx"):
        return Shape(tile, wide, warps, 1, 4)
    if width > 2:
        return Shape(tile, wide, max(8, warps), 1, 2)
    # Three programs a unit with three parts of 16 KB each on their way reach 0.86; of 32 KB shared
    # memory holds two of two programs (0.66, of one program 0.44), of 64 KB those of one (0.49).
    if tile * wide <= _HELD // 2:
        return Shape(tile, wide, warps, 3, 3)
    return Shape(tile, wide, warps, 2, 2 if tile * wide <= _HELD else 1)


class Layout(NamedTuple):
    """Tensors (B, rows, H, D) that share a launch, of which the first ``turned`` are rotated, and
    how they are rounded (``base.Rounding``). ``aligned``: addresses and strides are multiples of 16
    bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    given: torch.dtype
    tensors: int
    turned: int
    aligned: bool
    heads: int
    block: int | None
    per_tensor: bool
    made: torch.dtype

    @property
    def group(self) -> int:
        """Return the number of heads that share a KV head."""
        return self.shape[2] // self.heads

    @property
    def part(self) -> int:
        """Return the number of rows that a program measures at once."""
        return self.block or _ROWS


def launch_shape_of(layout: Layout, arch: str) -> Shape:
    """Return ``launch_shape`` for the lines that one program processes at once."""
    dim, lines = layout.shape[-1], layout.part * layout.group
    return launch_shape(dim, lines, layout.turned > 0, layout.given.itemsize, arch)


def spec(layout: Layout, arch: str, measure: bool = True, store: bool = True) -> Spec:
    """Return the kernel that measures or rounds ``layout``, or both."""
    dim, bytes_of = layout.shape[-1], layout.given.itemsize
    shape, info = launch_shape_of(layout, arch), torch.finfo(layout.made)
    size = dim & -dim if layout.turned else 0
    constants = {
        "GROUP": layout.group, "BLOCK": layout.part, "TILE": shape.tile, "BLOCK_D": shape.wide,
        "SIZE": size, "UNIT": size**-0.5 if size else 1.0, "MEASURE": measure, "ROUND": store,
        "LARGEST": info.max, "LEAST": info.tiny, "LEAST_SCALE": LEAST_SCALE,
    }  # fmt: skip
    given, made = (KINDS[str(x).removeprefix("torch.")] for x in (layout.given, layout.made))
    types = dict.fromkeys(("X0", "X1", "X2"), f"*{given}")
    types |= dict.fromkeys(("Y0", "Y1", "Y2"), f"*{made}")
    types |= {"SCALES": "*fp32", "MOST": "*i32", "SIGNS": "*fp32"}
    divisors = dict.fromkeys(("X0", "X1", "X2"), 16 if layout.aligned else bytes_of)
    divisors |= dict.fromkeys(("Y0", "Y1", "Y2"), 16) | {"head_dim": min(16, dim & -dim)}
    if layout.aligned:
        divisors |= dict.fromkeys(("stride_b", "stride_s", "stride_h"), 16 // bytes_of)
    signature = {
        name: "constexpr" if name in constants
        else types.get(name, "i64" if name.startswith("stride_") else "i32")
        for name in quantize_rows.arg_names
    }  # fmt: skip
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return Spec(quantize_rows, signature, constants, divisors, options)


@functools.cache
def _kernel(layout: Layout, arch: str, index: int | None, measure: bool, store: bool) -> Kernel:
    """Return the kernel. In ``layout``, sizes that kernels do not depend on are 1, so that many
    layouts share one."""
    return Kernel(spec(layout, arch, measure, store), index)


_POINTERS = ("x0", "x1", "x2", "y0", "y1", "y2", "scales", "most", "signs")


class _Ready(NamedTuple):
    """The shape of the scales, and launches that lack only the addresses of ``_POINTERS``."""

    scales: tuple[int, ...]
    run: tuple[Launch, ...]


@functools.lru_cache(_MOST_READY)
def _ready(layout: Layout, where: torch.device) -> _Ready:
    """Return the launches of a layout with everything filled in except addresses."""
    on = devices.of(where)
    batch, rows, _, dim = layout.shape
    shape = launch_shape_of(layout, on.arch)
    blocks = -(-rows // layout.part)
    parts = batch * layout.heads * blocks
    shared = 1 if layout.block else parts if layout.per_tensor else blocks
    programs = min(layout.tensors * parts, shape.programs * on.units or layout.tensors * parts)
    sizes = (layout.heads, blocks) if layout.block else (layout.heads,)
    scales = (layout.tensors, 1, 1) if layout.per_tensor else (layout.tensors, batch, *sizes)
    alike = layout._replace(
        shape=(1, 1, layout.group, dim), strides=(), tensors=1, turned=min(1, layout.turned),
        heads=1, per_tensor=False,
    )  # fmt: skip
    rest = (
        *layout.strides[:3], rows, layout.heads, dim, blocks, parts, layout.tensors, layout.turned,
        shared, programs,
    )  # fmt: skip
    passes = ((True, True),) if layout.block else ((True, False), (False, True))
    arguments = (*(Slot(name) for name in _POINTERS), *rest)
    numbers = {name: number for number, name in enumerate(_POINTERS)}
    run = tuple(
        _kernel(alike, on.arch, where.index, *each).bind(programs, arguments, numbers)
        for each in passes
    )
    return _Ready(scales, run)


def quantize(xs: Sequence[torch.Tensor], how: Rounding) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Implement ``base.Quantizing.quantize``."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    turned = 0 if how.signs is None else len(xs) - 1
    for _, alike in itertools.groupby(map(with_rows, xs), lambda x: (x.shape, x.stride())):
        group = list(alike)
        few = min(turned, len(group))
        turned -= few
        made += _together(group, few, how)
    return made


def _together(
    xs: list[torch.Tensor], turned: int, how: Rounding
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Quantize tensors of one shape and strides; the first ``turned`` of them are rotated."""
    x = xs[0]
    heads, block, per_tensor, signs, dtype = how
    ys = [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in xs]
    strides = x.stride()
    bits = (strides[0] | strides[1] | strides[2]) * x.itemsize
    for each in xs:
        bits |= each.data_ptr()
    layout = Layout(
        x.shape, strides, x.dtype, len(xs), turned, bits & 15 == 0, heads, block, per_tensor, dtype
    )
    ready = _ready(layout, x.device)
    scales = x.new_empty(ready.scales, dtype=torch.float32)
    most = scales if block else torch.zeros_like(scales, dtype=torch.int32)
    last = len(xs) - 1
    given = [*(each[min(i, last)] for each in (xs, ys) for i in range(3)), scales, most]
    pointers = [x if INTERPRETED else x.data_ptr() for x in given]
    if signs is None:
        pointers.append(no_float)
    else:
        pointers.append(signs if INTERPRETED else signs.data_ptr())
    for run in ready.run:
        run(pointers, None)
    return list(zip(ys, scales.unbind(), strict=True))
