"""Plans for chunks and moved windows: who gets them, and that they compile without local memory."""

from __future__ import annotations

import pytest
import torch

from pyfa import device
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import backward, code, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import backward as native_backward
from pyfa.backends.native.plans import banded
from pyfa.plan import Plan
from pyfa.problem import Call, Problem, problem_of


def problem(rows: int = 128, gradient: bool = False, **fields: object) -> Problem:
    q = torch.empty(2, rows, 4, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, 256, 2, 64, dtype=torch.float16, device="meta")
    call = Call(q, k, k, max_seqlen_q=rows, max_seqlen_k=256)._replace(**fields)
    return problem_of(call, gradient, False, device.by_name("H200"), True)


def plans(asked: Problem) -> list[Plan]:
    """Those that mask: forward or decode, and backward."""
    found = [BACKENDS["cuda"].plan(asked)]
    if "backward" in asked.features:
        found.append(native_backward.plans_for(TARGET, "cuda", asked)[1])
    return found


SLOPES = torch.empty(4, device="meta")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"window_left": 3, "window_right": 5}, False),
        ({"window_left": 3, "window_right": 0, "window_shift": -5}, False),
        ({"window_left": 3, "window_shift": -5, "alibi_slopes": SLOPES}, True),
        ({"window_left": 3, "window_shift": -5, "dropout_p": 0.5}, True),
        ({"attention_chunk": 64}, True),
        ({"attention_chunk": 64, "window_right": 0}, True),
    ],
)
def test_only_what_needs_it_has_plans_of_its_own(fields: dict[str, object], expected: bool) -> None:
    for asked in (problem(**fields), problem(2, **fields), problem(gradient=True, **fields)):
        for plan in plans(asked):
            assert dict(plan.constants).get("BANDED", 0) == expected
            assert any("compiled for chunks" in note for note in plan.notes) == expected
    sums = native_backward.plans_for(TARGET, "cuda", problem(gradient=True, **fields))[0]
    assert "BANDED" not in dict(sums.constants)


@pytest.mark.skipif(runtime_compiler.why_unavailable() is not None, reason="NVRTC is not here")
@pytest.mark.parametrize("kind", ["decode", "backward", "backward of Hopper"])
def test_no_local_memory(kind: str) -> None:
    plan = {
        "decode": BACKENDS["cuda"].plan(problem(2, attention_chunk=64)),
        "backward": backward.plans_of("sm_80", (64, 64), 0, True)[1],
        "backward of Hopper": backward.sm90_plans_of((64, 64), 0, True)[1],
    }[kind]
    plan = plan if "BANDED" in dict(plan.constants) else banded(plan)
    arch = "sm_90a" if "sm90" in plan.kernel else "sm_80"
    assert code.load(plan, arch).kernel.stack_bytes == 0
