"""Plans are pure, bounded and explained; ahead-of-time compilation keeps their promises."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from pyfa import device
from pyfa.arch import ARCHS
from pyfa.backends import BACKENDS
from pyfa.backends.triton import plans
from pyfa.problem import FEATURES, Problem

triton = pytest.importorskip("triton")
from pyfa.backends.triton import resources, specs  # noqa: E402


def _problem(arch: str, head_dim: int, dtype: str = "bfloat16", **changes: object) -> Problem:
    values: dict[str, object] = {
        "batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16, "heads_k": 4,
        "head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype,
        "features": frozenset({"causal", "backward", "gqa"}),
        "device": resources.device_of(arch), "square": True,
    }  # fmt: skip
    return Problem(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_arch_has_a_plan_for_every_head_dim(arch: str) -> None:
    for head_dim, dtype in itertools.product(
        (1, 40, 64, 96, 128, 192, 256), ("float32", "float16")
    ):
        constants = dict(plans.plan(_problem(arch, head_dim, dtype), "triton").constants)
        assert constants["block_d"] >= head_dim
        for role in ("fwd", "dk", "dq"):
            assert constants[f"{role}_block_m"] >= 16
            assert constants[f"{role}_block_n"] >= 16


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


def test_parts_fill_the_device_and_are_not_too_short() -> None:
    assert plans.splits_for(programs=1000, tiles=64, slots=132, part_tiles=4) == 1
    assert plans.splits_for(programs=8, tiles=512, slots=132, part_tiles=2) == 14
    for programs, tiles in itertools.product((1, 7, 100), (1, 3, 17, 900)):
        parts = plans.splits_for(programs, tiles, 132, 4)
        assert parts == 1 or tiles // parts >= 4


def test_it_says_why_not() -> None:
    backend = BACKENDS["triton"]
    assert set(FEATURES) - backend.FEATURES == {"fp8"}
    reasons = backend.why_not(_problem("sm_90a", 64, "float64"))
    assert list(reasons) == ["float64 is not implemented"]
    on_cpu = _problem("sm_90a", 64, device=device.CPU)
    assert "the device is a CPU" in backend.why_not(on_cpu)[0]


def test_importing_pyfa_does_not_import_triton() -> None:
    code = "import sys, pyfa; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_80", "sm_90a"])
def test_forward_compiles_ahead_of_time(arch: str) -> None:
    problem = resources.problem_of(arch, 128, "bfloat16", "causal", "backward")
    plan = dict(plans.plan(problem, "triton").constants)
    found = resources.measure(specs.forward_spec(plan, specs.Variant(), False), arch)
    assert found.registers > 0
    assert found.shared_bytes <= found.block_limit
    if arch == "gfx942":
        assert found.spill_bytes == 0


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
def test_backward_compiles_ahead_of_time(arch: str) -> None:
    problem = resources.problem_of(arch, 64, "float16", "causal", "backward")
    plan = dict(plans.plan(problem, "triton").constants)
    for spec in (
        specs.keys_spec(plan, specs.Variant()),
        specs.rows_spec(plan, specs.Variant()),
        specs.state_spec(plan),
    ):
        found = resources.measure(spec, arch)
        assert found.shared_bytes <= found.block_limit
        assert found.spill_bytes == 0
