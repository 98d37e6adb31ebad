"""``pyfa bench`` on a CPU: who takes part, what is written, what counts as slower."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyfa import bench, cli
from pyfa.backends.torch.backend import TorchBackend
from pyfa.bench import peers, runner, suites, timing
from pyfa.cli import bench as command

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

QUICK = bench.Effort(rounds=2, seconds=0.0, warm_up=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Effort", lambda: QUICK)
    monkeypatch.setattr(timing, "_FLUSHED", {"cpu": 1 << 16})
    monkeypatch.setattr(timing, "_HOST_CALLS", 3)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of ``pyfa bench``."""
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_every_suite_ends_well_with_all_peers(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--json")
    assert status == 0
    report = json.loads(out)
    everywhere = [name for name in bench.SUITES if name not in suites.BY_NAME_ALONE]
    assert report["suites"] == everywhere
    assert list(report["peers"]) == ["pyfa", "sdpa", "naive"]
    assert report["absent"]["flash"] == "it needs a GPU"
    measured = {(row["suite"], row["peer"]) for row in report["rows"] if row.get("value", 0) > 0}
    # Nobody else quantizes.
    assert len(measured) == 3 * (len(everywhere) - 1) + 1


def test_results_say_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json"
    status, out, _ = call(capsys, "small", "--peers", "naive", "--out", str(path))
    assert status == 0
    assert "pyfa's speed / theirs, mean" in out
    data = bench.load(path)
    assert data["schema"] == bench.SCHEMA
    assert {"cpu", "gpu", "torch", "triton", "commit", "date"} <= set(data["environment"])
    assert set(data["clocks"]) == {"before", "after"}
    assert len(data["rows"]) == 2 * len(suites.SUITES["small"](False))
    for row in data["rows"]:
        low, high = row["seconds"]["quartiles"]
        assert low <= row["seconds"]["median"] <= high
        assert row["samples"] == len(row["round_medians"]) * 3
        assert row["problem"]["seqlen_q"] > 0


def test_a_run_that_is_cut_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json"
    names = [f"small {cell.name}" for cell in suites.SUITES["small"](False)]
    measure = runner._measure

    def cut(cell: suites.Cell, *rest: Any) -> list[dict[str, Any]]:
        if f"small {cell.name}" == names[2]:
            raise KeyboardInterrupt
        return measure(cell, *rest)

    monkeypatch.setattr(runner, "_measure", cut)
    status, _, err = call(capsys, "small", "--peers", "naive", "--out", str(path))
    assert status == 130
    data = bench.load(path)
    assert [f"small {row['cell']}" for row in data["rows"]] == [*names[:1] * 2, *names[1:2] * 2]
    assert data["missing"] == names[2:]
    assert [child.name for child in tmp_path.iterdir()] == ["small.json"]
    for name in names[:2]:
        assert f"bench: {name}: pyfa " in err


def test_a_limit_stops_at_the_end_of_a_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"small {cell.name}" for cell in suites.SUITES["small"](False)]
    arguments = ("small", "--peers", "pyfa", "--out", str(tmp_path / "x.json"), "--limit")
    status, out, _ = call(capsys, *arguments, "0")
    assert status == 0
    assert f"stopped by --limit, {len(names) - 1} cases are missing:" in out
    assert all(f"  {name}\n" in out for name in names[1:])
    assert bench.load(tmp_path / "x.json")["missing"] == names[1:]
    status, out, _ = call(capsys, *arguments, "1000")
    assert (status, "missing" in out) == (0, False)
    assert "missing" not in bench.load(tmp_path / "x.json")


@pytest.mark.parametrize("link", [True, False])
def test_a_result_file_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    target = tmp_path / "target.json"
    path = tmp_path / "link.json" if link else target
    bench.write(target, {"rows": [1]})
    if link:
        path.symlink_to(target)
    bench.write(path, {"rows": [2]})
    assert bench.load(target)["rows"] == [2]
    assert path.is_symlink() == link
    write_text = Path.write_text

    def full(self: Path, text: str) -> int:
        write_text(self, text[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        bench.write(path, {"rows": [3]})
    assert bench.load(target)["rows"] == [2]


def test_peers_compute_the_same() -> None:
    """What is compared is the same function: each peer's output of each suite, to float32."""
    cells = [suites.SUITES[name](False)[0] for name in ("forward", "decode", "small")]
    for cell in cells:
        results = []
        for name in ("pyfa", "sdpa", "naive", "pyfa:torch"):
            (peer,) = [p for p in peers.chosen([name], "cpu")[0] if p.name == name]
            out = peer.prepare(cell, torch.device("cpu")).forward()
            rows_first = name.startswith("pyfa")
            results.append(out if rows_first else out.transpose(1, 2))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)


def test_a_peer_that_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(cell: suites.Cell, device: torch.device) -> peers.Ready:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setitem(peers.PEERS, "sdpa", peers.PEERS["sdpa"]._replace(prepare=fails))
    status, out, _ = call(capsys, "small", "--peers", "sdpa")
    assert status == 0
    assert "–: no kernel for this (sdpa)" in out


@pytest.mark.night
def test_a_planted_slowdown_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nothing_bound: Callable[[], None],
) -> None:
    before = str(tmp_path / "before.json")
    assert call(capsys, "small", "--peers", "pyfa", "--out", before)[0] == 0
    bind = TorchBackend.bind

    def slower(self: TorchBackend, *arguments: Any) -> Any:
        run = bind(self, *arguments)

        def after_a_while(*tensors: Any) -> Any:
            time.sleep(0.3)  # far beyond the noise of a busy machine
            return run(*tensors)

        return after_a_while

    monkeypatch.setattr(TorchBackend, "bind", slower)
    nothing_bound()
    status, out, _ = call(capsys, "small", "--peers", "pyfa", "--against", before)
    assert status == 1
    assert "SLOWER" in out
    status, out, _ = call(capsys, "small", "--peers", "pyfa", "--against", before, "--json")
    assert status == 1
    assert all(change["slower"] for change in json.loads(out)["against"]["changes"])


def results(pyfa: float, other: float = 1.0, spread: float = 0.01) -> dict[str, Any]:
    """One cell's results."""

    def row(peer: str, median: float) -> dict[str, Any]:
        quartiles = [median * (1 - spread), median * (1 + spread)]
        seconds = {"median": median, "quartiles": quartiles}
        return {"suite": "small", "cell": "one", "peer": peer, "seconds": seconds}

    return {"suites": ["small"], "rows": [row("pyfa", pyfa), row("flash", other)]}


def test_slower_is_beyond_the_spread_and_beyond_the_machines_own_change() -> None:
    def slower(earlier: dict[str, Any], now: dict[str, Any]) -> bool:
        return bool(bench.compare(earlier, now).slower)

    assert slower(results(1.0), results(1.2))
    assert not slower(results(1.2), results(1.0))
    assert not slower(results(1.0), results(1.03))
    assert not slower(results(1.0, spread=0.2), results(1.2, spread=0.2))
    # Everything takes 1.5 times as long: the machine, not pyfa.
    assert not slower(results(1.0), results(1.5, other=1.5))
    assert slower(results(1.0), results(1.0, other=0.7))


def test_what_is_no_longer_measured_is_said() -> None:
    earlier = results(1.0)
    gone = copy.deepcopy(earlier["rows"][0]) | {"cell": "two"}
    earlier["rows"].append(gone)
    assert bench.compare(earlier, results(1.0)).missing == ("small two pyfa",)
    with pytest.raises(ValueError, match="no cell of pyfa in common"):
        bench.compare({"rows": [gone]}, results(1.0))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["fast"],
            "SUITE: expected one of forward, backward, decode, small, varlen, window, gqa, "
            "layers, wide, fp8, fp8_decode, quantize, host, model, mi300x; got 'fast'",
        ),
        (["small", "--peers", "flush"], "--peers: expected pyfa, sdpa, flash, "),
        (["small", "--peers", "pyfa:vulkan"], "got 'pyfa:vulkan'"),
        (["small", "--peers", "flash"], "flash cannot run here: it needs a GPU"),
        (["small", "--peers", "pyfa:cuda"], "pyfa:cuda cannot run here: this PyTorch is not"),
        (["small", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["small", "--against", "/nowhere/x.json"], "No such file"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}', '{"schema": 1, "rows": 3}'])
def test_against_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    status, _, err = call(capsys, "small", "--peers", "pyfa", "--against", str(path))
    assert status == 2
    assert "expected" in err or "no rows" in err


def test_the_names_are_those_of_the_suites() -> None:
    assert tuple(bench.SUITES) == command._SUITES
    for build in bench.SUITES.values():
        for gpu in (True, False):
            cells = build(gpu)
            assert len({cell.name for cell in cells}) == len(cells)


def test_the_matrix_is_as_long_as_flash_attentions() -> None:
    cells = [*bench.SUITES["forward"](True), *bench.SUITES["backward"](True)]
    assert len(cells) == 36
    assert {cell.batch * cell.seqlen_q for cell in cells} == {16384}
    assert {cell.heads_q * cell.head_dim for cell in cells} == {2048}


def test_the_packages_own_results_can_be_read() -> None:
    files = list(RESULTS.glob("*.json"))
    assert files
    for path in files:
        assert bench.load(path)["environment"]["date"]


def test_a_traceback_in_results_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    bench.write(tmp_path / "x.json", {"message": f'File "{bench.__file__}", line 1'})
    message = json.loads((tmp_path / "x.json").read_text())["message"]
    assert message == f'File "{Path("pyfa", "bench", "__init__.py")}", line 1'


def test_result_files_have_one_record_a_line() -> None:
    rows = [{"cell": f"{i} " + 300 * "x", "seconds": {"median": i / 7, "rest": [i, None]}}
            for i in range(3)]  # fmt: skip
    data = {"schema": 1, "rows": rows, "curve": [i / 3 for i in range(100)], "none": [], "x": {}}
    text = bench.to_text(data)
    assert json.loads(text) == data
    assert [json.loads(line.rstrip(",")) for line in text.splitlines() if '"cell"' in line] == rows
    assert len(text.splitlines()) == 2 + 4 + 5
    nested = {"tools": [{"name": "y" * 300, "cases": [[1, "z" * 300], [2, "z" * 300]]}]}
    assert json.loads(bench.to_text(nested)) == nested
    assert sum("zzz" in line for line in bench.to_text(nested).splitlines()) == 2
    for path in RESULTS.glob("*.json"):
        text = path.read_text()
        assert bench.to_text(json.loads(text)) + "\n" == text, path.name


class _Machine:
    """A host that launches work, and a GPU that runs it in order, with clocks of their own."""

    FLUSH = 128e-6

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def launch(self, host: float, gpu: float) -> None:
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def event(self) -> Any:
        machine = self

        class Event:
            def record(self) -> None:
                machine.launch(2e-6, 0.0)
                self.at = machine.gpu

            def synchronize(self) -> None:
                machine.host = max(machine.host, self.at)

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        return Event()

    def zero_(self) -> None:
        self.launch(5e-6, self.FLUSH)


@pytest.mark.parametrize("host", [20e-6, 60e-6, 150e-6, 600e-6])
@pytest.mark.parametrize("timed", ["device", "replay"])
def test_samples_of_a_gpu_are_without_the_hosts_time(
    monkeypatch: pytest.MonkeyPatch, host: float, timed: str
) -> None:
    """A kernel of 40 µs behind launches that take longer, and with every other launch half as long
    again."""
    simulated, calls, kernel = _Machine(), 0, 40e-6
    clock = timing.Clock(torch.device("cpu"))
    clock.device = torch.device("cuda")
    monkeypatch.setattr(timing.time, "perf_counter", lambda: simulated.host)
    monkeypatch.setattr(clock, "_buffer", simulated)
    monkeypatch.setattr(clock, "_event", simulated.event)
    monkeypatch.setattr(clock, "_captured", lambda call: None)
    monkeypatch.setattr(
        clock, "wait", lambda: setattr(simulated, "host", max(simulated.host, simulated.gpu))
    )
    clock._flush = clock._seconds_of_a_flush()
    assert clock._flush == pytest.approx(_Machine.FLUSH)

    def call() -> None:
        nonlocal calls
        calls += 1
        simulated.launch(host * (1.0 + 0.5 * (calls % 2)), kernel)

    samples = clock.timer(timed, call)(0.03)
    assert len(samples) >= 30
    assert samples == pytest.approx([kernel] * len(samples))
