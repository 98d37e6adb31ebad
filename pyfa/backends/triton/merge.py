"""One pass over a running output: total · kept + part · added, with weights for each row and head.

It serves context parallel attention, where the outputs of blocks arrive one after the other.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl

_LINES, _WARPS = 16, 4  # 16 lines of 128 float32 values are 64 bytes for each of 128 lanes


@triton.jit
def _merge(
    TOTAL, PART, KEPT, ADDED, lines, heads, rows, dim, stride_tb, stride_ts, stride_th, stride_pb,
    stride_ps, stride_ph, stride_wb, stride_wh, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    exists = line < lines
    head = line % heads
    row = line // heads % rows
    b = line // heads // rows
    column = tl.arange(0, BLOCK)[None, :]
    weight = b * stride_wb + head * stride_wh + row
    kept = tl.load(KEPT + weight, mask=exists, other=0.0)
    added = tl.load(ADDED + weight, mask=exists, other=0.0)
    inside = exists[:, None] & (column < dim)
    total = TOTAL + (b * stride_tb + row * stride_ts + head * stride_th)[:, None] + column
    part = PART + (b * stride_pb + row * stride_ps + head * stride_ph)[:, None] + column
    x = tl.load(total, mask=inside, other=0.0) * kept[:, None]
    x += tl.load(part, mask=inside, other=0.0).to(tl.float32) * added[:, None]
    tl.store(total, x, mask=inside)


def merge(total: torch.Tensor, part: torch.Tensor, kept: torch.Tensor, added: torch.Tensor) -> None:
    """Compute total = total · kept + part · added, in place.

    ``total`` float32 (B, S, H, D) and ``part`` of any float dtype, both with contiguous rows;
    ``kept`` and ``added`` float32 (B, H, S), contiguous.
    """
    batch, rows, heads, dim = total.shape
    lines = batch * rows * heads
    if lines:
        with torch.cuda.device(total.device) if total.is_cuda else torch.no_grad():
            _merge[(triton.cdiv(lines, _LINES),)](
                total, part, kept, added, lines, heads, rows, dim, *total.stride()[:3],
                *part.stride()[:3], *kept.stride()[:2], LINES=_LINES,
                BLOCK=triton.next_power_of_2(dim), num_warps=_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip
