"""What the forward kernel asks of the memory system: computed, and counted in the emulator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import turns

from pyfa.backends.common import calls
from pyfa.backends.common.program import Step
from pyfa.backends.hip import code, forward
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import combine
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.tiles import gfx942
from pyfa.emulator import native
from pyfa.plan import Plan
from pyfa.problem import Call, tensors_of
from pyfa.traffic import Requested, Shape, Tiling, requested_bytes

SHAPES = {
    "whole tiles": (Shape(1, 256, 512, 1, 1, 128, 128), 1),
    "causal": (Shape(1, 600, 600, 2, 2, 128, 128, window_right=0), 1),
    "causal, fewer rows than keys": (Shape(1, 300, 1000, 1, 1, 64, 64, window_right=0), 1),
    "causal, more rows than keys": (Shape(2, 700, 333, 1, 1, 64, 64, window_right=0), 1),
    "window": (Shape(1, 1000, 1000, 1, 1, 64, 64, window_left=100, window_right=30), 1),
    "window to the left": (Shape(1, 1030, 1030, 1, 1, 128, 128, 200, 0), 1),
    "window that leaves rows without keys": (Shape(1, 900, 200, 1, 1, 64, 64, 20, 10), 1),
    "groups of heads": (Shape(2, 200, 300, 6, 2, 96, 96), 1),
    "uneven": (Shape(2, 257, 65, 3, 3, 128, 128), 1),
    "heads between buckets": (Shape(1, 130, 200, 2, 1, 72, 40), 1),
    "256": (Shape(1, 200, 500, 2, 1, 256, 256, window_right=0), 1),
    "192 and 128": (Shape(1, 300, 290, 2, 2, 192, 128), 1),
    "192": (Shape(1, 100, 290, 1, 1, 192, 192, window_right=0), 1),
    "split": (Shape(1, 100, 1024, 2, 1, 128, 128), 3),
    "split, causal": (Shape(1, 300, 700, 2, 2, 64, 64, window_right=0), 4),
    "split, window": (Shape(1, 300, 900, 1, 1, 256, 256, 200, 0), 3),
}


class Counting(EmulatorRuntime):
    """Sums (vector loads, stores) of all that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = self.stores = 0

    def run(
        self, step: Step, kernel: code.Code, params: bytes, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().run(step, kernel, params, tensors)
        assert self.counters is not None
        self.loads += self.counters.load_bytes - self.counters.scalar_bytes
        self.stores += self.counters.store_bytes


def counted(plan: Plan, shape: Shape, parts: int) -> Counting:
    def zeros(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(shape.batch, length, heads, dim, dtype=torch.bfloat16)

    call = Call(
        zeros(shape.seqlen_q, shape.heads_q, shape.head_dim),
        zeros(shape.seqlen_k, shape.heads_k, shape.head_dim),
        zeros(shape.seqlen_k, shape.heads_k, shape.head_dim_v),
        max_seqlen_q=shape.seqlen_q,
        max_seqlen_k=shape.seqlen_k,
        window_left=shape.window_left,
        window_right=shape.window_right,
        num_splits=parts,
    )
    runtime = Counting()
    native_forward.bind(Launcher(runtime), plan, call)(*tensors_of(call))
    return runtime


def plan_of(shape: Shape) -> Plan:
    pair = calls.bucket_of(gfx942.FORWARD, shape.head_dim, shape.head_dim_v)
    return next(
        plan
        for plan in forward.all_plans("emulator")
        if dict(plan.constants).items()
        >= {
            "HEAD_DIM": pair[0], "HEAD_DIM_V": pair[1], "SCORE": calls.PLAIN, "DTYPE": 1,
            "PAGED": 0,
        }.items()
    )  # fmt: skip


# Of other buckets than 64 and 128, whose plans other tests compile too.
RARE = [
    name for name, (shape, _) in SHAPES.items() if {shape.head_dim, shape.head_dim_v} - {64, 128}
]


@pytest.mark.parametrize("name", turns.cases(SHAPES, RARE))
def test_the_emulator_counts_what_was_computed(name: str) -> None:
    if native.why_unavailable() or code.why_unavailable():
        pytest.skip("no compiler for the emulator")
    shape, parts = SHAPES[name]
    plan = plan_of(shape)
    block = TARGET.block_of(plan)
    asked = requested_bytes(shape, Tiling(block.rows, block.keys, parts))
    runtime = counted(plan, shape, parts)
    # Every thread of a part reads the part's LSE, which the model leaves out.
    lines = shape.batch * shape.seqlen_q * shape.heads_q if parts > 1 else 0
    lses = 4 * lines * parts * combine.threads_of_part(shape.head_dim_v)
    assert runtime.loads == asked.loads + lses
    assert runtime.stores == asked.stores


def brute(shape: Shape, tiling: Tiling) -> Requested:
    """The same from a matrix of who sees whom, row by row."""
    shift = shape.seqlen_k - shape.seqlen_q
    rows = torch.arange(shape.seqlen_q)[:, None] + shift
    keys = torch.arange(shape.seqlen_k)[None]
    sees = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool)
    if shape.window_left >= 0:
        sees &= keys >= rows - shape.window_left
    if shape.window_right >= 0:
        sees &= keys <= rows + shape.window_right
    k = seen = 0
    for block in sees.split(tiling.block_q):
        wanted = block.any(0).nonzero()
        if not len(wanted):
            continue
        tiles = list(
            range(
                int(wanted[0]) // tiling.block_k,
                int(wanted[-1]) // tiling.block_k + 1,
            )
        )
        share = -(-len(tiles) // tiling.splits)
        for at in range(0, len(tiles), share):
            part = tiles[at : at + share]
            stop = min((part[-1] + 1) * tiling.block_k, int(wanted[-1]) + 1)
            whole = slice(part[0] * tiling.block_k, stop)
            k += keys[0, whole].numel()
            seen += int(block[:, whole].any(1).sum())
    lines, split = shape.batch * shape.heads_q, tiling.splits > 1
    merged = lines * seen * shape.head_dim_v * 4 * split
    rows_of_all = lines * shape.seqlen_q
    return Requested(
        rows_of_all * shape.head_dim * 2 * tiling.splits,
        lines * k * shape.head_dim * 2,
        lines * k * shape.head_dim_v * 2,
        rows_of_all * shape.head_dim_v * 2,
        rows_of_all * 4,
        merged + rows_of_all * 4 * tiling.splits * split,
        merged,
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tiling", [Tiling(256, 64), Tiling(128, 32, 3), Tiling(16, 48, 5)])
def test_closed_forms_are_those_of_the_mask(name: str, tiling: Tiling) -> None:
    shape = SHAPES[name][0]
    assert requested_bytes(shape, tiling) == brute(shape, tiling)


def test_keys_are_asked_for_by_each_block_of_rows() -> None:
    """The figure that kernels are compared by: a tile of K for every block that sees it."""
    shape = Shape(1, 8192, 8192, 1, 1, 128, 128)
    asked = requested_bytes(shape, Tiling(256, 64))
    assert asked.k == asked.v == 32 * 8192 * 128 * 2
    halved = requested_bytes(shape._replace(window_right=0), Tiling(256, 64))
    assert halved.k == asked.k * 33 / 64
