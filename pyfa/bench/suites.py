"""What is measured: a suite is a list of cells, each one problem and a way to time it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One problem. ``passes``: ``forward``, ``backward`` (alone) or ``both``; ``timed``: ``device``
    with a cold cache, ``replay`` of a graph with a warm one, or ``host``; ``unit`` of its value."""

    suite: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str
    passes: str = "forward"
    timed: str = "device"
    unit: str = "TFLOP/s"
    grad: bool = False
    cache: bool = False

    @property
    def name(self) -> str:
        """Unique in its suite: what two result files are matched by."""
        parts = [
            f"D={self.head_dim}",
            f"B={self.batch}",
            f"S={_pair(self.seqlen_q, self.seqlen_k)}",
            f"H={_pair(self.heads_q, self.heads_k)}",
            "causal" if self.causal else "full",
        ]
        if self.timed == "host":
            parts.append(f"autograd, {self.passes}" if self.grad else "inference")
        return " ".join(parts)

    @property
    def flops(self) -> float:
        """4·B·H·Sq·Sk·D, half of it under a causal mask, 2.5 times it for backward."""
        pairs = self.seqlen_q * self.seqlen_k * (0.5 if self.causal and self.seqlen_q > 1 else 1.0)
        forward = 4.0 * self.batch * self.heads_q * pairs * self.head_dim
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[self.passes]

    @property
    def kv_bytes(self) -> int:
        """K and V, read once."""
        width = 4 if self.dtype == "float32" else 2
        return 2 * self.batch * self.seqlen_k * self.heads_k * self.head_dim * width

    def value(self, seconds: float) -> float:
        """``seconds`` in the cell's unit."""
        if self.unit == "TFLOP/s":
            return self.flops / seconds / 1e12
        if self.unit == "TB/s":
            return self.kv_bytes / seconds / 1e12
        return seconds * 1e6

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _pair(queries: int, keys: int) -> str:
    return str(queries) if queries == keys else f"{queries},{keys}"


def _matrix(suite: str, passes: str, gpu: bool) -> list[Cell]:
    """Batch · seqlen = 16,384 and heads · head_dim = 2,048, as flash-attention measures itself."""
    dims, lengths = ((128, 64, 256), (16384, 4096, 1024)) if gpu else ((64,), (512, 128))
    tokens, width, dtype = (16384, 2048, "bfloat16") if gpu else (512, 256, "float32")
    return [
        Cell(
            suite, tokens // length, length, length, width // dim, width // dim, dim, causal, dtype,
            passes, grad=passes != "forward",
        )
        for dim, causal, length in itertools.product(dims, (True, False), lengths)
    ]  # fmt: skip


def _decode(gpu: bool) -> list[Cell]:
    """One query a sequence against a long cache, eight or four heads sharing each key head."""
    shapes = ((1, 65536), (8, 32768), (64, 8192)) if gpu else ((1, 8192), (4, 2048))
    heads, heads_k, dim, dtype = (32, 8, 128, "bfloat16") if gpu else (8, 2, 64, "float32")
    return [
        Cell("decode", batch, 1, keys, heads, heads_k, dim, True, dtype, unit="TB/s", cache=True)
        for batch, keys in shapes
    ]


def _small(gpu: bool) -> list[Cell]:
    """Grids that do not fill the device."""
    heads, lengths = ((8, 32), (128, 512, 2048, 8192)) if gpu else ((2,), (16, 64, 128))
    dim, dtype, timed = (128, "bfloat16", "replay") if gpu else (64, "float32", "device")
    return [
        Cell("small", 1, length, length, count, count, dim, True, dtype, timed=timed, unit="us")
        for count, length in itertools.product(heads, lengths)
    ]


def _host(gpu: bool) -> list[Cell]:
    """A problem so small that its time is the host's."""
    sizes = (1, 128, 128, 8, 8, 64) if gpu else (1, 16, 16, 2, 2, 64)
    dtype = "bfloat16" if gpu else "float32"
    ways = (("forward", False), ("forward", True), ("both", True))
    return [
        Cell("host", *sizes, True, dtype, passes, timed="host", unit="us", grad=grad)
        for passes, grad in ways
    ]


# By name: the cells for a GPU, or for a CPU.
SUITES: dict[str, Callable[[bool], list[Cell]]] = {
    "forward": lambda gpu: _matrix("forward", "forward", gpu),
    "backward": lambda gpu: _matrix("backward", "backward", gpu),
    "decode": _decode,
    "small": _small,
    "host": _host,
}
