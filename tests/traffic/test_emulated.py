"""What backward and decode ask of the memory system: computed, and counted in the emulator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import turns

from pyfa.backends import BACKENDS
from pyfa.backends.base import Saved
from pyfa.backends.common.program import Step
from pyfa.backends.hip import backward, code
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import backward as native_backward
from pyfa.backends.native import decode as native_decode
from pyfa.backends.native import tiling
from pyfa.device import DEVICES
from pyfa.emulator import native
from pyfa.plan import Plan
from pyfa.problem import Call, Problem, tensors_of
from pyfa.traffic import Shape, TiledKernel
from pyfa.traffic.requested import requested_of

STATE_LANES = 64 * 16  # floats of LSE or delta that the lanes of a wavefront load for a tile

SHAPES = {
    "whole tiles": Shape(1, 256, 256, 1, 1, 64, 64),
    "groups of heads": Shape(2, 128, 160, 4, 2, 128, 128),
    "causal": Shape(1, 320, 320, 1, 1, 64, 64, window_right=0),
    "causal, fewer rows than keys": Shape(1, 128, 416, 1, 1, 128, 128, window_right=0),
    "window": Shape(1, 384, 384, 2, 2, 64, 64, window_left=64, window_right=32),
    "192 and 128": Shape(1, 160, 192, 1, 1, 192, 128),
}


class Counting(EmulatorRuntime):
    """Keeps (vector loads, stores) of every kernel that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Plan, int, int]] = []

    def run(
        self, step: Step, kernel: code.Code, params: bytes, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().run(step, kernel, params, tensors)
        assert self.counters is not None
        loads = self.counters.load_bytes - self.counters.scalar_bytes
        self.found.append((step.plan, loads, self.counters.store_bytes))


@pytest.fixture(autouse=True)
def compiler() -> None:
    if native.why_unavailable() or code.why_unavailable():
        pytest.skip("no compiler for the emulator")


def call_of(shape: Shape) -> Call:
    def zeros(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(shape.batch, length, heads, dim, dtype=torch.bfloat16)

    return Call(
        zeros(shape.seqlen_q, shape.heads_q, shape.head_dim),
        zeros(shape.seqlen_k, shape.heads_k, shape.head_dim),
        zeros(shape.seqlen_k, shape.heads_k, shape.head_dim_v),
        max_seqlen_q=shape.seqlen_q,
        max_seqlen_k=shape.seqlen_k,
        window_left=shape.window_left,
        window_right=shape.window_right,
    )


def kernels_of(shape: Shape, *features: str) -> dict[str, TiledKernel]:
    problem = Problem(
        shape.batch, shape.seqlen_q, shape.seqlen_k, shape.heads_q, shape.heads_k, shape.head_dim,
        shape.head_dim_v, "bfloat16", frozenset(features), DEVICES["MI300X"], False,
    )  # fmt: skip
    plan = BACKENDS["hip"].plan(problem)
    return {one.role: one for one in tiling.kernels_of(TARGET, plan, problem, shape, False)}


@pytest.mark.parametrize("name", turns.cases(SHAPES, night=("192 and 128",)))
def test_backward_asks_for_what_was_computed(name: str) -> None:
    """Within 3 %: what differs is the tile that a workgroup asks for behind its last one.

    Every lane of a wavefront loads LSE and delta, though half of them the same: the counter has
    them all, the formula each once, so that they are taken off here.
    """
    shape = SHAPES[name]
    runtime, call = Counting(), call_of(shape)._replace(deterministic=True)
    out = torch.zeros(call.out_shape(), dtype=torch.bfloat16)
    lse, dout = torch.zeros(call.lse_shape()), torch.zeros_like(out)
    run = native_backward.bind(Launcher(runtime), Saved(call, out, lse, dout))
    run(dout, out, lse, *tensors_of(call))
    kernels = kernels_of(shape, "backward", "deterministic")
    counted = {
        ("dk_dv", "dq")[int(dict(plan.constants)["OWNS"])]: (loads, stores)
        for plan, loads, stores in runtime.found
        if plan.kernel == backward.KERNEL
    }
    for role, (loads, stores) in counted.items():
        reads, writes = requested_of(shape, kernels[role])
        asked = sum(n for tensor, n in reads.items() if tensor not in ("lse", "delta"))
        assert stores == sum(writes.values())
        if role == "dk_dv":
            # 32 rows a tile; each of 4 wavefronts, for both states, of the tile behind too.
            walked = reads["lse"] // 4
            loads -= walked // 32 * 4 * STATE_LANES * 4 * 2
        else:
            loads -= 2 * shape.batch_heads * shape.seqlen_q * 4 * 2  # both halves of a wavefront
        assert loads == pytest.approx(asked, rel=0.03), role


@pytest.mark.parametrize("keys", [500, 1024])
def test_decode_asks_for_k_and_v_once_a_group(keys: int) -> None:
    shape = Shape(1, 1, keys, 8, 1, 128, 128)
    runtime, call = Counting(), call_of(shape)
    problem_kernels = kernels_of(shape, "gqa")
    kernel = problem_kernels["forward"]
    plan = next(
        plan for plan in native_decode.all_plans(TARGET, "emulator", "gfx942")
        if dict(plan.constants).items()
        >= {"HEAD_DIM": 128, "HEAD_DIM_V": 128, "TILES": 1, "DTYPE": 1}.items()
    )  # fmt: skip
    native_decode.bind(Launcher(runtime), plan, call)(*tensors_of(call))
    _, loads, stores = runtime.found[0]
    reads, writes = requested_of(shape, kernel)
    assert reads["k"] == reads["v"] == keys * 128 * 2
    assert kernel.tiling.splits > 1
    assert len(runtime.found) == 2
    assert loads == pytest.approx(sum(reads.values()), rel=0.03)
    assert stores == pytest.approx(sum(writes.values()), rel=0.03)
