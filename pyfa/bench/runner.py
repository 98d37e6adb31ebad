"""Runs suites: every peer at every cell, in rounds in which the peers take turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pyfa

from . import machine, mi300x
from .peers import Peer, chosen
from .ready import Ready
from .suites import BY_NAME_ALONE, MI300X, SUITES, Cell
from .timing import Clock

OnProgress = Callable[[int, int, str], None]
# Takes the rows of the cell that was just measured, and the results so far.
OnCell = Callable[[list[dict[str, Any]], dict[str, Any]], None]


@dataclass(frozen=True)
class Effort:
    """The length of a measurement. ``rounds``: the number of rounds. In each round all peers take
    turns, so load and clock rates affect all of them alike. ``seconds``: for how long each peer is
    sampled in a round."""

    rounds: int = 3
    seconds: float = 0.03
    warm_up: int = 3


def run(
    suites: Sequence[str] | None = None,
    wanted: list[str] | None = None,
    effort: Effort | None = None,
    on_progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Run ``suites`` on this machine's GPU, or on its CPU if there is none. By default these are
    all suites except those in ``BY_NAME_ALONE``. After ``limit`` seconds the run stops at the end
    of the current cell, which is one problem of a suite.

    Returns plain data: the libraries that ran, why others did not, clock rates before and after,
    and a row for every cell and library. A row has the median and quartiles of the measured
    seconds, or the reason why there are none. If some cells were not measured yet, ``missing``
    names them. On an MI300X pyfa's rows also have the timing model's figures (``mi300x.beside``).
    """
    for name in suites or ():
        if name not in SUITES:
            raise ValueError(f"suite: expected one of {', '.join(SUITES)}; got {name!r}")
    names = list(suites or (name for name in SUITES if name not in BY_NAME_ALONE))
    no_model = mi300x.why_not_here()
    held_to_model = MI300X in names
    if held_to_model:
        if no_model:
            raise ValueError(f"{MI300X}: {no_model}")
        # The clocks that the model has are those of work that lasts.
        effort = effort or Effort(seconds=0.3)
        wanted = wanted or []
    effort = effort or Effort()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    taking_part, absent = chosen(wanted, device.type)
    cells = [cell for name in names for cell in SUITES[name](device.type == "cuda")]
    clock = Clock(device)
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {
        "suites": names,
        "device": device.type,
        "backend": _backend(device, "hip" if held_to_model else None),
        "effort": asdict(effort),
        "peers": {peer.name: peer.meaning for peer in taking_part},
        "absent": absent,
        "clocks": {"before": machine.gpu_state()},
        "rows": rows,
        "missing": [f"{cell.suite} {cell.name}" for cell in cells],
    }
    for done, cell in enumerate(cells, 1):
        if on_progress is not None:
            on_progress(done - 1, len(cells), f"{cell.suite} {cell.name}")
        with pyfa.use_backend("hip") if held_to_model else nullcontext():
            measured = _measure(cell, taking_part, clock, effort)
        rows += measured
        results["clocks"]["after"] = machine.gpu_state()
        results["missing"].pop(0)
        if on_cell is not None:
            on_cell(measured, results)
        if limit is not None and time.monotonic() - begin >= limit:
            break
    if not results["missing"]:
        del results["missing"]
    if not no_model:
        results["mi300x"] = mi300x.beside(cells, rows, on_progress=on_progress)
    return results


def _backend(device: torch.device, named: str | None) -> str | None:
    """Return the backend that pyfa chooses here for plain attention in bfloat16; a cell may use
    another."""
    x = torch.zeros(1, 128, 8, 64, dtype=torch.bfloat16, device=device)
    return pyfa.explain(x, x, x, causal=True, backend=named).chosen


def _measure(
    cell: Cell, taking_part: Iterable[Peer], clock: Clock, effort: Effort
) -> list[dict[str, Any]]:
    """Return a row for each peer at one cell."""
    timers: dict[str, tuple[Ready, Callable[[float], list[float]]]] = {}
    failed = {}
    for peer in taking_part:
        try:
            ready = peer.ready(cell, clock.device)
            with ready.within():
                call = _call(cell, ready)
                for _ in range(effort.warm_up):
                    call()
                clock.wait()
                timers[peer.name] = (ready, clock.timer(cell.timed, call))
        except Exception as error:  # a peer's failure becomes its row
            failed[peer.name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    rounds: dict[str, list[list[float]]] = {name: [] for name in timers}
    for _ in range(effort.rounds):
        for name, (ready, timer) in timers.items():
            with ready.within():
                rounds[name].append(timer(effort.seconds))
    problem = cell.as_dict()
    rows = [_row(cell, problem, name, samples) for name, samples in rounds.items()]
    rows += [
        {"suite": cell.suite, "cell": cell.name, "peer": name, "problem": problem, "why_not": why}
        for name, why in failed.items()
    ]
    timers.clear()
    gc.collect()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _call(cell: Cell, ready: Ready) -> Callable[[], object]:
    """Return the function to be timed."""
    if ready.step is not None:
        return ready.step
    forward, leaves, dout = ready.forward, ready.leaves, ready.dout
    if cell.passes == "forward":
        return forward
    if cell.passes == "both":
        return lambda: torch.autograd.grad(forward(), leaves, dout)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _row(
    cell: Cell, problem: dict[str, Any], peer: str, rounds: list[list[float]]
) -> dict[str, Any]:
    samples = [sample for one in rounds for sample in one]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "suite": cell.suite,
        "cell": cell.name,
        "peer": peer,
        "problem": problem,
        "seconds": {"median": median, "quartiles": [low, high]},
        "round_medians": [statistics.median(one) for one in rounds],
        "samples": len(samples),
        "value": float(f"{cell.value(median):.4g}"),
        "unit": cell.unit,
    }
