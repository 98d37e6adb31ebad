"""What the float8 rule lets pass and what it does not: a P in float8 done well, and done badly.

The torch backend keeps P in float32; the mutants give it the float8 P that a kernel on 8-bit matrix
units has.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType

import pytest
import torch
import turns

from pyfa.backends import BACKENDS
from pyfa.backends.torch import backend, tiled
from pyfa.conformance import grid
from pyfa.conformance.build import build
from pyfa.conformance.cases import Case
from pyfa.conformance.examine import Expected
from pyfa.conformance.report import FAILED, PASSED
from pyfa.conformance.runner import run_case

# One process works out what is expected, for all of these.
pytestmark = pytest.mark.xdist_group("float8")

TORCH, CPU = BACKENDS["torch"], torch.device("cpu")
FLOAT8 = grid.cases("quick", TORCH.FEATURES, TORCH.DTYPES, ["fp8"])
# A float8 kernel has float8 queries; under 16 bits P is of 16.
QUERIES = [case for case in FLOAT8 if case.dtype.startswith("float8")]

PRODUCT = "grid.grouped(p) @ v\n        maximum"
CAST = "grid.grouped((p * {0}).to(torch.float8_e4m3fn).float() / {0}) @ v\n        maximum"
ORDER = "for tile in grid.tiles(begin_q, end_q):\n        k, v = ("
BACKWARDS = "for tile in reversed(grid.tiles(begin_q, end_q)):\n        k, v = ("
TILES = ("self.step_k = min(512, ", "self.step_k = min(64, ")
SCALED = (PRODUCT, CAST.format(256.0))
REVERSED = (ORDER, BACKWARDS)


def broken(monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> None:
    """Runs the torch backend on its own source with each first text replaced by the second."""
    source = inspect.getsource(tiled)
    for old, new in changes:
        assert source.count(old) == 1, f"the snippet has moved: {old}"
        source = source.replace(old, new)
    module = ModuleType(f"{tiled.__name__}_broken")
    module.__package__ = tiled.__package__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, module.__dict__)
    monkeypatch.setattr(backend, "tiled", module)


@functools.cache
def expected(case: Case) -> Expected:
    """Once for all tests: it takes four times as long as the case."""
    return Expected(build(case))


def failing(cases: list[Case]) -> dict[str, str]:
    """The cases that fail, by recipe or what they are about; none may crash."""
    results = [run_case(TORCH, case, CPU, expected(case)) for case in cases]
    assert {result.status for result in results} <= {PASSED, FAILED}, results
    return {r.name: "; ".join(r.messages) for r in results if r.status == FAILED}


def test_the_backend_passes() -> None:
    """``ci/test`` runs all of these cases in the suite itself."""
    assert failing(turns.some(FLOAT8, 4, lambda case: case.kind, lambda case: case.name)) == {}


def test_p_in_float8_passes_scaled_and_from_the_last_key_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And only ``sinks``, which ought to come last too, do not bear to be what comes first."""
    broken(monkeypatch, TILES, SCALED, REVERSED)
    failed = failing(QUERIES)
    assert [name for name in failed if "sinks-recipe=sink" not in name] == []
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ((TILES, SCALED), "recipe=sink"),
        ((TILES, REVERSED, (PRODUCT, CAST.format(1.0))), "recipe=needle"),
    ],
    ids=["first key first", "not scaled"],
)
def test_p_in_float8_collapses(
    changes: tuple[tuple[str, str], ...], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, *changes)
    failed = failing([case for case in QUERIES if recipe in case.name and not case.sinks])
    assert len(failed) == 1
    assert all("out: max error" in each for each in failed.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("begin_q, end_q, call.q_descale)", "begin_q, end_q)"),
        ("(call.k, tile, call.k_descale)", "(call.k, tile, None)"),
        ("(call.k, tile, call.k_descale)", "(call.k, tile, call.v_descale)"),
        ("(call.v, tile, call.v_descale)", "(call.v, tile, call.v_descale.flip(-1))"),
    ],
    ids=["q's lost", "k's lost", "k's and v's swapped", "another head's or block's"],
)
def test_a_wrong_scale_fails(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, (old, new))
    scaled = [case for case in QUERIES if case.scales and case.kind == "dense"]
    failed = failing(scaled)
    assert failed, "nothing noticed"
    assert all("error" in each or "NaN" in each for each in failed.values())


def test_a_scale_of_the_next_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyfa.backends.torch.rows import Rows

    scales = Rows._scales

    def late(
        self: Rows, descale: torch.Tensor, storage: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        found = scales(self, descale, storage, begin, end)
        return found if descale.dim() == 2 else found.roll(1, dims=1)

    monkeypatch.setattr(Rows, "_scales", late)
    blocks = [case for case in FLOAT8 if isinstance(case.scales, int)]
    failed = failing(turns.some(blocks, 4, lambda case: case.kind, lambda case: case.name))
    assert {name.split("-")[0] for name in failed} == {"dense", "varlen", "kvcache", "latent"}
