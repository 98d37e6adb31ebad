"""Puts together what ``forward`` left for each part of the keys."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from .common import LN2, LOG2E, rounded


@triton.jit
def combine(
    PARTS, PART_LSE, OUT, LSE, heads, rows_per_batch, head_dim_v, splits, stride_lb, stride_lh,
    stride_o_split, stride_l_split,
    CHUNK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out = Σ 2^(lse_i − lse) · out_i over the parts; a row that no part saw gives 0 and −inf.

    One (row, head) pair a program, in the order of the contiguous out; CHUNK parts are read at
    once, since one after the other each would wait for the memory.
    """
    line = tl.program_id(0).to(tl.int64)
    place = line // heads
    lse_place = (
        place // rows_per_batch * stride_lb + line % heads * stride_lh + place % rows_per_batch
    )
    dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for first in range(0, splits, CHUNK):
        part = first + tl.arange(0, CHUNK)
        lse = LOG2E * tl.load(
            PART_LSE + part * stride_l_split + lse_place, mask=part < splits, other=float("-inf")
        )
        # Of a part that saw nothing the memory is as it was allocated.
        value = tl.load(
            PARTS + (part * stride_o_split)[:, None] + line * head_dim_v + dv[None, :],
            mask=(lse > float("-inf"))[:, None] & (dv < head_dim_v)[None, :],
            other=0.0,
        )
        raised = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        rescale = tl.exp2(top - base)
        weight = tl.exp2(lse - base)
        acc = acc * rescale + tl.sum(weight[:, None] * value, 0)
        total = total * rescale + tl.sum(weight, 0)
        top = raised
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    out = acc / tl.where(empty, 1.0, total)
    tl.store(LSE + lse_place, lse)
    tl.store(OUT + line * head_dim_v + dv, rounded(out, OUT.dtype.element_ty), mask=dv < head_dim_v)
