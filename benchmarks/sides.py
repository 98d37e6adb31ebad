"""Forward and backward of implementations of one attention, side by side and in the same way.

Kernel times: the queue is filled ahead of the GPU, so that no sample contains the host's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch import config as functorch_config

from pyfa.bench.timing import Clock, in_turns

HOW = (
    "Five rounds in which the sides take turns, 0.03 s of samples each: events around each call, "
    "work queued before that outlasts the host's launches, a buffer larger than any cache "
    "overwritten in between; medians in ms. Spread: the 10th and 90th percentiles over the "
    "median, the widest of the row."
)
ROUNDS, SECONDS = 5, 0.03
Options = dict[str, Any]


class Side(NamedTuple):
    """``attend`` maps ``leaves``, which require gradients, to an output of ``dout``'s shape."""

    attend: Callable[..., torch.Tensor]
    leaves: Sequence[torch.Tensor]
    dout: torch.Tensor

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.attend(*self.leaves), self.leaves, self.dout)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def flex(leaves: Sequence[torch.Tensor], dout: torch.Tensor, options: Options) -> Side:
    """Compiled FlexAttention of the same inputs, as (B, H, S, D) in memory. Its block mask is
    built here, not in the timed call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    given = dict(options)
    mask = given.pop("mask_mod", None)
    if mask is not None:
        rows, where = leaves[0].shape[1], leaves[0].device
        given["block_mask"] = create_block_mask(mask, None, None, rows, rows, device=where)
    # A timed backward keeps its graph, which donated buffers forbid.
    functorch_config.donated_buffer = False
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    turned = [x.detach().transpose(1, 2).contiguous() for x in (*leaves, dout)]
    return Side(
        lambda *x: compiled(*x, **given), [x.requires_grad_() for x in turned[:3]], turned[3]
    )


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference, over the largest magnitude of ``theirs``."""
    largest = max(x.abs().max().item() for x in theirs)
    found = max((x - y).abs().max().item() for x, y in zip(ours, theirs, strict=True))
    return round(found / largest, 5)


def measured(clock: Clock, sides: Mapping[str, Side]) -> dict[str, Any]:
    """The medians of both passes by a side's name, with the name before it but for pyfa's; the
    speed of pyfa, of the others'; and the spread."""
    row: dict[str, Any] = {}
    ranges = []
    for pass_, call in (("forward", _forward), ("backward", _backward)):
        calls = {name: call(side) for name, side in sides.items()}
        found = {
            name: sorted(sample * 1e3 for one in rounds for sample in one)
            for name, rounds in in_turns(clock, "device", calls, ROUNDS, SECONDS).items()
        }
        medians = {name: statistics.median(samples) for name, samples in found.items()}
        for name, median in medians.items():
            row[pass_ if name == "pyfa" else f"{name}_{pass_}"] = round(median, 4)
            if name != "pyfa":
                of = "" if name == "flex" else f"_of_{name}"
                row[f"{pass_}_speedup{of}"] = round(median / medians["pyfa"], 3)
        for name, x in found.items():
            tenth = len(x) // 10
            ranges.append((x[tenth] / medians[name], x[-1 - tenth] / medians[name]))
    row["spread"] = [round(min(x for x, _ in ranges), 3), round(max(x for _, x in ranges), 3)]
    return row


def _forward(side: Side) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return side.attend(*side.leaves)

    return call


def _backward(side: Side) -> Callable[[], object]:
    out = side.attend(*side.leaves)
    return lambda: torch.autograd.grad(out, side.leaves, side.dout, retain_graph=True)
