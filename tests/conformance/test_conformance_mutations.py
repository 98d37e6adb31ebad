"""Breaking the torch backend makes conformance fail, each time: the suite sees what it claims to.

A mutant is the module's own source with one snippet replaced, run in the module's place.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from pyfa.backends import BACKENDS
from pyfa.backends.torch import backend, philox, tiled
from pyfa.conformance import grid, run_cases
from pyfa.conformance.cases import Case
from pyfa.conformance.report import FAILED, PASSED

TORCH = BACKENDS["torch"]


@dataclass(frozen=True)
class Mutation:
    """What is broken, where, and the feature whose cases must notice."""

    name: str
    module: ModuleType
    snippet: str
    broken: str
    feature: str
    symptom: str


MUTATIONS = (
    Mutation(
        "mask off by one",
        tiled,
        "hidden = distance > call.window_right\n",
        "hidden = distance > call.window_right + 1\n",
        "window",
        "max error",
    ),
    Mutation(
        "the next key's chunk",
        tiled,
        "!= self._chunk_of(key - distance)",
        "!= self._chunk_of(key - distance + 1)",
        "chunk",
        "max error",
    ),
    Mutation(
        "a chunk's last key not visited",
        tiled,
        "end = self._chunk_of(end_q - 1 + self.shift) + self.call.attention_chunk",
        "end = self._chunk_of(end_q - 1 + self.shift) + self.call.attention_chunk - 1",
        "chunk",
        "max error",
    ),
    Mutation(
        "a negative edge off by one",
        tiled,
        "self._hidden(distance - call.window_shift, tile)",
        "self._hidden(distance - call.window_shift - 1, tile)",
        "negative_edge",
        "max error",
    ),
    Mutation(
        "missing rescale",
        tiled,
        "acc = acc * grid.grouped(rescale) + ",
        "acc = acc + ",
        "softcap",
        "out: max error",
    ),
    Mutation(
        "dropped dLSE",
        tiled,
        "delta = delta - _row_values(grid, dlse, begin_q, end_q)",
        "delta = delta.clone()",
        "dlse",
        "dq: max error",
    ),
    Mutation(
        "wrong GQA head",
        tiled,
        "grouped: torch.Tensor = rows.unflatten(2, (self.heads_k, -1))\n",
        "grouped: torch.Tensor = rows.unflatten(2, (-1, self.heads_k)).transpose(2, 3)\n",
        "gqa",
        "out: max error",
    ),
    Mutation(
        "dropout counter shifted",
        philox,
        "torch.broadcast_tensors(keys >> 2, rows, heads, batches)",
        "torch.broadcast_tensors(keys >> 2, rows + 1, heads, batches)",
        "dropout",
        "dropout bits: not those of the specification",
    ),
    Mutation(
        "NaN from an empty row",
        tiled,
        "base = raised.masked_fill(raised == -torch.inf, 0.0)",
        "base = raised",
        "bias",
        "NaN: ",
    ),
)


def mutant(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The broken module, under a name of its own."""
    source = inspect.getsource(mutation.module)
    assert source.count(mutation.snippet) == 1, f"{mutation.name}: the snippet has moved"
    broken = ModuleType(f"{mutation.module.__name__}_broken")
    broken.__package__ = mutation.module.__package__
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(source.replace(mutation.snippet, mutation.broken), broken.__dict__)
    return broken


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_backend_fails(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of the feature fails with the symptom, and passes on the unbroken backend."""
    broken = mutant(mutation, monkeypatch)
    # sdpa.py is not broken, so cases that it runs may pass; the tiled ones must not all.
    name = mutation.module.__name__.rpartition(".")[2]
    with monkeypatch.context() as patch:
        patch.setattr(backend if name == "tiled" else tiled, name, broken)
        found = noticed(mutation)
    report = run_cases(TORCH, [found])
    assert [(r.status, r.messages) for r in report.results] == [(PASSED, ())]


def noticed(mutation: Mutation) -> Case:
    """The first case of the feature that fails with the symptom."""
    for case in grid.cases("quick", TORCH.FEATURES, TORCH.DTYPES, [mutation.feature]):
        report = run_cases(TORCH, [case])
        (result,) = report.results
        if result.status == FAILED and any(mutation.symptom in each for each in result.messages):
            assert not report.ok
            return case
    pytest.fail(f"no case of {mutation.feature} fails with {mutation.symptom!r}")
