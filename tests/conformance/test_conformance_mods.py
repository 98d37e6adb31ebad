"""Each mod of the cases meets every feature and kind of call, and its cases see a fault in it."""

import pytest
import torch

from pyfa.backends import BACKENDS
from pyfa.backends.torch import tiled
from pyfa.conformance import grid, grid_mods, modifiers_more, runner
from pyfa.conformance.modifiers import MASKS, SCORES

MEETS = {
    "causal": lambda case: case.causal,
    "window": lambda case: case.window is not None,
    "softcap": lambda case: case.softcap,
    "alibi": lambda case: case.alibi,
    "bias": lambda case: case.bias,
    "sinks": lambda case: case.sinks,
    "dropout": lambda case: case.dropout_p,
    "several heads of a key": lambda case: case.heads_q > case.heads_k,
    "packed": lambda case: case.kind == "varlen",
    "pages": lambda case: case.page_size,
    "a cache": lambda case: case.kind == "kvcache",
    "gradients": lambda case: case.backward,
    "other lengths of keys": lambda case: case.lengths_q != case.lengths_k,
}


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_a_mod_meets_every_feature(name):
    cases = [case for case in grid_mods.everywhere() if name in (case.mask_mod, case.score_mod)]
    for what, meets in MEETS.items():
        assert any(meets(case) for case in cases), what


def test_there_are_28_mods_and_more_in_the_full_level():
    names = {case.mask_mod or case.score_mod for case in grid_mods.everywhere()}
    assert names == {*MASKS, *SCORES}
    assert len(names) >= 28
    full = {case.name for case in grid._full()}
    assert {case.name for case in grid_mods.everywhere()} <= full
    assert {case.name for case in grid_mods.quick()} <= {case.name for case in grid._quick()}


@pytest.mark.parametrize("name", [*modifiers_more.MASKS, *modifiers_more.SCORES])
def test_a_fault_in_a_mod_is_seen(name, monkeypatch):
    """A mask reads the next key, a score is 3 % too large."""
    real = tiled.evaluate

    def wrong(function, inputs, captured):
        if function.ops and name in modifiers_more.MASKS:
            return real(function, {**inputs, "kv": inputs["kv"] + 1}, captured)
        return [x * 1.03 for x in real(function, inputs, captured)]

    monkeypatch.setattr(tiled, "evaluate", wrong)
    case = next(iter(grid_mods.everywhere((name,))))
    found = runner.run_case(BACKENDS["torch"], case, torch.device("cpu"))
    assert found.status == "failed", case.name
