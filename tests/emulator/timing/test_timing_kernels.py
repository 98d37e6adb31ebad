"""The project's own kernels: the order of their utilization, and what is said of a problem."""

from __future__ import annotations

import json

import pytest

from pyfa.backends.hip import backward, forward, runtime_timing
from pyfa.cli import main
from pyfa.plan import Plan

pytestmark = [
    pytest.mark.skipif(
        runtime_timing.why_unavailable() is not None, reason="no emulator or no code objects here"
    ),
    # One process runs the kernels, for all of these.
    pytest.mark.xdist_group("timing"),
]
BF16 = 1


def forward_of(dim: int, waves: int = 8) -> runtime_timing.Kernel:
    wanted = {"DTYPE": BF16, "HEAD_DIM": dim, "PAGED": 0, "SCORE": 0, "WAVES": waves}
    (plan,) = (
        plan
        for plan in forward.all_plans("hip")
        if dict(plan.constants) | wanted == dict(plan.constants)
        and dict(plan.constants)["HEAD_DIM_V"] == dim
    )
    return kernel_of(plan)


def kernel_of(plan: Plan) -> runtime_timing.Kernel:
    found = runtime_timing.kernel(plan)
    assert found is not None
    return found


def test_the_order_of_our_kernels() -> None:
    """What is known by other means too (llvm-mca, a prototype of this model): D = 128 keeps the
    matrix units busier than D = 64, whose vector work is twice as much a product; of the
    two passes of backward, the one that owns rows has a product less to wait for."""
    _, keys, rows = (Plan("hip", p.kernel, p.constants) for p in
                     backward.plans_of("hip", (128, 128), BF16, False, True))  # fmt: skip
    wide, narrow = forward_of(128), forward_of(64)
    both = [kernel_of(plan) for plan in (keys, rows)]
    for number in range(2):
        of = [one.estimates[number].utilization for one in (wide, narrow, *both)]
        assert of[0] > of[1]
        assert of[3] > of[2]
        assert 0.9 < of[0] < 1
    assert all(a.utilization < b.utilization for a, b in (one.estimates for one in (wide, narrow)))


def test_products_of_a_tile_are_counted_whole() -> None:
    """256 rows by 64 keys by 4 · 128 FLOP, 512 a clock of a SIMD; every clock is busy or lost."""
    for estimate in forward_of(128).estimates:
        assert estimate.matrix_of_tile == 256 * 64 * 4 * 128 / 512
        assert estimate.utilization + sum(estimate.lost.values()) == pytest.approx(1, abs=0.01)
        assert sum(slot.matrix for slot in estimate.slots) == 128  # a loop of two tiles
        assert sum(slot.transcendental for slot in estimate.slots) == 64
        assert 0 <= estimate.end_of_loop < 0.2


def test_forward_has_no_conflicts_by_the_true_phases() -> None:
    assert forward_of(64).conflict_clocks == forward_of(128).conflict_clocks == 0
    assert forward_of(64, 4).conflict_clocks == forward_of(128, 4).conflict_clocks == 0


def test_two_workgroups_of_4_wavefronts_share_a_unit() -> None:
    for dim in (64, 128):
        assert (forward_of(dim).resident, forward_of(dim, 4).resident) == (1, 2)


def inspect(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["inspect", "attn_fwd", "--arch", "gfx942", "--timing", *flags]) == 0
    return capsys.readouterr().out


def test_what_a_longer_and_a_causal_problem_take(capsys: pytest.CaptureFixture[str]) -> None:
    def problem(*flags: str) -> dict[str, list[float]]:
        flags = ("--head-dim", "128", "--heads", "16", "--batch", "4", *flags, "--json")
        report = json.loads(inspect(capsys, *flags))
        assert report["what"] == "model, not measured"
        (answer,) = report["problem"]
        return dict(answer)

    long, short = problem("--seqlen", "16384"), problem("--seqlen", "2048")
    causal = problem("--seqlen", "16384", "--causal")
    for end in range(2):
        assert 400 < short["tflops"][end] < long["tflops"][end] < 750
        assert causal["tflops"][end] < long["tflops"][end]
        assert 0.45 < causal["seconds"][end] / long["seconds"][end] < 0.6


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, "--head-dim", "64", "--seqlen", "4096")
    assert out.startswith("attn_fwd on MI300X: model, not measured")
    assert (
        "64/64 bf16 plain, low: a turn of the hot loop, slot by slot (model, not measured)" in out
    )
    assert "TFLOP/s" in out
    assert max(map(len, out.splitlines())) <= 160


def test_flags_of_a_problem_without_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "attn_fwd", "--arch", "gfx942", "--head-dim", "64"]) == 2
    assert "--timing" in capsys.readouterr().err
