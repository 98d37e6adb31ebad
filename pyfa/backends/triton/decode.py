"""Combine the results that ``forward`` computes for each split of the keys."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra import cuda

from .common import LN2, LOG2E, rounded


@triton.jit
def combine(
    PARTS, PART_LSE, OUT, LSE, lines, heads, rows_per_batch, head_dim_v, splits, stride_lb,
    stride_lh, stride_o_split, stride_l_split,
    LINES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_DV: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute out = Σ 2^(lse_i − lse) · out_i over the splits; a fully masked row gives 0 and −inf.

    A program combines LINES (row, head) pairs, in the order of the contiguous out. It reads AT_ONCE
    splits together to hide memory latency. ``AHEAD``: the kernel was launched while ``forward``
    still ran, and waits for it here.
    """
    if AHEAD:
        cuda.gdc_wait()
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    exists = (line < lines)[:, None]
    place = line // heads
    lse_place = (
        place // rows_per_batch * stride_lb + line % heads * stride_lh + place % rows_per_batch
    )
    dv = tl.arange(0, BLOCK_DV)
    top = tl.full([LINES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LINES], dtype=tl.float32)
    acc = tl.zeros([LINES, BLOCK_DV], dtype=tl.float32)
    offsets = (line * head_dim_v)[:, None] + dv[None, :]
    for first in range(0, splits, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        lse = LOG2E * tl.load(
            PART_LSE + (lse_place[:, None] + (part * stride_l_split)[None, :]),
            mask=exists & (part < splits)[None, :],
            other=float("-inf"),
        )
        # The output of a part that saw no key is uninitialized memory.
        value = tl.load(
            PARTS + (offsets[:, None, :] + (part * stride_o_split)[None, :, None]),
            mask=(lse > float("-inf"))[:, :, None] & (dv < head_dim_v)[None, None, :],
            other=0.0,
        )
        raised = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        rescale = tl.exp2(top - base)
        weight = tl.exp2(lse - base[:, None])
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * value, 1)
        total = total * rescale + tl.sum(weight, 1)
        top = raised
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    out = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(LSE + lse_place, lse, mask=line < lines)
    tl.store(
        OUT + offsets, rounded(out, OUT.dtype.element_ty), mask=exists & (dv < head_dim_v)[None, :]
    )
