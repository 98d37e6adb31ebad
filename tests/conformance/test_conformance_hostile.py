"""NaN and inf among the inputs: the cases, and that they find what loses or leaks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import turns

import pyfa
from pyfa import conformance
from pyfa.backends import BACKENDS
from pyfa.backends.torch.backend import TorchBackend
from pyfa.conformance import grid
from pyfa.conformance.cases import HOSTILE, Case

Change = Callable[[torch.Tensor, torch.Tensor], Any]


def cases(backend: str) -> list[Case]:
    each = BACKENDS[backend]
    found = grid.cases("quick", each.FEATURES, each.DTYPES, max_seqlen=97)
    return [case for case in found if case.hostile]


def failures(backend: str, chosen: list[Case]) -> list[str]:
    report = conformance.run_cases(BACKENDS[backend], chosen)
    able = "no backward with pages" if backend == "emulator" else ""
    return [
        f"{result.name}: {result.status} {' '.join(result.messages)[-600:]}"
        for result in report.results
        if result.status != "passed"
        and not (able and result.status == "refused" and "page_size" in result.name)
    ]


def test_every_kind_is_asked_of_every_layout() -> None:
    found = {(case.kind, case.hostile) for case in cases("torch")}
    assert {kind for _, kind in found} == set(HOSTILE)
    for kind in ("dense", "varlen", "kvcache"):
        assert {"q=nan", "k=nan", "v=nan"} <= {each for of, each in found if of == kind}


def test_torch_means_what_the_guide_says() -> None:
    assert failures("torch", cases("torch")) == []


def test_emulated_kernels_mean_what_the_guide_says() -> None:
    if BACKENDS["emulator"].why_unavailable():
        pytest.skip("no emulator")
    # The plan for head_dim 256 takes 9 s to compile.
    narrow = [case for case in cases("emulator") if turns.all_run() or case.head_dim < 256]
    chosen = turns.some(narrow, 2, lambda case: case.hostile, lambda case: case.name)
    assert failures("emulator", chosen) == []


def test_a_short_row_of_nan_has_no_lse_of_0() -> None:
    """PyTorch's CPU kernel makes output 0 and LSE 0 of it where keys are fewer than lanes."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    q[0, 2] = torch.nan
    out, lse = pyfa.attention(q, k, v, return_lse=True)
    assert out[0, 2].isnan().all()
    assert lse[0, :, 2].isnan().all()
    assert out.isnan().sum() == 16
    assert lse.isnan().sum() == 2


# What a backend might do with what is hostile, by words of a case that has to show it.
LEAKS: list[tuple[str, Change]] = [
    ("causal-hostile=q=nan", lambda out, lse: (out.nan_to_num(), lse)),
    ("causal-hostile=q=nan", lambda out, lse: (out, lse.nan_to_num(nan=-torch.inf))),
    ("causal-hostile=k=nan", lambda out, lse: (out + 0 * out.sum(1, True), lse)),
    ("causal-hostile=v=nan", lambda out, lse: (out, lse + 0 * out.sum((1, 2, 3))[:, None, None])),
    ("hostile=q=-inf", lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, torch.nan))),
]


@pytest.mark.parametrize("number", range(len(LEAKS)))
def test_what_loses_or_leaks_a_nan_is_found(
    number: int, monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    word, change = LEAKS[number]
    case = next(x for x in cases("torch") if word in x.name and x.kind == "dense")
    bind = TorchBackend.bind

    def changed(self: Any, *arguments: Any) -> Any:
        run = bind(self, *arguments)
        return lambda *tensors: [*change(*run(*tensors))]

    monkeypatch.setattr(TorchBackend, "bind", changed)
    nothing_bound()
    assert failures("torch", [case])
