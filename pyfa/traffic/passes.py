"""The sequence of kernels of an attention: a plan's, and those of standard attention.

Standard attention is defined by Dao et al. (2022), algorithms 0 (forward) and 3 (backward): a
matrix product, softmax, another product, with S and P in memory between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..shape import Shape
from .flops import tile_flops
from .kernels import ROLES, TiledKernel
from .memory import read_once, tensor_bytes
from .requested import requested_bytes, requested_of, workgroups

# The tile of a vendor's matrix product on large matrices. This is an assumption, which affects only
# the requested bytes of standard attention.
GEMM_TILE = 128
# Intermediate results that one kernel leaves for another.
INTERMEDIATE = frozenset({"s", "p", "dp", "ds", "delta", "partial", "dq_sum"})


class Stream(NamedTuple):
    """Bytes of one tensor in one kernel. ``once``: if read or written once; ``asked``: as the
    kernel requests them."""

    tensor: str
    once: int
    asked: int


class Pass(NamedTuple):
    """One kernel: what it reads and writes, its matrix FLOPs, the number of its workgroups and of
    its independent heads (heads that share K and V count as one)."""

    name: str
    reads: tuple[Stream, ...]
    writes: tuple[Stream, ...]
    flops: int
    workgroups: int
    heads: int

    @property
    def requested(self) -> int:
        """Return the bytes requested from the memory system."""
        return sum(stream.asked for stream in (*self.reads, *self.writes))


def tiled_passes(shape: Shape, kernels: Sequence[TiledKernel]) -> list[Pass]:
    """Return the kernels of a plan; backward includes the row sums, and split keys include the
    merge."""
    found: list[Pass] = []
    for kernel in kernels:
        if kernel.role != "forward" and not any(p.name == "row sums" for p in found):
            found.append(_row_sums(shape))
        found.append(_tiled(shape, kernel))
        if kernel.role == "forward" and kernel.tiling.splits > 1:
            found.append(_merge(shape, kernel))
        if ROLES[kernel.role].added:
            found.append(_rounding(shape))
    return found


def _tiled(shape: Shape, kernel: TiledKernel) -> Pass:
    once = read_once(shape)
    reads, writes = requested_of(shape, kernel)
    return Pass(
        kernel.role,
        # A kernel cannot ask for less than it needs: what `once` holds and no block asks for is of
        # rows that see nothing.
        tuple(Stream(name, min(once[name], asked), asked) for name, asked in reads.items()),
        # A tensor that is accumulated into is in memory once, however often it is added to.
        tuple(
            Stream(
                name, min(once[name], asked) if name in ROLES[kernel.role].added else asked, asked
            )
            for name, asked in writes.items()
        ),
        tile_flops(shape, kernel),
        workgroups(shape, kernel),
        max(1, shape.batch * shape.heads_k),
    )


def _row_sums(shape: Shape) -> Pass:
    sizes = tensor_bytes(shape)
    reads, writes = _whole(sizes, "out", "dout", "lse"), _whole(sizes, "delta")
    return Pass("row sums", reads, writes, 0, shape.batch_heads, max(1, shape.batch_heads))


def _merge(shape: Shape, kernel: TiledKernel) -> Pass:
    asked = requested_bytes(shape, kernel.tiling)
    sums = tensor_bytes(shape)["lse"] * kernel.tiling.splits
    reads = (Stream("partial", asked.merged + sums, asked.merged + sums),)
    writes = (Stream("out", asked.out, asked.out), Stream("lse", asked.lse, asked.lse))
    heads = shape.batch_heads
    return Pass("merge", reads, writes, 0, heads * shape.seqlen_q, max(1, heads))


def _rounding(shape: Shape) -> Pass:
    sizes = tensor_bytes(shape)
    reads, writes = _whole(sizes, "dq_sum"), _whole(sizes, "dq")
    return Pass("rounding of dQ", reads, writes, 0, shape.batch_heads, max(1, shape.batch_heads))


def _whole(sizes: dict[str, int], *names: str) -> tuple[Stream, ...]:
    return tuple(Stream(name, sizes[name], sizes[name]) for name in names)


class _Matrices:
    """Products and element-wise kernels over all heads of ``shape``, masked or not: standard
    attention computes every score."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.sizes = tensor_bytes(shape)
        self.sizes |= dict.fromkeys(("p", "dp", "ds"), self.sizes["s"])

    def product(self, name: str, left: str, right: str, out: str) -> Pass:
        """Return ``out`` = left · right; each output tile requests its whole rows and columns."""
        rows, columns, inner = self._sides(out, left)
        across, down = -(-columns // GEMM_TILE), -(-rows // GEMM_TILE)
        sizes = self.sizes
        # Query heads of a group read the same K and V.
        shared = dict.fromkeys(("k", "v"), self.shape.group)
        reads = tuple(
            Stream(x, sizes[x], sizes[x] * shared.get(x, 1) * times)
            for x, times in ((left, across), (right, down))
        )
        heads = self.shape.batch_heads
        flops = 2 * heads * rows * columns * inner
        return Pass(name, reads, _whole(sizes, out), flops, heads * across * down, max(1, heads))

    def each(self, name: str, reads: Sequence[str], out: str) -> Pass:
        """Return a kernel that reads whole matrices and writes one."""
        heads = self.shape.batch_heads
        return Pass(
            name, _whole(self.sizes, *reads), _whole(self.sizes, out), 0,
            heads * self.shape.seqlen_q, max(1, heads),
        )  # fmt: skip

    def _sides(self, out: str, left: str) -> tuple[int, int, int]:
        """Return rows, columns and inner length of a product, by the names of its output and left
        operand."""
        shape = self.shape
        q, k, d, dv = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.head_dim_v
        inner = dv if left == "dout" else d
        return {
            "s": (q, k, inner), "dp": (q, k, inner),
            "out": (q, dv, k), "dq": (q, d, k), "dk": (k, d, q), "dv": (k, dv, q),
        }[out]  # fmt: skip


def standard_forward(shape: Shape, elementwise: int = 0) -> list[Pass]:
    """Return the passes S = QKᵀ; P = softmax(S); O = PV.

    ``elementwise``: the number of further kernels, each of which reads and writes all of S. Eager
    PyTorch has two: one for the scale and one for the mask.
    """
    m = _Matrices(shape)
    return [
        m.product("S = QKᵀ", "q", "k", "s"),
        *(m.each("scale or mask", ("s",), "s") for _ in range(elementwise)),
        m.each("P = softmax(S)", ("s",), "p"),
        m.product("O = PV", "p", "v", "out"),
    ]


def standard_backward(shape: Shape) -> list[Pass]:
    """Return dV = PᵀdO; dP = dO Vᵀ; dS from P and dP; dQ = dS K; dK = dSᵀQ."""
    m = _Matrices(shape)
    return [
        m.product("dV = PᵀdO", "p", "dout", "dv"),
        m.product("dP = dO Vᵀ", "dout", "v", "dp"),
        m.each("dS = P∘(dP − Σ)", ("p", "dp"), "ds"),
        m.product("dQ = dS K", "ds", "k", "dq"),
        m.product("dK = dSᵀQ", "ds", "q", "dk"),
    ]
