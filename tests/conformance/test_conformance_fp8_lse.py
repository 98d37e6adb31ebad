"""How far float8's LSE may be off: as far as a matrix unit of 14 bits makes it, and no farther."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyfa import reference
from pyfa.backends import BACKENDS
from pyfa.conformance import build, float8, grid
from pyfa.conformance.cases import Case
from pyfa.conformance.examine import Expected
from pyfa.conformance.recompute import with_moved_scores
from pyfa.conformance.tolerances import Check, judge_lse
from pyfa.problem import Call

TORCH = BACKENDS["torch"]
DENSE = [
    case
    for case in grid.cases("quick", TORCH.FEATURES, TORCH.DTYPES, ["fp8"])
    if case.kind == "dense" and case.dtype.startswith("float8") and not case.hostile
]
E4M3 = torch.float8_e4m3fn


def error_of_unit(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the unit is off, and how far it may be."""
    q, k = q.double(), k.double()
    return (float8.summed(q, k) - torch.einsum("qhd,khd->hqk", q, k)).abs(), float8.score_slack(
        q, k
    )


@pytest.mark.parametrize("dim", [16, 40, 128, 256])
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("largest", [0.0, 400.0])
def test_the_matrix_unit_keeps_within_it(dim: int, mean: float, largest: float) -> None:
    torch.manual_seed(dim)
    q, k = (torch.randn(33, 2, dim) + mean for _ in range(2))
    q[..., dim // 2] += largest
    k[5:, :, dim // 2] += largest
    error, slack = error_of_unit(*(x.clamp(max=448.0).to(E4M3) for x in (q, k)))
    assert (error <= slack).all()


def test_the_worst_comes_near_it() -> None:
    """One product of 2^14, and 127 that are cut to nothing because they are below 2."""
    q, k = torch.ones(1, 1, 128), torch.full((1, 1, 128), 1.875)
    q[..., 0] = k[..., 0] = 128.0
    error, slack = error_of_unit(q.to(E4M3), k.to(E4M3))
    assert float(error) == 127 * 1.875
    assert 0.8 < float(error / slack) <= 1.0


def verdict(expected: Expected, lse: torch.Tensor) -> Check:
    inputs = expected.inputs
    sizes = inputs.score_size, inputs.product_size
    return judge_lse(lse.float(), expected.ref["lse"], inputs.spec.q, *sizes, expected.lse_slack)


def lse_by_unit(call: Call, bits: int) -> torch.Tensor:
    """The LSE of scores that a unit of so many bits made."""

    def error(b: int) -> torch.Tensor:
        q, k, _ = reference.operands(call, b)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return call.scale * (float8.summed(q, k, bits) - torch.einsum("qhd,khd->hqk", q, k))

    return reference.attention(with_moved_scores(call, map(error, range(call.batch))))[1]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_scores_of_the_matrix_unit_pass(case: Case) -> None:
    expected = Expected(build.build(case))
    if case.softcap:
        pytest.skip("moved scores are behind the cap, which would flatten the errors")
    assert verdict(expected, lse_by_unit(expected.inputs.spec, 13)).passed


def without_a_key(call: Call) -> Call:
    return call._replace(k=call.k[:, 1:], v=call.v[:, 1:], max_seqlen_k=call.max_seqlen_k - 1)


FAULTS: dict[str, Callable[[Call], Call]] = {
    "a key is missing": without_a_key,
    "q's scale is lost": lambda call: call._replace(q_descale=torch.ones_like(call.q_descale)),
    "k's scale is v's": lambda call: call._replace(k_descale=call.v_descale),
    "k's scale is another's": lambda call: call._replace(k_descale=call.k_descale.flip(1)),
    "scores are 3 % too large": lambda call: call._replace(scale=1.03 * call.scale),
}
PLAIN = [c for c in DENSE if c.scales in ("head", 16, 64) and not c.bias and c.recipe == "plain"]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails(case: Case, fault: str) -> None:
    expected = Expected(build.build(case))
    assert verdict(expected, expected.ref["lse"]).passed
    call = FAULTS[fault](expected.inputs.spec)
    assert "lse: max error" in verdict(expected, reference.attention(call)[1]).message


# Of 500 keys the errors cancel: 0.0057 is left where 0.0066 is allowed.
FEW_KEYS = [case for case in PLAIN if max(case.lengths_k) < 500]


@pytest.mark.parametrize("case", FEW_KEYS, ids=lambda case: case.name)
def test_a_unit_of_fewer_bits_fails(case: Case) -> None:
    """By four: the errors of a row's keys are of either sign, and the LSE takes their mean."""
    expected = Expected(build.build(case))
    assert not verdict(expected, lse_by_unit(expected.inputs.spec, 9)).passed


def test_each_row_has_its_own_bound() -> None:
    expected = Expected(build.build(PLAIN[0]))
    lse, slack = expected.ref["lse"], expected.lse_slack
    assert slack is not None
    row = int(slack.flatten().argmin())
    wrong = lse.clone()
    wrong.flatten()[row] += 1.5e-3 + 1.5 * float(slack.min())
    assert not verdict(expected, wrong).passed
