"""Hopper's backward without a GPU: what it takes, what its cubins take, where its maps point."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa
from pyfa import abi, cubin, dispatch
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import backward, code, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import catalog
from pyfa.backends.native.tiles import sm90
from pyfa.device import DEVICES
from pyfa.plan import Plan
from pyfa.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRAINING = frozenset({"backward"})
MAPS = ("q", "k", "v", "dout")


def problem(*features: str, device: str = "H200") -> Problem:
    found = TRAINING | frozenset(features)
    return Problem(2, 1024, 1024, 16, 16, 128, 128, "bfloat16", found, DEVICES[device], True)


def kernel_of(head_dim: int, head_dim_v: int, general: bool = False, arch: str = "sm_90a") -> Plan:
    found = backward.plans_for(arch, (head_dim, head_dim_v), 1, general, False)
    assert len({dict(each.constants)["BLOCK_Q"] for each in found}) == 1
    return found[1]


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_plain_scores_on_hopper_are_its_own(arch: str, general: bool) -> None:
    own = arch == "sm_90a" and not general
    for dims in ((1, 1), (64, 64), (80, 40), (128, 128), (192, 128), (160, 160), (256, 256)):
        plan = kernel_of(*dims, general, arch)
        assert plan.kernel == (backward.SM90 if own else backward.KERNEL)
        assert plan in catalog.all_plans(TARGET, plans.tiled_arch(arch))
        constants = dict(plan.constants)
        assert int(constants["HEAD_DIM"]) >= dims[0]
        assert int(constants["HEAD_DIM_V"]) >= dims[1]


def test_tiles_of_another_arch_are_sm80_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYFA_ARCH_TILES", "sm_86")
    assert kernel_of(128, 128).kernel == backward.KERNEL


@pytest.mark.parametrize(
    ("features", "left"),
    [(("causal", "gqa", "varlen", "window", "dlse"), False), (("softcap",), True),
     (("alibi",), True), (("sinks",), True)],
)  # fmt: skip
def test_explain_says_what_is_left_to_sm80(features: tuple[str, ...], left: bool) -> None:
    words = "backward is sm80's kernel: sm90's has no score terms, sinks or dropout"
    for device, expected in (("H200", left), ("A100-80GB", False)):
        plan = dispatch.ask("cuda", problem(*features, device=device), hypothetical=True).plan
        assert plan is not None
        assert (words in plan.notes) == expected


@pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)
@pytest.mark.xdist_group("cuda_resources")
@pytest.mark.parametrize(
    "plan",
    dict.fromkeys(
        plan
        for pair in sm90.BACKWARD
        for dtype in DTYPE_CODES.values()
        for deterministic in (False, True)
        for plan in backward.sm90_plans_of(pair, dtype, deterministic)
    ),
    ids=str,
)
def test_products_run_on_while_registers_are_as_planned(plan: Plan) -> None:
    """ptxas makes a matrix product wait for the one before where registers are short or something
    touches a sum on its way, and says so (C7510 ... C7515). 168 registers are what a thread starts
    with: two warpgroups then go to 240, and the one that loads to 24."""
    data, report = runtime_compiler.compile_cuda(code.source_of(plan), arch="sm_90a")
    found, constants = cubin.parse(data), dict(plan.constants)
    assert "C75" not in report
    if plan.kernel != backward.SM90:
        assert found.stack_bytes == 0
        return
    assert found.registers == 168
    assert plans.threads_of(plan) == 384
    assert found.stack_bytes <= (0 if int(constants["HEAD_DIM"]) <= 192 else 96)
    assert found.shared_bytes + plans.shared_bytes(plan) <= 227 * 1024


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "causal": True}], ids=str)
def test_maps_and_turns_of_a_repeated_call(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    no_gpu = importlib.import_module("no_gpu")
    with no_gpu.nvidia(notes=True) as driver:
        for _ in range(3):
            q, k, v = (torch.randn(1, 200, 2, 128).bfloat16().requires_grad_() for _ in range(3))
            out = pyfa.attention(q, k, v, **options)
            dout = torch.randn_like(out)
            driver.launched.clear()
            torch.autograd.grad(out, (q, k, v), dout)
            names = [name.split(".cu")[0] for name, *_ in driver.launched]
            assert names == ["cuda/row_sums", "cuda/sm90/attn_bwd", "cuda/sm80/dq_convert"]
            _, grid, data = driver.launched[1]
            given = dict(zip(MAPS, (q, k, v, dout), strict=True))
            for at, name in enumerate(MAPS):
                begin = abi.MAPS_AT + at * abi.MAP_SIZE
                address = int.from_bytes(data[begin : begin + 8], "little")
                assert address == given[name].data_ptr()
            assert (grid[0], grid[3]) == (
                2 * 2,
                384,
            )  # two blocks of 128 keys for each of two heads
            assert bool(abi.unpack(data)["counter"]) == bool(options)
