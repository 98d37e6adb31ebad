"""How far float8's output may be off: as far as P in float8 and sums of 14 bits make it, and no
farther."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pyfa import reference
from pyfa.conformance import build, float8
from pyfa.conformance.cases import Case, dense
from pyfa.conformance.examine import Expected
from pyfa.conformance.tolerances import Check, judge
from pyfa.problem import Call

E4M3 = "float8_e4m3fn"
NEEDLE = dense(33, 513, dtype=E4M3, recipe="needle")
SINK = dense(33, 513, dtype=E4M3, recipe="sink")
PLAIN = dense(65, 97, dtype=E4M3, scales="head")
# Found by benchmarks/fuzz.py on an H200, with the largest error it measured. In the first all keys
# but one, whose value is 0, are below the range of P. In the others sums are large, so that 14 bits
# move a score by tenths.
BELOW_RANGE = Case(
    dtype=E4M3,
    lengths_q=(40, 40),
    lengths_k=(80, 80),
    heads_q=1,
    heads_k=1,
    scale=0.5,
    recipe="needle",
)
LARGE_SUMS = Case(
    kind="varlen",
    dtype=E4M3,
    lengths_q=(31, 80, 80, 80, 15),
    lengths_k=(49, 35, 65, 76, 49),
    head_dim=256,
    scale=0.5,
    recipe="growing",
)
LARGE_SUMS_CACHED = Case(
    kind="kvcache",
    dtype=E4M3,
    lengths_q=(32, 80, 17, 80, 64),
    lengths_k=(63, 79, 68, 71, 15),
    head_dim=256,
    scale=0.5,
    packed_q=True,
    recipe="growing",
)
MEASURED = {BELOW_RANGE: 5.358e-8, LARGE_SUMS: 6.482e-1, LARGE_SUMS_CACHED: 7.931e-1}


def hopper(
    call: Call,
    *,
    bits: int = float8.BITS,
    top: float = 8.0,
    in_order: bool = False,
    lost: int = -1,
    doubled: bool = False,
) -> torch.Tensor:
    """The output of Hopper's float8 forward without a mask, computed as
    docs/kernels/cuda_sm90_float8.md says. Faults: fewer ``bits`` of a score's sum, another exponent
    of the largest P, tiles from the first to the last, a key whose P is ``lost``, P ``doubled`` in
    the product alone."""

    def of_sequence(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = reference.operands(call, b)
        group, keys = q.shape[1] // k.shape[1], k.shape[0]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = float8.summed(q, k, bits) * call.scale / math.log(2.0)
        base = scores.new_full((*scores.shape[:2], 1), -1e30)
        total = torch.zeros_like(base)
        out = scores.new_zeros(*scores.shape[:2], v.shape[-1])
        begins = range(0, keys, float8.TILE)
        for begin in begins if in_order else reversed(begins):
            tile = slice(begin, begin + float8.TILE)
            largest = scores[..., tile].amax(-1, keepdim=True)
            raised = torch.where(largest > base + top + 0.75, largest - top, base)
            raised = torch.maximum(raised, base)
            out, total = (x * torch.exp2(base - raised) for x in (out, total))
            base = raised
            p = torch.exp2(scores[..., tile] - base)
            total += p.sum(-1, keepdim=True)
            p = p.to(call.q.dtype).double()
            p[..., torch.arange(keys)[tile] == lost] = 0.0
            out += float8.summed(p.transpose(0, 1), v[tile].permute(2, 1, 0)) * (1 + doubled)
        return (out / total).transpose(0, 1), base[..., 0]

    out = reference.gathered(call, [*map(of_sequence, range(call.batch))], torch.float64)[0]
    return out.to(call.dtype_of_out())


def verdict(expected: Expected, out: torch.Tensor) -> Check:
    ref, naive, recomputed = (x["out"] for x in (expected.ref, expected.naive, expected.recomputed))
    return judge("out", out, ref, naive, recomputed=recomputed, float8=True)


@pytest.mark.parametrize("case", [NEEDLE, SINK, PLAIN, *MEASURED], ids=lambda case: case.name)
def test_the_arithmetic_of_hopper_passes(case: Case) -> None:
    expected = Expected(build.build(case))
    check = verdict(expected, hopper(expected.inputs.spec))
    assert check.passed, check.message


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_it_has_the_error_that_an_h200_had(case: Case) -> None:
    expected = Expected(build.build(case))
    error = (hopper(expected.inputs.spec).double() - expected.ref["out"]).abs().max()
    assert float(error) == pytest.approx(MEASURED[case], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (NEEDLE, {"top": 0.0}),
        (NEEDLE, {"top": 3.0}),
        (SINK, {"in_order": True}),
        (PLAIN, {"bits": 6}),
        (LARGE_SUMS, {"bits": 11}),
        (LARGE_SUMS_CACHED, {"bits": 11}),
        (PLAIN, {"lost": 14}),
        (LARGE_SUMS, {"lost": 34}),  # the last key of one sequence
        (LARGE_SUMS_CACHED, {"lost": 14}),
        *((case, {"doubled": True}) for case in (NEEDLE, SINK, PLAIN)),
        *((case, {"doubled": True}) for case in (LARGE_SUMS, LARGE_SUMS_CACHED)),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_a_fault_fails(case: Case, fault: dict[str, Any]) -> None:
    expected = Expected(build.build(case))
    assert not verdict(expected, hopper(expected.inputs.spec, **fault)).passed


def test_of_a_key_that_its_tile_outweighs_nothing_is_left() -> None:
    """Up to 127 keys behind the one that outweighs it, and anywhere before: that raises a base."""
    p = torch.full((1, 1, 300), 2.0**-20, dtype=torch.float64)
    p[..., 100] = 1.0
    stored = float8.stored_p(p, torch.float8_e4m3fn)[0, 0]
    assert (stored[:100] == 0.0).all()
    assert (stored[101 : 100 + float8.TILE] == 0.0).all()
    assert (stored[100 + float8.TILE :] / 2.0**-20 - 1.0).abs().max() <= 2.0**-4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_p_is_as_far_off_as_in_the_format(dtype: torch.dtype) -> None:
    """In each octave below the largest, which is between half the format's largest number and that.
    Where subnormal numbers begin, the two differ by 5 %: in the format their steps and those of
    normal numbers are powers of two."""
    torch.manual_seed(0)
    p = torch.exp2(-22.0 * torch.rand(1, 4000, 100, dtype=torch.float64))
    p[..., 0] = 1.0
    most = torch.finfo(dtype).max * torch.exp2(-torch.rand(1, 4000, 1, dtype=torch.float64))
    cast = (p * most).to(dtype).double() / most
    stored = float8.stored_p(p, dtype)
    for octave in range(22):
        inside = (p <= 2.0**-octave) & (p > 2.0 ** -(octave + 1))
        errors = [float((x - p)[inside].abs().mean()) for x in (stored, cast)]
        assert errors[0] == pytest.approx(errors[1], rel=0.1), octave
