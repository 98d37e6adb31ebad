"""The pictures of ``pyfa plan --plot``: a roofline, bytes and memory by sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import BACKENDS
from ..backends.base import Tiled
from ..bench import charts
from ..dispatch import Explanation
from ..traffic import Model, Shape, TiledKernel, model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LENGTHS = [1 << power for power in range(7, 19)]  # 128 … 262,144


def draw(path: Path, answer: Explanation, shape: Shape, dtype: str) -> None:
    """Draw three panels to ``path``. The roofline is empty if the device has no known peak."""
    models = {length: _model(answer, _at(shape, length), dtype) for length in _LENGTHS}
    asked = _model(answer, shape, dtype)
    made, axes = charts.figure(columns=3, width=4.6)
    _roofline(axes[0], asked)
    to = "forward"
    curves: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for length, one in models.items():
        curves.setdefault("compulsory", []).append((length, one.compulsory[to]))
        for way in ("standard", "tiled"):
            cost = one.costs.get((way, to))
            if cost is not None:
                curves.setdefault(f"{way}, DRAM estimate", []).append((length, cost.dram))
                curves.setdefault(f"{way}, requested", []).append((length, cost.requested))
            for kind in ("forward", "training"):
                memory.setdefault(f"{way}, {kind}", []).append((length, one.peak_bytes[way, kind]))
    where = f"{asked.device.name or asked.device.arch}, {_sizes(shape)}"
    charts.lines(axes[1], curves, "queries and keys", "bytes of a forward", f"Bytes: {where}")
    if asked.device.memory_bytes:
        axes[2].axhline(
            asked.device.memory_bytes, color=charts.INK, linestyle=":", linewidth=0.9,
            label=f"memory of {asked.device.name}",
        )  # fmt: skip
    charts.lines(axes[2], memory, "queries and keys", "peak bytes", f"Memory: {where}")
    charts.save(made, path)


def _sizes(shape: Shape) -> str:
    return f"B={shape.batch} H={shape.heads_q} D={shape.head_dim}"


def _roofline(axes: Axes, asked: Model) -> None:
    if not asked.ridge:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "peaks not known", ha="center", color=charts.INK)
        return
    points = {
        f"{way}, {to}": (cost.intensity, asked.flops[to] / cost.seconds)
        for (way, to), cost in asked.costs.items()
        if cost.seconds
    }
    title = f"Roofline: {asked.device.name}, {asked.dtype} (bounds)"
    charts.roofline(axes, asked.device, asked.dtype, points, title)


def _at(shape: Shape, length: int) -> Shape:
    """Return the same attention with ``length`` keys, and as many queries unless it is decode."""
    rows = length if shape.seqlen_q == shape.seqlen_k else min(shape.seqlen_q, length)
    return shape._replace(seqlen_q=rows, seqlen_k=length)


def _model(answer: Explanation, shape: Shape, dtype: str) -> Model:
    """Compute the costs with the tiles that the chosen backend would use at these lengths."""
    asked = replace(answer.problem, seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k)
    kernels: Sequence[TiledKernel] = ()
    if answer.chosen is not None:
        backend = BACKENDS[answer.chosen]
        plan = backend.plan(asked.bucketed())
        if isinstance(backend, Tiled):
            kernels = backend.tiled_kernels(plan, asked, shape, False)
    return model(shape, asked.device, dtype, kernels)
