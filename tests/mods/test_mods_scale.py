"""A mask_mod with a scale of 0 or less: plans that mask products before they scale do not take
it."""

from __future__ import annotations

import pytest
import torch

from pyfa import mods
from pyfa.backends import BACKENDS
from pyfa.backends.common.calls import GENERAL, PLAIN
from pyfa.backends.cuda import forward_sm90
from pyfa.backends.hip import forward
from pyfa.conformance import Case
from pyfa.conformance.report import PASSED
from pyfa.conformance.runner import run_case
from pyfa.device import DEVICES
from pyfa.plan import Plan
from pyfa.problem import Problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [(4, 5), (65, 97)])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_the_emulator_is_right(lengths: tuple[int, int], scale: float) -> None:
    rows, keys = lengths
    case = Case(
        lengths_q=(rows,), lengths_k=(keys,), scale=scale, mask_mod="patches", backward=scale < 0
    )
    result = run_case(BACKENDS["emulator"], case, CPU)
    assert result.status == PASSED, result.messages


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [5, 4096])
def test_plans(head_dim: int, seqlen: int) -> None:
    digest, *_ = mods.resolve(None, lambda b, h, q, k: (q - k).abs() < 9, CPU)

    def plan(device: str, positive: bool) -> Plan:
        problem = Problem(
            2, seqlen, seqlen, 8, 8, head_dim, head_dim, "bfloat16", frozenset({"mask_mod"}),
            DEVICES[device], True, mods=digest, positive=positive,
        )  # fmt: skip
        return forward.plan("hip", problem) if device == "MI300X" else forward_sm90.plan(problem)

    for device in ("MI300X", "H200"):
        assert dict(plan(device, True).constants)["SCORE"] == PLAIN
        assert dict(plan(device, False).constants)["SCORE"] == GENERAL
