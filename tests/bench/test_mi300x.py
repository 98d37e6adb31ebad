"""``pyfa bench mi300x``, with a stand-in for the device whose times come from the model with one
constant changed: that one is named, and by noise none is."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyfa import bench, cli
from pyfa.backends.hip import runtime_sensitivity, runtime_timing
from pyfa.backends.hip.runtime_sensitivity import FACTORS, Costs, Reckoned
from pyfa.bench import mi300x, mi300x_fit, runner, suites
from pyfa.bench.suites import Cell
from pyfa.plan import Plan

pytestmark = [
    pytest.mark.skipif(
        runtime_timing.why_unavailable() is not None, reason="no emulator or no code objects here"
    ),
    # One process reckons (``reckoned``), for all of these.
    pytest.mark.xdist_group("mi300x"),
]
NOISE = 0.02


class ByTitle(runtime_sensitivity.Table):
    """The saved costs by what a kernel computes, whatever its code is now: nothing is compiled,
    which would take a minute."""

    def find(self, plan: Plan, resident: int) -> Costs:
        return saved_costs()[runtime_sensitivity._title(plan), resident]


@functools.cache
def saved_costs() -> dict[tuple[str, int], Costs]:
    """By title and workgroups on a compute unit; 0 are as many as fit."""
    every = [Costs.of(one) for one in json.loads(mi300x.COSTS.read_text())["kernels"]]
    return {(one.title, one.resident): one for one in every} | {
        (one.title, 0): one for one in every if one.resident == one.fits
    }


@functools.cache
def reckoned() -> tuple[tuple[Cell, Reckoned], ...]:
    table = ByTitle([])
    return tuple((cell, mi300x.reckon(cell, table)) for cell in suites.SUITES["mi300x"](True))


def verdict(times: Sequence[float], seed: int = 0, noise: float = NOISE) -> mi300x_fit.Verdict:
    rng = np.random.default_rng(seed)
    points = []
    for (cell, found), one in zip(reckoned(), times, strict=True):
        took = one * math.exp(rng.normal(0, noise))
        seconds = {"median": took, "quartiles": [took * 0.99, took * 1.01]}
        points.append(mi300x._point(cell, seconds, found))
    return mi300x_fit.fit(points, runtime_sensitivity.constants_known())


def with_changed(name: str, end: int, factor: float) -> list[float]:
    at = FACTORS.index(factor)
    return [
        found.changed[name][end][at] if name in found.changed else found.seconds[end]
        for _, found in reckoned()
    ]


@pytest.mark.parametrize(
    ("name", "end", "factor"),
    [
        ("clock", 0, 0.5),
        ("clock", 1, 2.0),
        ("clock_exponent", 1, 4.0),
        ("hbm_bytes", 0, 0.5),
        ("hbm_bytes", 1, 2.0),
        ("launch_seconds", 0, 4.0),
        ("lds_latency", 0, 4.0),
        ("transcendental", 0, 4.0),
        ("l2_latency", 0, 4.0),
    ],
)
def test_the_constant_that_was_changed_is_named(name: str, end: int, factor: float) -> None:
    found = verdict(with_changed(name, end, factor))
    assert found.named == name
    best, constant = found.found[0], runtime_sensitivity.constants_known()[name]
    assert best.value == pytest.approx(constant.ends[end] * factor, rel=0.25)
    assert best.rms < 2 * NOISE < found.rms
    assert best.beyond
    assert "The constant that explains this best is" in found.sentence
    assert mi300x_fit.WORDS[name] in found.sentence


@pytest.mark.parametrize("name", ["dispatch", "l2_bytes_of_die", "lds_queue"])
def test_what_changes_next_to_nothing_is_not_named(name: str) -> None:
    found = verdict(with_changed(name, 0, 4.0))
    assert (found.named, found.alike) == ("", ())
    assert "No constant is shown to be wrong" in found.sentence


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_noise_names_nothing(noise: float) -> None:
    for seed in range(20):
        between = (seed % 5) / 4
        times = [
            low ** (1 - between) * high**between for _, one in reckoned() for low, high in
            [one.seconds]
        ]  # fmt: skip
        found = verdict(times, seed, noise)
        assert (found.named, found.alike) == ("", ()), found.sentence


def test_what_no_single_constant_explains_is_said() -> None:
    times = [low * (4 if n % 2 else 1) for n, (_, one) in enumerate(reckoned())
             for low in one.seconds[:1]]  # fmt: skip
    found = verdict(times)
    assert found.named == ""
    assert "No single constant explains this" in found.sentence


def test_two_that_act_alike_are_both_listed() -> None:
    """Seen on cells that compute alone bounds, on full grids of one kernel, LDS's latency is not to
    be told from the clock's."""
    (cell, found), *_ = reckoned()
    alike = replace(
        found,
        changed={
            "barrier": found.changed["clock"],
            "clock": found.changed["clock"],
            "hbm_bytes": found.changed["hbm_bytes"],
        },
    )
    took = found.changed["clock"][0][0]
    seconds = {"median": took, "quartiles": [took * 0.99, took * 1.01]}
    points = [mi300x._point(cell, seconds, alike)] * 8
    answer = mi300x_fit.fit(points, runtime_sensitivity.constants_known())
    assert answer.named == ""
    assert {answer.found[0].constant, *answer.alike} == {"barrier", "clock"}
    assert "equally likely" in answer.sentence


def stand_in(monkeypatch: pytest.MonkeyPatch, took: Callable[[Cell, Reckoned], float]) -> None:
    """A device that needs ``took`` seconds for a cell."""
    cells = dict(reckoned())
    monkeypatch.setattr(mi300x, "why_not_here", lambda: None)
    # What it computes, once for all tests: each time takes 8 s.
    monkeypatch.setattr(mi300x, "reckon", lambda cell, table: cells[cell])
    monkeypatch.setitem(suites.SUITES, "mi300x", lambda gpu: list(cells))

    def measure(cell: Cell, *rest: Any) -> list[dict[str, Any]]:
        samples = [[took(cell, cells[cell]) * x for x in (0.99, 1.0, 1.01)]]
        return [runner._row(cell, cell.as_dict(), "pyfa", samples)]

    monkeypatch.setattr(runner, "_measure", measure)


def test_the_command_with_a_stand_in_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_in(monkeypatch, lambda cell, one: one.changed["hbm_bytes"][0][FACTORS.index(0.5)])
    path = tmp_path / "measured.json"
    assert cli.main(["bench", "mi300x", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "by the timing model (model, not measured)" in out
    assert "explains this best is the bandwidth of HBM: 2" in " ".join(out.split())
    data = bench.load(path)
    assert data["mi300x"]["verdict"]["named"] == "hbm_bytes"
    assert data["effort"]["seconds"] == 0.3
    for row in data["rows"]:
        low, high = row["model"]["seconds"]
        assert row["model"]["what"] == "model, not measured"
        assert row["seconds"]["median"] >= 0.99 * min(low, high)
        assert all(len(digest) == 64 for digest in row["model"]["kernels"].values())


def test_the_report_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    stand_in(monkeypatch, lambda cell, one: one.seconds[0])
    path = tmp_path / "measured.json"
    assert cli.main(["bench", "mi300x", "--out", str(path)]) == 0
    assert cli.main(["bench", "--report", str(tmp_path / "page"), "--from", str(path)]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "measured, and by the timing model (model, not measured)" in page
    assert "No constant is shown to be wrong" in page
    assert page.count("model, not measured") >= 3
    for cell, _ in reckoned():
        assert cell.name in page


def test_elsewhere_the_suite_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert mi300x.why_not_here() is not None
    assert cli.main(["bench", "mi300x"]) == 2
    assert "mi300x: it needs an MI300X" in capsys.readouterr().err


def test_a_missing_prediction_is_a_reason_and_not_a_figure() -> None:
    """Without the emulator, for code that nothing was saved for."""
    cell = next(cell for cell, _ in reckoned() if cell.head_dim == 64)
    records = [
        {**one, "digest": "0" * 64} for one in json.loads(mi300x.COSTS.read_text())["kernels"]
    ]
    rows = [{"suite": cell.suite, "cell": cell.name, "peer": "pyfa"}]
    said = mi300x.beside([cell], rows, runtime_sensitivity.Table(records, live=False))
    digest = next(iter(mi300x.reckon(cell, mi300x.saved()).kernels.values()))
    assert rows[0]["model"] == {
        "why_not": f"no prediction is saved for code object {digest[:12]} (those saved are of "
        "other code)"
    }
    assert said["verdict"] is None
    assert mi300x.table(rows)[0][2].startswith("no prediction is saved")


def test_saved_costs_are_those_of_the_emulator() -> None:
    """Of one kernel, as far as places in memory move results (1 %). That each is of the newest code
    is not asked here: benchmarks/mi300x_costs.py --check."""
    cell = next(cell for cell, _ in reckoned() if cell.head_dim == 64)
    found = mi300x.reckon(cell, mi300x.saved())
    live = mi300x.reckon(cell, runtime_sensitivity.Table([]))
    assert live.kernels == found.kernels
    assert live.seconds == pytest.approx(found.seconds, rel=0.01)
    for name, ends in live.changed.items():
        for mine, theirs in zip(ends, found.changed[name], strict=True):
            assert mine == pytest.approx(theirs, rel=0.02), name


def test_the_ends_are_those_of_the_timing_model() -> None:
    """What ``pyfa inspect --timing`` says of the problem."""
    cell = next(
        cell
        for cell, _ in reckoned()
        if cell.head_dim == 64 and not cell.causal and cell.seqlen_q == 16384
    )
    found = mi300x.reckon(cell, mi300x.saved())
    problem, plan = mi300x._problem_and_plan(cell)
    shape = mi300x.Shape(
        cell.batch, *(cell.seqlen_q,) * 2, *(cell.heads_q,) * 2, *(cell.head_dim,) * 2
    )
    backend: Any = mi300x.BACKENDS["hip"]
    kernels = backend.tiled_kernels(plan, problem, shape, False)
    model = mi300x.traffic_model(shape, problem.device, cell.dtype, kernels)
    (answer,) = runtime_timing.answers(plan, problem, shape, model)
    assert found.seconds == pytest.approx(answer.seconds, rel=0.01)
    assert found.utilization == pytest.approx(answer.utilization, rel=0.01)
