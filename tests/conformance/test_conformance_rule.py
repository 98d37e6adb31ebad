"""The rule itself: what passes, what does not, and that no refinement opens a hole."""

from __future__ import annotations

import math

import pytest
import torch

from pyfa.conformance import Case
from pyfa.conformance.build import build
from pyfa.conformance.examine import Expected, Findings, check_zeros
from pyfa.conformance.tolerances import judge, judge_lse, judge_rotated, ulp


def spread(count: int, size: float) -> torch.Tensor:
    """float64 errors of magnitude ``size`` and alternating sign."""
    return torch.where(torch.arange(count) % 2 == 0, size, -size).double()


REF = torch.linspace(0.5, 0.99, 64, dtype=torch.float64).to(torch.float16).double()


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.float16, 2.0**-10),
        (1.99, torch.float16, 2.0**-10),
        (2.0, torch.bfloat16, 2.0**-6),
        (-0.75, torch.float32, 2.0**-24),
    ],
)
def test_ulp(value: float, dtype: torch.dtype, expected: float) -> None:
    assert ulp(value, dtype) == expected


def test_ulp_of_zero_is_tiny_and_not_zero() -> None:
    assert 0.0 < ulp(0.0, torch.float16) < 1e-6


def test_max_error_is_twice_naives_and_four_ulp() -> None:
    naive = REF + spread(64, 1e-2)
    allowed = 2e-2 + 4 * ulp(0.99, torch.float32)
    x = REF.clone()
    for error, passes in ((0.999 * allowed, True), (1.001 * allowed, False)):
        x[3] = REF[3] + error
        assert judge("out", x.float(), REF, naive).passed is passes


@pytest.mark.parametrize("kind", ["gradient", "softcap"])
def test_the_factor_is_three_for_gradients_and_softcap(kind: str) -> None:
    naive, x = REF + spread(64, 1e-2), REF.clone()
    x[3] += 2.9e-2
    assert not judge("x", x.float(), REF, naive).passed
    gradient, softcap = kind == "gradient", kind == "softcap"
    assert judge("x", x.float(), REF, naive, gradient=gradient, softcap=softcap).passed


def test_mean_error_is_one_and_a_half_of_naives() -> None:
    naive = REF + spread(64, 1e-2)
    assert judge("out", (REF + spread(64, 1.45e-2)).half(), REF, naive).passed
    check = judge("out", (REF + spread(64, 1.55e-2)).half(), REF, naive)
    assert "mean error" in check.message
    assert check.ratio == pytest.approx(1.55 / 1.5, rel=0.01)


@pytest.mark.parametrize("rows", [4, 256, 4096])
def test_a_float32_mean_over_few_rows_may_stray(rows: int) -> None:
    ref = REF.expand(rows, 64)
    # One element of each row is far off in naive, so that only the mean decides.
    naive = ref + spread(64, 1e-5)
    naive[:, 0] += 1.0
    mean = float((naive - ref).abs().mean())
    for part, passes in ((0.99, True), (1.01, False)):
        error = part * mean * 1.5 * (1 + 3.205 / rows**0.5)
        assert judge("out", (ref + spread(64, error)).float(), ref, naive).passed is passes


def test_correctly_rounded_passes_where_naive_is_exact() -> None:
    ref = REF + 1e-5
    assert judge("out", ref.half(), ref, ref).passed
    twice = ref + 2 * (ref.half().double() - ref)
    assert not judge("out", twice.half() + 2.0**-10, ref, ref).passed


def test_what_float64_makes_of_stored_values_is_a_yardstick_too() -> None:
    x = (REF + spread(64, 1e-3)).float()
    assert not judge("dq", x, REF, REF, gradient=True).passed
    assert judge("dq", x, REF, REF, recomputed=REF + spread(64, 1e-3), gradient=True).passed


def noise(*shape: int) -> torch.Tensor:
    """Independent normal errors of the size 1e-2, in float64."""
    return 1e-2 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()


def test_a_16_bit_gradient_has_naives_error_and_that_of_stored_values() -> None:
    """Independent of each other: on the mean the root of the sum of their squares."""
    ref = REF.expand(8192, 64)
    error = noise(8192, 64)
    naive, again = ref + 3 * error, ref + 4 * error
    for part, passes in ((0.98, True), (1.03, False)):
        x = (ref + part * 1.5 * 5 * error).half()
        check = judge("dv", x, ref, naive, recomputed=again, gradient=True)
        assert ("mean error" not in check.message) is passes
    # In float32 naive has all of the stored values' errors but one: the larger of the two.
    x = (ref + 1.5 * 4.6 * error).float()
    assert "mean" in judge("dv", x, ref, naive, recomputed=again, gradient=True).message


@pytest.mark.parametrize(
    ("name", "error", "numbers"),
    [
        ("dq", noise(8192, 64), 250_000),  # each element for itself: almost 8192 · 64
        ("dq", noise(8192, 1) * torch.linspace(1.0, 2.0, 64), 5_200),  # rows of one number each
        ("dq", torch.cat([noise(2, 64), torch.zeros(8190, 64).double()]), 3.9),
        ("dbias", noise(1, 64), 40),  # of one row nothing is known of its elements, but for a bias
        ("dq", noise(1, 64), 1),
    ],
)
def test_a_16_bit_gradients_mean_is_one_of_independent_numbers(
    name: str, error: torch.Tensor, numbers: float
) -> None:
    # Values below the smallest ulp of interest, so that the error is not rounded away.
    ref = torch.zeros_like(error) + 2.0**-7
    allowed = 1.5 * (1.0 + 3.205 / numbers**0.5)
    for part, passes in ((0.95, True), (1.05, False)):
        x = (ref + part * allowed * error).half()
        check = judge(name, x, ref, ref + error, gradient=True)
        assert ("mean error" not in check.message) is passes, check.message
    # The output's elements are rounded on their own.
    check = judge("out", (ref + 1.55 * error).half(), ref, ref + error)
    assert "mean error" in check.message


def test_gradients_may_move_with_the_lse_and_outputs_may_not() -> None:
    naive, moved = REF.float().double(), (REF * (1.0 + 64.0 * 2.0**-24)).float()
    assert judge("dq", moved, REF, naive, gradient=True, largest_lse=80.0).passed
    assert not judge("dq", moved, REF, naive, gradient=True, largest_lse=4.0).passed
    assert not judge("out", moved, REF, naive, largest_lse=80.0).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_stand_where_the_reference_has_them(value: float) -> None:
    special = REF.clone()
    special[5] = value
    assert "where none belongs" in judge("out", special.half(), REF, REF).message
    assert "missing" in judge("out", REF.half(), special, REF).message
    assert judge("out", special.half(), special, REF).passed


def test_a_yardstick_that_is_not_finite_fails_the_case() -> None:
    assert "badly made" in judge("out", REF.half(), REF, REF * math.inf).message


def test_the_shape_is_checked() -> None:
    assert "shape" in judge("out", REF.half()[:-1], REF, REF).message


def test_nothing_finite_is_no_error() -> None:
    nothing = torch.full((4,), -math.inf, dtype=torch.float64)
    assert judge_lse(nothing.float(), nothing, REF.half(), 1.0, 1.0).passed
    empty = torch.zeros(0, dtype=torch.float64)
    assert judge("out", empty.half(), empty, empty).passed


def test_lse_of_16_bit_inputs() -> None:
    lse = torch.full((4,), 5.0, dtype=torch.float64)
    bound = 1e-3 + 2.0**-20 * 100.0
    for part, passes in ((0.99, True), (1.01, False)):
        x = (lse + part * bound).float()
        assert judge_lse(x, lse, REF.bfloat16(), 100.0, 1e9).passed is passes


def test_lse_of_float32_inputs() -> None:
    lse = torch.full((4,), 5.0, dtype=torch.float64)
    allowed = 4 * 2.0**-21 + 64**0.5 * 2.0**-23 * 3.0
    for part, passes in ((0.9, True), (1.2, False)):
        x = (lse + part * allowed).float()
        assert judge_lse(x, lse, REF.float(), 1e9, 3.0).passed is passes


def test_a_steep_score_mod_moves_the_lse_as_far() -> None:
    """0.1 s² has a slope of 0.2 s: an error of s is as many times as large behind it."""
    options = {"dtype": "float32", "lengths_q": (4,), "lengths_k": (112,), "recipe": "growing"}
    steep, plain = (build(Case(**options, score_mod=name)) for name in ("bounded", ""))
    largest = steep.score_size / plain.score_size
    slope = 0.2 * plain.score_size
    assert slope < largest < slope + 1.1, "and at most 1 of the rest of the mod"
    assert steep.product_size > 5.0 * plain.product_size
    flat, plain = (build(Case(score_mod=name)) for name in ("softcap", ""))
    assert (flat.score_size, flat.product_size) == pytest.approx(
        (plain.score_size, plain.product_size), rel=0.3
    ), "a slope below 1 does not shrink the bound; the values differ by their seed"


def test_float8_rows_share_the_error_of_their_largest_p() -> None:
    """So a mean is one of as many numbers as there are rows, and not of all their elements."""
    ref = REF.expand(6, 64).clone()
    of_rows = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 2e-2], dtype=torch.float64)[:, None]
    again = ref + of_rows * ref
    x = (ref + 2.5 * of_rows * ref).half()
    assert "mean" not in judge("out", x, ref, ref, recomputed=again, float8=True).message
    assert "mean" in judge("out", x, ref, ref, recomputed=again).message
    many = (REF + spread(64, 1e-2)).expand(512, 64)
    wrong = (REF + 1.8 * spread(64, 1e-2)).expand(512, 64).half()
    many = many + 1e-2 * noise(512, 64)
    rows = REF.expand(512, 64)
    assert "mean" in judge("out", wrong, rows, many, recomputed=many, float8=True).message


def test_a_lone_key_is_no_yardstick_of_float8() -> None:
    """P = 1 is rounded exactly, but not where a kernel's base is another than the row's maximum."""
    case = Case(dtype="float8_e4m3fn", lengths_q=(40,), lengths_k=(1,))
    expected = Expected(build(case))
    ref, again = expected.ref["out"], expected.recomputed["out"]
    assert again is not None
    naive = (expected.naive["out"].double() - ref).abs().mean() / ref.abs().mean()
    share = (again - ref).abs().mean() / ref.abs().mean()
    assert float(naive) < 2.0**-8, "the rounding of the output alone"
    # 4 bits of a number from 1 to 2 are off by 2⁻⁵ on average: 2⁻⁶ to 2⁻⁵ of itself.
    assert 2.0**-6 < float(share) < 2.0**-5


def test_delta_of_float32_comes_from_the_output_that_forward_stores() -> None:
    """Keys are equal here, so dQ is 0 but for the error of δ, which is that of the output's sum."""
    case = Case(dtype="float32", lengths_q=(33,), lengths_k=(270,), head_dim_v=3, backward=True,
                recipe="equal")  # fmt: skip
    expected = Expected(build(case))
    again, out = expected.recomputed["dq"], expected.ref["out"]
    assert again is not None
    error = (expected.naive["out"].double() - out).abs().mean()
    rounded = (out.float().double() - out).abs().mean()
    assert error > 4.0 * rounded
    assert (again - expected.ref["dq"]).abs().mean() > 0.2 * error * 64**-0.5


def test_rotated_keys_may_be_one_ulp_off() -> None:
    ref = torch.tensor([1.0, 0.5], dtype=torch.bfloat16)
    near, far = ref.clone(), ref.clone()
    near[0] += 2.0**-7
    far[0] += 2.0**-5
    assert judge_rotated(near, ref).passed
    assert not judge_rotated(far, ref).passed


@pytest.mark.parametrize(("softcap", "holds"), [(0.0, False), (2.0, True)])
def test_a_flat_softcap_hides_no_key(softcap: float, holds: bool) -> None:
    """With the LSE's gradient alone dV is 0, and float64 rounds the slope far from 0 to 0."""
    found, zeros = Findings(), torch.zeros(1, 4, 2, 8, dtype=torch.float64)
    ref = {"dv": zeros, "dk": zeros}
    results = {"dv": zeros, "dk": torch.full_like(zeros, 1e-30)}
    check_zeros(found, Case(backward=True, dlse="only", softcap=softcap), results, ref)
    assert all(not check.message for check in found.checks) == holds
    found = Findings()
    check_zeros(found, Case(backward=True, softcap=softcap), results, ref)
    assert [check.name for check in found.checks if check.message] == ["dk of empty rows"]
