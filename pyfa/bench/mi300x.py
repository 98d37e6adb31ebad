"""Compares the timing model of an MI300X with measurements on an MI300X.

In the results, every figure under the key ``model`` is modeled, not measured. The costs of a kernel
are looked up in ``mi300x_costs.json`` by the digest of the code object that runs, so that nothing
is emulated during measurements. If a code object is not in this file and the emulator is installed,
the emulator computes its costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import pyfa

from .. import device as devices
from ..backends import BACKENDS
from ..backends.base import Tiled
from ..backends.hip import runtime_sensitivity, runtime_timing
from ..backends.hip.runtime_sensitivity import (
    NoCostsError,
    Reckoned,
    Table,
    constants_known,
)
from ..errors import CodeObjectError, CompileError
from ..traffic import Shape
from ..traffic import model as traffic_model
from . import mi300x_fit
from .suites import Cell

WORDS = "model, not measured"
DEVICE = "MI300X"
COSTS = Path(__file__).with_name("mi300x_costs.json")
LEFT_OUT = (
    "The model leaves out the kernels combine, row_sums and dq_convert; the measured times include "
    "them."
)


def why_not_here() -> str | None:
    """Return why the suite does not run on this machine, or None if the machine has a whole
    (unpartitioned) MI300X."""
    if not torch.cuda.is_available():
        return "it needs an MI300X, and there is no GPU"
    here = devices.of(torch.device("cuda", 0))
    whole = devices.DEVICES[DEVICE]
    if (here.arch, here.units) != (whole.arch, whole.units):
        return f"the model is of an MI300X with {whole.units} CUs; this is {here.name or here.arch}"
    return None


def saved(live: bool | None = None) -> Table:
    """Return the saved costs. ``live``: whether to compute the costs of code objects that are not
    saved. By default this is so if the emulator is installed."""
    records = json.loads(COSTS.read_text())["kernels"] if COSTS.exists() else []
    if live is None:
        live = runtime_timing.why_unavailable() is None
    return Table(records, live)


def reckon(cell: Cell, table: Table) -> Reckoned:
    """Return the time in seconds that the model predicts for a cell. Raises NoCostsError with the
    reason if the model cannot predict it."""
    if cell.lengths or cell.layers or cell.window >= 0 or cell.passes == "both":
        raise NoCostsError(
            "the model supports dense attention without a window, one pass at a time"
        )
    if cell.fp8 in ("quantize", "rotate", "copy") or cell.timed == "host":
        raise NoCostsError("the model covers only attention kernels")
    problem, plan = _problem_and_plan(cell)
    causal = cell.causal and cell.seqlen_q > 1
    dtype = "float8_e4m3fnuz" if cell.fp8 == "inputs" else cell.dtype
    shape = Shape(
        cell.batch, cell.seqlen_q, cell.seqlen_k, cell.heads_q, cell.heads_k, cell.head_dim,
        cell.dim_v, -1, 0 if causal else -1, 1 if cell.fp8 else 2,
    )  # fmt: skip
    backend = BACKENDS["hip"]
    assert isinstance(backend, Tiled)
    kernels = backend.tiled_kernels(plan, problem, shape, False)
    known = traffic_model(shape, devices.DEVICES[DEVICE], dtype, kernels)
    return runtime_sensitivity.reckon(plan, problem, shape, known, cell.passes, table.find)


def _problem_and_plan(cell: Cell) -> tuple[Any, Any]:
    """Return problem and plan as ``peers`` calls pyfa, on an MI300X."""
    wide = getattr(torch, "float8_e4m3fnuz" if cell.fp8 == "inputs" else cell.dtype)
    narrow = torch.float8_e4m3fnuz if cell.fp8 else wide

    def tensor(length: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.empty(cell.batch, length, heads, dim, dtype=dtype, device="meta")
        return x.requires_grad_() if cell.grad else x

    q = tensor(cell.seqlen_q, cell.heads_q, cell.head_dim, wide)
    k = tensor(cell.seqlen_k, cell.heads_k, cell.head_dim, narrow)
    v = tensor(cell.seqlen_k, cell.heads_k, cell.dim_v, narrow)
    same: dict[str, Any] = {"causal": cell.causal}
    if cell.deterministic:
        same["deterministic"] = True
    if cell.fp8:
        scale = torch.empty(cell.batch, cell.heads_k, device="meta")
        same["descale"] = (scale if cell.fp8 == "inputs" else None, scale, scale)
    if cell.cache:
        same["cache_seqlens"] = None
    answer = pyfa.explain(q, k, v, device=DEVICE, backend="hip", **same)
    for one in answer.answers:
        if one.backend == "hip" and one.plan is not None:
            return answer.problem, one.plan
        if one.backend == "hip":
            raise NoCostsError(f"hip refuses it: {'; '.join(map(str, one.reasons))}")
    raise NoCostsError("hip is not among the backends")


Progress = Callable[[int, int, str], None]


def beside(
    cells: Iterable[Cell],
    rows: Iterable[dict[str, Any]],
    table: Table | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Add the model's figures to pyfa's ``rows``, under ``model``. Return the constant of the model
    that best explains the difference from the measurements, as plain data for a result file."""
    table = table or saved()
    by_name = {(cell.suite, cell.name): cell for cell in cells}
    mine = [row for row in rows if row["peer"] == "pyfa"]
    points: list[mi300x_fit.Point] = []
    for done, row in enumerate(mine):
        if on_progress is not None:
            on_progress(done, len(mine), f"{WORDS}: {row['cell']}")
        cell = by_name[row["suite"], row["cell"]]
        try:
            found = reckon(cell, table)
        except (NoCostsError, CompileError, CodeObjectError) as error:
            row["model"] = {"why_not": str(error).splitlines()[0]}
            continue
        row["model"] = _figures(cell, found, table)
        if "seconds" in row:
            points.append(_point(cell, row["seconds"], found))
    verdict = (
        mi300x_fit.fit(points, constants_known()) if len(points) >= mi300x_fit.FEWEST else None
    )
    return {
        "what": WORDS,
        "left_out": LEFT_OUT,
        "verdict": verdict.as_dict() if verdict else None,
        "sentence": verdict.sentence
        if verdict
        else f"{len(points)} cells have a time and a prediction; a verdict needs "
        f"{mi300x_fit.FEWEST}.",
    }


def _figures(cell: Cell, found: Reckoned, table: Table) -> dict[str, Any]:
    here = sorted(table.made_here & set(found.kernels.values()))
    return {
        "what": WORDS,
        "seconds": list(found.seconds),
        "value": [float(f"{cell.value(one):.4g}") for one in found.seconds],
        "utilization": [round(one, 4) for one in found.utilization],
        "bound": list(found.bound),
        "kernels": dict(found.kernels),
        "costs": "made here" if here else "saved",
    }


def _point(cell: Cell, seconds: Mapping[str, Any], found: Reckoned) -> mi300x_fit.Point:
    low, high = seconds["quartiles"]
    spread = (high - low) / 2 / seconds["median"]
    if cell.passes != "forward":
        error = mi300x_fit.BACKWARD
    else:
        error = mi300x_fit.MEMORY if cell.cache else mi300x_fit.FORWARD
    return mi300x_fit.Point(
        cell.name, seconds["median"], (error**2 + spread**2) ** 0.5, found.seconds, found.changed
    )


HEAD = (
    "", "measured", f"low ({WORDS})", "high", "unit", "measured/model", "MFMA busy", "bound by",
)  # fmt: skip


def table(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line with the columns HEAD for each row that has a model figure. ``measured/model``
    is the measured time divided by the nearest end of the model's range, or 1 inside the range."""
    found = []
    for row in rows:
        model = row.get("model")
        if model is None:
            continue
        measured = f"{row['value']:.4g}" if "value" in row else "–"
        if "why_not" in model:
            found.append([row["cell"], measured, model["why_not"], "", "", "", "", ""])
            continue
        low, high = sorted(model["value"])
        ratio = "–"
        if "seconds" in row:
            least, most = sorted(model["seconds"])
            took = row["seconds"]["median"]
            ratio = f"{took / min(max(took, least), most):.2f}"
        busy = " to ".join(f"{x:.2f}" for x in sorted(model["utilization"]))
        by = " or ".join(dict.fromkeys(model["bound"]))
        unit = row.get("unit", "")
        found.append([row["cell"], measured, f"{low:.4g}", f"{high:.4g}", unit, ratio, busy, by])
    return found
