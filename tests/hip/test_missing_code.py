"""A machine with a bundle and without a compiler: what is not bundled is a reason to decline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from pyfa import bundle, dispatch
from pyfa.backends import BACKENDS
from pyfa.backends.hip import code, compiler
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.device import DEVICES
from pyfa.errors import CompileError, PerformanceWarning
from pyfa.plan import Plan
from pyfa.problem import Problem

MISSING = "the HIP compiler is not installed"


def problem(dim: int, *features: str, device: str = "MI300X", **changes: object) -> Problem:
    values: dict[str, object] = {
        "batch": 1, "seqlen_q": 256, "seqlen_k": 256, "heads_q": 1, "heads_k": 1, "head_dim": dim,
        "head_dim_v": dim, "dtype": "bfloat16", "features": frozenset(features),
        "device": DEVICES[device], "square": True,
    }  # fmt: skip
    return Problem(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """An MI300X machine as a wheel finds it: the bundle lists the common plans, no ziglang."""
    listed = catalog.common_plans(TARGET, "gfx942")
    objects = {code.key_of(plan, "gfx942"): {"arch": "gfx942"} for plan in listed}
    monkeypatch.setattr(bundle, "manifest", lambda: {"schema": 1, "objects": objects})
    monkeypatch.setattr(compiler, "why_unavailable", lambda: MISSING)
    monkeypatch.setattr(dispatch, "_lost", set())
    hip, triton = BACKENDS["hip"], BACKENDS["triton"]
    monkeypatch.setattr(hip.runtime, "why_unavailable", lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(triton), "why_unavailable", lambda self: None)
    code.load.cache_clear()
    yield listed
    code.load.cache_clear()


def chosen(wanted: Problem) -> str:
    return dispatch._choose(wanted, "").backend.NAME


def test_the_bundle_runs(bundled: list[Plan]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(problem(128)) == "hip"
        assert chosen(problem(64, "causal", "backward")) == "hip"
        assert chosen(problem(64, "causal", "backward", "deterministic")) == "hip"
        assert chosen(problem(128, seqlen_q=1)) == "hip"


@pytest.mark.parametrize(
    ("wanted", "kernel"),
    [
        (problem(96), "attn_fwd"),
        (problem(128, "dropout"), "attn_fwd"),
        (problem(256, seqlen_q=1), "attn_decode"),
    ],
    ids=["another head dim", "dropout", "decode"],
)
def test_triton_runs_what_is_not_bundled(bundled: list[Plan], wanted: Problem, kernel: str) -> None:
    reason = f"no code for this problem is bundled ({kernel}), and {MISSING}"
    assert list(BACKENDS["hip"].why_not(wanted)) == [reason]
    with pytest.warns(PerformanceWarning, match="no code for this problem is bundled"):
        assert chosen(wanted) == "triton"
    with pytest.raises(CompileError):
        code.load(BACKENDS["hip"].plan(wanted), "gfx942")


def test_kernels_beside_the_first_count_too(
    bundled: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What merges parts of the keys, and backward's three, of the problem's own number format."""
    objects = bundle.manifest()["objects"]
    for plan in bundled:
        if plan.kernel in ("hip/combine.hip", "hip/attn_bwd.hip"):
            del objects[code.key_of(plan, "gfx942")]
    (reason,) = BACKENDS["hip"].why_not(problem(128, "backward", "deterministic"))
    assert "(combine, attn_bwd, attn_bwd)" in reason
    (reason,) = BACKENDS["hip"].why_not(problem(128))
    assert "(combine)" in reason


def test_a_compiler_is_enough(bundled: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "why_unavailable", lambda: None)
    assert chosen(problem(96, "backward")) == "hip"


def test_strict_raises(bundled: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYFA_STRICT", "1")
    with pytest.raises(PerformanceWarning, match="the hip backend cannot run here"):
        chosen(problem(96))


def test_of_a_device_that_is_not_here_nobody_asks_for_code(
    bundled: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = BACKENDS["hip"].runtime  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no GPU")
    assert dispatch.ask("hip", problem(96), hypothetical=True).plan is not None


@pytest.mark.parametrize("wanted", [problem(d, device="MI300X") for d in (40, 64, 200)], ids=str)
def test_the_plans_are_those_that_run(wanted: Problem) -> None:
    """Every plan that is asked for is one that a build makes."""
    hip = BACKENDS["hip"]
    for features in ((), ("backward", "softcap"), ("backward", "dropout")):
        changed = problem(wanted.head_dim, *features)
        assert set(hip.kernels(changed)) <= set(catalog.all_plans(TARGET, "gfx942"))  # type: ignore[attr-defined]
