"""Neutral workloads for the emulator: Triton kernels compiled ahead of time for gfx942."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(x, y, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    values = tl.load(x + row * stride + at, mask=mask, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * stride + at, values / tl.sum(values, 0), mask=mask)


@triton.jit
def matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = tl.load(
            a + rows[:, None] * k + (start + inner)[None, :],
            mask=(rows[:, None] < m) & ((start + inner)[None, :] < k),
            other=0.0,
        )
        right = tl.load(
            b + (start + inner)[:, None] * n + columns[None, :],
            mask=((start + inner)[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=inside)


@triton.jit
def attention(
    q,
    k,
    v,
    o,
    length,
    scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    first = tl.program_id(0) * BM
    head = tl.program_id(1) * length * D
    rows, d = first + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + head + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(first + BM, length) if CAUSAL else length
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        inside = columns < length
        key = tl.load(k + head + columns[None, :] * D + d[:, None], mask=inside[None, :], other=0)
        score = tl.dot(query, key) * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        score = tl.where(seen, score, -float("inf"))
        new = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(v + head + columns[:, None] * D + d[None, :], mask=inside[:, None], other=0)
        out = tl.dot(p.to(value.dtype), value, out * shrink[:, None])
        top = new
    out = out / total[:, None]
    tl.store(
        o + head + rows[:, None] * D + d[None, :],
        out.to(o.dtype.element_ty),
        mask=rows[:, None] < length,
    )


def build(function, signature, constants, **options):
    """The code object, its kernel's name, bytes of dynamic LDS and threads of a workgroup."""
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    facts = compiled.metadata
    return compiled.asm["hsaco"], facts.name, facts.shared, facts.num_warps * 64
