"""Hopper's backward without a GPU: what it takes, what its cubins take, where its maps point."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import ptxas
import pytest
import torch

import pyfa
from pyfa import abi, dispatch
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import backward, backward_grid, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import backward as native_backward
from pyfa.backends.native import catalog
from pyfa.backends.native.tiles import sm90
from pyfa.device import DEVICES
from pyfa.plan import Plan
from pyfa.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRAINING = frozenset({"backward"})
MAPS = ("q", "k", "v", "dout", "dk", "dv")


def problem(*features: str, device: str = "H200") -> Problem:
    found = TRAINING | frozenset(features)
    return Problem(2, 1024, 1024, 16, 16, 128, 128, "bfloat16", found, DEVICES[device], True)


def kernel_of(head_dim: int, head_dim_v: int, general: bool = False, arch: str = "sm_90a") -> Plan:
    found = backward.plans_for(arch, (head_dim, head_dim_v), 1, general, False)
    assert len({dict(each.constants)["BLOCK_Q"] for each in found}) == 1
    return found[1]


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_which_kernel_is_whose(arch: str, general: bool) -> None:
    for dims in ((1, 1), (64, 64), (80, 40), (128, 128), (192, 128), (160, 160), (256, 256)):
        plan = kernel_of(*dims, general, arch)
        own = arch == "sm_90a"
        assert plan.kernel == (backward.SM90 if own else backward.KERNEL)
        assert plan in catalog.all_plans(TARGET, plans.tiled_arch(arch))
        constants = dict(plan.constants)
        assert int(constants["HEAD_DIM"]) >= dims[0]
        assert int(constants["HEAD_DIM_V"]) >= dims[1]
        assert int(constants["TERMS"] if own else constants["GENERAL"]) == (
            backward.ALL_TERMS if own and general else general
        )


@pytest.mark.parametrize("name", backward.TERM_BITS)
def test_a_term_alone_has_a_plan_and_several_share_one(name: str) -> None:
    def terms_of(*names: str, mods: str = "") -> int:
        return backward.bits_of(frozenset(names), True, mods)

    assert terms_of(name) == backward.TERM_BITS[name]
    assert terms_of(name, "sinks", "alibi", "bias") == backward.ALL_TERMS
    assert terms_of(name, mods="digest") == backward.TERM_BITS[name]
    assert terms_of("softcap", "large_softcap") == backward.ALL_TERMS
    assert terms_of("bias", "bias_tiles") == backward.OF_TILES
    assert terms_of("bias", "bias_tiles", "sinks") == backward.ALL_TERMS
    assert backward.bits_of(frozenset(), False) == 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mods", [False, True])
@pytest.mark.parametrize("pair", sm90.BACKWARD)
def test_kernels_agree_on_who_sets_dq(pair: Any, mods: bool, deterministic: bool) -> None:
    """Where attn_bwd sets a tile of dQ, row_sums writes its state in place of zeros, and dq_convert
    reads it. Wide heads take turns only on zeros, and so they do with lists of tiles."""
    chain = backward.sm90_plans_of(pair, DTYPE_CODES["bfloat16"], deterministic, mods=mods)
    sums, gradients, convert = (dict(plan.constants).get("DQ_UNSET", 0) for plan in chain)
    assert sums == gradients == convert
    wide = min(pair) > backward.NARROW
    assert gradients == int(not (wide and (mods or deterministic)))


def test_tiles_of_another_arch_are_sm80_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYFA_ARCH_TILES", "sm_86")
    assert kernel_of(128, 128).kernel == backward.KERNEL


STEEP = "sm90's has no sinks with softcap or score_mod above head_dim 128"


@pytest.mark.parametrize(
    ("features", "dim", "why"),
    [(("causal", "gqa", "varlen", "window", "dlse"), 256, ""), (("softcap",), 128, ""),
     (("alibi", "deterministic"), 64, ""), (("sinks", "dropout"), 80, ""),
     (("score_mod",), 128, ""), (("softcap",), 136, ""), (("mask_mod", "sinks"), 256, ""),
     (("sinks", "softcap"), 128, ""), (("sinks", "softcap"), 192, STEEP),
     (("sinks", "score_mod"), 256, STEEP),
     (("sinks", "deterministic"), 128, "")],
)  # fmt: skip
def test_explain_says_what_is_left_to_sm80(features: tuple[str, ...], dim: int, why: str) -> None:
    for device, expected in (("H200", why), ("A100-80GB", "")):
        asked = replace(problem(*features, device=device), head_dim=dim, head_dim_v=dim)
        plan = dispatch.ask("cuda", asked, hypothetical=True).plan
        assert plan is not None
        found = [note for note in plan.notes if "backward" in note]
        assert found == ([f"backward is sm80's kernel: {expected}"] if expected else [])
        chain = native_backward.plans_for(TARGET, "cuda", asked)
        own = device == "H200" and not why
        assert chain[1].kernel == (backward.SM90 if own else backward.KERNEL)
        assert len({dict(each.constants)["BLOCK_Q"] for each in chain}) == 1


# Batch, rows, query heads, KV heads, head_dim, causal, window; warpgroups and rows of a tile that
# an H200 was (nearly) fastest with (cuda_tuning_h200.json, "backward, sm90, tiles by the grid").
FASTEST = [
    ((64, 197, 12, 12, 64, False, 0), (2, 112)), ((64, 50, 12, 12, 64, False, 0), (1, 64)),
    ((32, 257, 12, 12, 64, False, 0), (2, 96)), ((32, 77, 12, 12, 64, True, 0), (1, 80)),
    ((1, 100, 8, 2, 64, False, 0), (2, 112)), ((8, 512, 32, 32, 64, False, 0), (2, 128)),
    ((4, 1024, 12, 12, 64, False, 0), (2, 128)), ((2, 2048, 16, 16, 64, True, 0), (2, 128)),
    ((1, 4096, 16, 16, 64, True, 129), (1, 64)), ((1, 8192, 32, 32, 64, True, 385), (2, 128)),
    ((1, 8192, 32, 32, 64, True, 129), (2, 128)), ((1, 8192, 32, 32, 64, True, 64), (1, 64)),
    ((1, 8192, 16, 16, 64, True, 128), (2, 128)), ((1, 8192, 32, 32, 64, True, 190), (1, 64)),
    ((2, 4096, 64, 8, 64, True, 129), (2, 128)), ((16, 33, 32, 32, 128, False, 0), (1, 32)),
    ((8, 77, 16, 4, 128, False, 0), (2, 48)), ((1, 512, 16, 16, 128, False, 0), (2, 64)),
    ((4, 2048, 16, 16, 128, False, 0), (2, 64)), ((64, 50, 12, 12, 192, False, 0), (2, 64)),
    ((16, 77, 8, 8, 256, True, 0), (2, 32)), ((1, 300, 8, 8, 256, True, 0), (2, 32)),
    ((2, 2048, 8, 8, 256, False, 0), (2, 64)), ((1, 8192, 8, 8, 256, True, 129), (2, 32)),
]  # fmt: skip
Grid = tuple[int, int, int, int, int, bool, int]


def grid_problem(shape: Grid, *more: str) -> Problem:
    batch, rows, heads, heads_k, dim, causal, window = shape
    names = ("causal", "window") if window else ("causal",) if causal else ()
    return replace(
        problem(*names, *more), batch=batch, seqlen_q=rows, seqlen_k=rows, heads_q=heads,
        heads_k=heads_k, head_dim=dim, head_dim_v=dim, window=window,
    )  # fmt: skip


def tiles_of(asked: Problem) -> tuple[int, int]:
    constants = dict(native_backward.plans_for(TARGET, "cuda", asked)[1].constants)
    return int(constants["GROUPS"]), int(constants["BLOCK_Q"])


@pytest.mark.parametrize(("shape", "tiles"), FASTEST, ids=str)
def test_tiles_follow_the_grid(shape: Grid, tiles: tuple[int, int]) -> None:
    assert tiles_of(grid_problem(shape)) == tiles_of(grid_problem(shape, "sinks")) == tiles
    assert tiles_of(grid_problem(shape).bucketed()) == tiles
    plans = native_backward.plans_for(TARGET, "cuda", grid_problem(shape))
    assert set(plans) <= set(catalog.all_plans(TARGET, "sm_90"))
    # What would change the bits of gradients by the batch, and what was not measured.
    general = tiles_of(grid_problem((4, 2048, 16, 16, shape[4], False, 0)))
    for feature in ("batch_invariant", "deterministic", "chunk", "negative_edge"):
        assert tiles_of(grid_problem(shape, feature)) == general
    if shape[5]:
        assert tiles_of(replace(grid_problem(shape), square=False)) == general
    several = tiles_of(grid_problem(shape, "alibi", "sinks"))
    assert several == tiles_of(
        grid_problem((4, 2048, 16, 16, shape[4], False, 0), "alibi", "sinks")
    )


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0)}], ids=str)
def test_a_call_has_the_tiles_of_its_problem(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    no_gpu = importlib.import_module("no_gpu")
    window, found = 65 if "window" in options else 0, set()
    with no_gpu.nvidia(notes=True) as driver:
        for batch, rows in ((1, 50), (64, 197), (32, 77), (3, 260), (2, 700)):
            q, k, v = (torch.randn(batch, rows, 4, 64).half().requires_grad_() for _ in range(3))
            out: Any = pyfa.attention(q, k, v, **options)
            driver.launched.clear()
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            expected = grid_problem((batch, rows, 4, 4, 64, bool(options), window))
            groups, _ = tiles_of(expected)
            _, grid, _ = driver.launched[1]
            work_tiles = -(-rows // (64 * groups)) * batch * 4
            most = DEVICES["H200"].units * (2 if groups == 1 else 1)
            assert (grid[0], grid[3]) == (min(work_tiles, most), 128 * (groups + 1))
            found.add(tiles_of(expected))
    assert len(found) > 1 or window


@pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)
@pytest.mark.usefixtures("kept_reports")
@pytest.mark.parametrize(
    "plan",
    ptxas.by_turns(
        plan
        for bits in (0, *backward.TERM_BITS.values(), backward.OF_TILES, backward.ALL_TERMS)
        for pair in sm90.BACKWARD
        for deterministic in (False, True)
        for dtype in DTYPE_CODES.values()
        for chosen in (None, *(backward_grid.all_tiles(pair) if bits in backward.OF_GRID else ()))
        if not (chosen and deterministic)
        for plan in backward.sm90_plans_of(pair, dtype, deterministic, bits, chosen=chosen)
    ),
    ids=str,
)
def test_products_run_on_while_registers_are_as_planned(plan: Plan) -> None:
    """ptxas makes a matrix product wait for the one before where registers are short or something
    touches a sum on its way, and says so (C7510 ... C7515). 168 registers are what a thread starts
    with: two warpgroups then go to 240, and the one that loads to 24. Of two blocks on an SM it
    starts with 128, and goes to 232 or 24."""
    found, report, data = ptxas.compiled(plan, "sm_90a")
    constants = dict(plan.constants)
    assert "C75" not in report
    if plan.kernel != backward.SM90:
        assert found.stack_bytes == 0
        return
    assert ptxas.moves_of_registers(data) == ["DEALLOC", "TRY_ALLOC"]
    two_fit = constants["BLOCKS"] == 2
    assert found.registers == (128 if two_fit else 168)
    assert plans.threads_of(plan) == (256 if two_fit else 384)
    # A bias takes most: 200 bytes at 256, 64 at 64.
    wide, terms = int(constants["HEAD_DIM"]) > 192, bool(constants["TERMS"])
    most = (200 if terms else 96) if wide else 64 * terms
    assert found.stack_bytes <= most
    shared_bytes = found.shared_bytes + plans.shared_bytes(plan)
    assert shared_bytes <= (113 if two_fit else 227) * 1024
    blocks = plans.blocks_per_sm(plan, "sm_90", found.registers, shared_bytes)
    assert blocks >= int(constants["BLOCKS"])


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
            _, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
            names = [name.split(".cu")[0] for name, *_ in driver.launched]
            assert names == ["cuda/row_sums", "cuda/sm90/attn_bwd", "cuda/sm80/dq_convert"]
            _, grid, data = driver.launched[1]
            given = dict(zip(MAPS, (q, k, v, dout, dk, dv), strict=True))
            for at, name in enumerate(MAPS):
                begin = abi.MAPS_AT + at * abi.MAP_SIZE
                address = int.from_bytes(data[begin : begin + 8], "little")
                assert address == given[name].data_ptr()
            assert (grid[0], grid[3]) == (
                2 * 2,
                384,
            )  # two blocks of 128 keys for each of two heads
            assert bool(abi.unpack(data)["counter"]) == bool(options)
