"""Plans are pure, bounded and explained; ahead-of-time compilation keeps their promises."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import turns

from pyfa import device
from pyfa.arch import ARCHS
from pyfa.backends import BACKENDS
from pyfa.backends.triton import plans
from pyfa.problem import FEATURES, Problem

triton = pytest.importorskip("triton")
from pyfa.backends.triton import quantize, resources, specs  # noqa: E402

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import triton_resources as table

# Those with kernels much like another's at night.
ARCHS_OF_WIDE = turns.cases(("gfx942", "sm_80", "sm_89", "sm_90a"), night=("sm_80", "sm_89"))
ARCHS_OF_FLOAT8 = turns.cases(("gfx942", "gfx950", "sm_89", "sm_90a"), night=("gfx950", "sm_89"))


def _problem(arch: str, head_dim: int, dtype: str = "bfloat16", **changes: object) -> Problem:
    values: dict[str, object] = {
        "batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16, "heads_k": 4,
        "head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype,
        "features": frozenset({"causal", "backward", "gqa"}),
        "device": table.device_of(arch), "square": True,
    }  # fmt: skip
    return Problem(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_arch_has_a_plan_for_every_head_dim(arch: str) -> None:
    for head_dim, dtype in itertools.product(
        (1, 40, 64, 96, 128, 192, 256, 320, 512), ("float32", "float16")
    ):
        constants = dict(plans.plan(_problem(arch, head_dim, dtype), "triton").constants)
        assert constants["block_d"] >= head_dim
        assert constants["block_e"] == 0
        for role in ("fwd", "dk", "dq"):
            assert constants[f"{role}_block_m"] >= 16
            assert constants[f"{role}_block_n"] >= 16


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
def test_what_is_left_of_a_wide_head_is_a_tile_of_its_own(arch: str) -> None:
    for head_dim, rest, even in ((513, 16, False), (528, 16, True), (560, 64, False),
                                 (576, 64, True)):  # fmt: skip
        problem = _problem(arch, head_dim, head_dim_v=512)
        constants = dict(plans.plan(problem, "triton").constants)
        assert (constants["block_d"], constants["block_e"]) == (512, rest)
        assert (constants["even_d"], constants["even_e"]) == (True, even)
        assert not constants["fwd_tma"]
        assert not constants["shared_v"]


def test_values_that_are_keys_are_not_loaded_again() -> None:
    latent = frozenset({"latent", "dv", "gqa"})
    for dim, dim_v, shared in ((576, 512, True), (512, 400, True), (320, 256, False)):
        problem = _problem("gfx942", dim, head_dim_v=dim_v, features=latent, seqlen_q=1)
        assert dict(plans.plan(problem, "triton").constants)["shared_v"] is shared


def test_lengths_make_few_plans() -> None:
    for arch in ("gfx942", "sm_90a"):
        made = set()
        for rows, keys, batch in itertools.product(range(1, 5000, 97), (1, 700, 70000), (1, 9)):
            problem = _problem(arch, 128, seqlen_q=rows, seqlen_k=keys, batch=batch, square=False)
            made.add(plans.plan(problem.bucketed(), "triton").constants)
        assert len(made) <= 16


def test_a_page_is_one_tile_only_where_it_holds_whole_ones() -> None:
    paged = frozenset({"paged", "backward"})
    constants = dict(
        plans.plan(_problem("sm_90a", 64, features=paged, page_size=64), "triton").constants
    )
    for role in ("fwd", "dk", "dq"):
        whole = 64 % constants[f"{role}_block_n"] == 0
        assert constants[f"{role}_paged"] == (2 if whole else 1)
    padded = paged | {"leftpad"}
    constants = dict(
        plans.plan(_problem("sm_90a", 64, features=padded, page_size=64), "triton").constants
    )
    assert constants["fwd_paged"] == 1


def test_the_bias_gradient_has_tiles_of_its_own_in_a_page() -> None:
    """A page of 16 keys holds a tile of dQ's kernel, and half of one of the bias gradient's."""
    paged = frozenset({"paged", "backward", "bias", "bias_grad"})
    problem = _problem("sm_90a", 128, "float32", features=paged, page_size=16)
    constants = dict(plans.plan(problem, "triton").constants)
    assert constants["dq_paged"] == 2
    variant = specs.Variant(general=True, bias="fp32")
    assert specs.bias_spec(constants, variant, False, False).constants["PAGED"] == 1
    dense = _problem("sm_90a", 128, "float32", features=paged - {"paged"})
    constants = dict(plans.plan(dense, "triton").constants)
    assert specs.bias_spec(constants, variant, False, False).constants["PAGED"] == 0


def test_hoppers_tiles_of_v_are_swizzled_as_those_of_k() -> None:
    for dim, dim_v in itertools.product((1, 17, 40, 64, 96, 256), repeat=2):
        problem = _problem("sm_90a", dim, head_dim_v=dim_v)
        constants = dict(plans.plan(problem, "triton").constants)
        assert min(constants["block_dv"], 64) >= min(constants["block_d"], 64)
        assert constants["block_dv"] >= dim_v
        assert constants["even_dv"] == (constants["block_dv"] == dim_v)
    ampere = dict(plans.plan(_problem("sm_80", 96, head_dim_v=1), "triton").constants)
    assert ampere["block_dv"] == 16


def test_no_more_heads_go_together_than_there_are() -> None:
    """A program multiplies them by the blocks of rows, in 32 bits."""
    from pyfa.backends.triton.runtime import Runner

    runner = Runner(plans.plan(_problem("sm_90a", 8, seqlen_k=1), "triton"))
    assert runner.section(1 * 16, group=4, pairs=64) == 64
    assert runner.section(10**9, group=4, pairs=64) == 4


def test_parts_fill_the_device_and_are_not_too_short() -> None:
    assert plans.splits_for(1000, 64, slots=264, part_tiles=4, streams=False) == 1
    assert plans.splits_for(8, 512, slots=132, part_tiles=2, streams=False) == 14
    measured = {8: 12, 48: 2, 64: 2, 96: 1, 160: 3, 512: 1}  # the fastest on an H200, or near it
    for programs, parts in measured.items():
        assert plans.splits_for(programs, 512, 132, 2, True) == parts
    for programs, tiles, streams in itertools.product((1, 7, 100), (1, 3, 17, 900), (True, False)):
        parts = plans.splits_for(programs, tiles, 132, 4, streams)
        assert parts == 1 or tiles // parts >= 4


def test_it_says_why_not() -> None:
    backend = BACKENDS["triton"]
    assert set(FEATURES) - {"captured_grad"} == backend.FEATURES
    float8 = {"features": frozenset({"fp8"}), "dtype_out": "bfloat16"}
    for arch, dtype, able in (
        ("sm_80", "float8_e4m3fn", False),
        ("sm_89", "float8_e4m3fn", True),
        ("sm_90a", "float8_e4m3fnuz", False),
        ("gfx942", "float8_e4m3fn", False),
        ("gfx942", "float8_e4m3fnuz", True),
        ("gfx950", "float8_e4m3fn", True),
    ):
        reasons = backend.why_not(_problem(arch, 64, dtype, **float8))
        assert list(reasons) == ([] if able else [f"{arch} has no {dtype}"])
    reasons = backend.why_not(_problem("sm_90a", 64, "float64"))
    assert list(reasons) == ["float64 is not implemented"]
    on_cpu = _problem("sm_90a", 64, device=device.CPU)
    assert "the device is a CPU" in backend.why_not(on_cpu)[0]


def test_importing_pyfa_does_not_import_triton() -> None:
    code = "import sys, pyfa; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_80", "sm_90a"])
def test_forward_compiles_ahead_of_time(arch: str) -> None:
    _compiles_forward(arch, table.problem_of(arch, 128, "bfloat16", "causal", "backward"))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS_OF_WIDE)
@pytest.mark.parametrize("features", [("dv",), ("dv", "latent")])
def test_wide_heads_compile_ahead_of_time(arch: str, features: tuple[str, ...]) -> None:
    problem = table.problem_of(arch, 576, "bfloat16", "causal", *features)
    _compiles_forward(arch, replace(problem, head_dim_v=512))


@pytest.mark.long
def test_wide_heads_have_a_backward_on_amd() -> None:
    problem = table.problem_of("gfx942", 512, "bfloat16", "causal", "backward")
    plan = dict(plans.plan(problem, "triton").constants)
    for spec in (*(specs.keys_spec(plan, specs.Variant(), role) for role in ("dk", "dv")),
                 specs.rows_spec(plan, specs.Variant())):  # fmt: skip
        found = resources.measure(spec, "gfx942")
        assert found.shared_bytes <= found.block_limit
        assert found.spill_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
def test_kernels_by_lists_compile_ahead_of_time(arch: str) -> None:
    """And those of heads of 576 are in the same table."""
    found = dict(table.listed_specs_of(arch, 128))
    assert [name.split()[-2:] for name in found] == [
        [role, "listed"] for role in ("forward", "dk", "dq")
    ]
    assert [name.split()[-2:] for name, _ in table.latent_specs_of(arch)] == [
        [kind, role] for kind in ("wide", "latent") for role in ("forward", "decode")
    ]
    used = resources.measure(found["bf16 d128 forward listed"], arch)
    assert used.registers > 0
    assert used.shared_bytes <= used.block_limit
    assert not used.spill_bytes


def _compiles_forward(arch: str, problem: Problem) -> None:
    plan = dict(plans.plan(problem, "triton").constants)
    found = resources.measure(specs.forward_spec(plan, specs.Variant(), False), arch)
    assert found.registers > 0
    assert found.shared_bytes <= found.block_limit
    if arch == "gfx942":
        assert found.spill_bytes == 0


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
def test_backward_compiles_ahead_of_time(arch: str) -> None:
    problem = table.problem_of(arch, 64, "float16", "causal", "backward")
    plan = dict(plans.plan(problem, "triton").constants)
    for spec in (
        specs.keys_spec(plan, specs.Variant()),
        specs.rows_spec(plan, specs.Variant()),
        specs.state_spec(plan),
        specs.combine_spec(plan, 1),
    ):
        found = resources.measure(spec, arch)
        assert found.shared_bytes <= found.block_limit
        assert found.spill_bytes == 0


@pytest.mark.parametrize("arch", ARCHS_OF_FLOAT8)
def test_float8_compiles_without_a_gpu(arch: str) -> None:
    found = dict(table.float8_specs_of(arch, 128))
    assert len(found) == 6
    for name, spec in found.items():
        if "scales 2 forward" in name or "scales 3 decode" in name:
            used = resources.measure(spec, arch)
            assert used.registers > 0
            assert used.shared_bytes <= used.block_limit
            assert used.spill_bytes == 0, name


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
@pytest.mark.parametrize("dim", turns.cases((128, 256), night=(256,)))
def test_quantizing_compiles_ahead_of_time(arch: str, dim: int) -> None:
    """Blocks of 128 rows, rotated and held in registers, or read again from the L2."""
    made = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    layout = quantize.Layout(
        (1, 256, 16, dim), (0, 0, 0), torch.bfloat16, 3, 2, True, 16, 128, False, made
    )
    tile = quantize.launch_shape_of(layout, arch).tile
    assert tile == (64 if (arch, dim) == ("gfx942", 256) else 128)
    for measure, store in ((True, True), (True, False), (False, True)):
        used = resources.measure(quantize.spec(layout, arch, measure, store), arch)
        assert used.spill_bytes == 0
        assert used.shared_bytes <= used.block_limit
