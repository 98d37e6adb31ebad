"""Apply the MI300X timing model to tiles in which a score_mod or mask_mod is computed.

``python benchmarks/mi300x_mods.py [--save]``: clocks in which a workgroup computes one tile, at
both ends of the model's range (model, not measured), in bfloat16 at head_dim 64 and 128: of the
forward, 64 keys; of the backward's pass that owns keys, and of the one that owns rows, 32 rows or
keys.

The mods: ``documents``, which compares a value of the row with one of the key, and hides a key in
each tile, so that none is full; ``window``, which loads nothing, and hides keys in the same way;
``alibi``, ``relative`` (a table) and ``softcap`` change the score. ``plain`` has none; a backward
of it is the general one of two passes. ``--save`` writes ``results/mi300x_mods.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import machine
import torch

from pyfa import mods
from pyfa._torch import Empty
from pyfa.backends.common.calls import PLAIN
from pyfa.backends.hip import code, forward, plans, samples
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime, program
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.lists import listed
from pyfa.backends.native.plans import modified
from pyfa.emulator.timing import constants, device, issue, report
from pyfa.plan import Plan
from pyfa.problem import Call, tensors_of

# What ``--save`` keeps of the file: results of kernels before a change, and of rejected variants.
KEPT = ("before", "before_reads_ahead", "tried")
_MOST = 1024  # rows and keys
_SHORT, _LONG = 256, 512  # rows or keys of the two runs, of which the slope is taken
_STREAMED = 32  # rows or keys of a tile of the backward
_OF_ROW = torch.ones(_MOST, dtype=torch.int32)
_OF_KEY = torch.arange(_MOST, dtype=torch.int32) % 32
_TABLE, _SLOPES = torch.zeros(1, 2 * _MOST), torch.zeros(1)
MODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"mask_mod": lambda b, h, i, j: _OF_ROW[i] != _OF_KEY[j]},
    "window": {"mask_mod": lambda b, h, i, j: ((i - j) & 31) != 3},
    "alibi": {"score_mod": lambda s, b, h, i, j: s + _SLOPES[h] * (j - i)},
    "relative": {"score_mod": lambda s, b, h, i, j: s + _TABLE[h, i - j + _MOST]},
    "softcap": {"score_mod": lambda s, b, h, i, j: 30 * torch.tanh(s / 30)},
}


def call_of(dim: int, mod: str, rows: int, keys: int) -> Call:
    """A call with one head of bfloat16 zeros, for which each of two passes has a plan."""
    given = MODS[mod].get("score_mod"), MODS[mod].get("mask_mod")
    digest, captured = mods.resolve(*given, torch.device("cpu"))
    half = {"HEAD_DIM": dim, "HEAD_DIM_V": dim, "DTYPE": 1}
    tensors = {f"captured{slot}": x for slot, x in enumerate(captured)}
    return samples._call(half, rows, keys)._replace(mods=digest, deterministic=True, **tensors)


def watched(kernel: str, run: Any) -> dict[Plan, tuple[Any, int]]:
    """By plan of ``kernel``: the counters of its launch in ``run``, with a trace of a workgroup."""
    found: dict[Plan, tuple[Any, int]] = {}

    class Watching(EmulatorRuntime):
        @property
        def empty(self) -> Empty:
            return samples.empty

        def run(self, step: Any, *rest: Any) -> None:
            super().run(step, *rest)
            if step.plan.kernel == kernel:
                plan = Plan("hip", step.plan.kernel, step.plan.constants)
                found[plan] = self.counters, step.threads

    run(Launcher(Watching((0,))))
    return found


def row_of(plan: Plan, runs: list[tuple[Any, int]], tile: int) -> dict[str, Any]:
    found = code.load(plan, plans.EMULATED)
    resident = device.resident(found.kernel, runs[0][1])
    decoded = program(found.data).code
    short, long = (issue.turns_of(decoded, one.traces, resident) for one, _ in runs)
    tiles = _SHORT / tile, _LONG / tile
    clocks = [
        round(report.estimate(short, long, tiles, end, resident).clocks_of_tile)
        for end in constants.ends()
    ]
    registers = found.kernel.vgprs
    return {"tile": tile, "clocks": clocks, "registers": registers, "workgroups_of_cu": resident}


def forward_plan(dim: int, score: int, paged: int = forward.UNPAGED) -> Plan:
    """The plan of most rows with this score class."""
    wanted = {"HEAD_DIM": dim, "HEAD_DIM_V": dim, "DTYPE": 1, "SCORE": score, "PAGED": paged}
    found = [
        plan
        for plan in catalog.all_plans(TARGET, plans.EMULATED)
        if plan.kernel == forward.KERNEL and wanted.items() <= dict(plan.constants).items()
    ]
    return max(found, key=lambda plan: dict(plan.constants)["WAVES"])


def forward_tile(plan: Plan, call_of: Callable[[int, int], Call]) -> dict[str, Any]:
    """Of ``plan`` with the call of so many rows and keys."""
    rows = dict(plan.constants)["WAVES"] * forward.ROWS

    def run(launch: Launcher, keys: int) -> None:
        call = call_of(rows, keys)
        native_forward.bind(launch, plan, call)(*tensors_of(call))

    runs = [watched(plan.kernel, lambda x, n=n: run(x, n)) for n in (_SHORT, _LONG)]
    ((made, first),), ((_, second),) = (one.items() for one in runs)
    return row_of(made, [first, second], dict(made.constants)["BLOCK_K"])


def forward_row(dim: int, mod: str) -> dict[str, Any]:
    plan = forward_plan(dim, PLAIN)
    if "score_mod" in MODS[mod]:
        plan = forward.with_score(plan, forward.SCORE_MOD)
    digest = call_of(dim, mod, 1, 1).mods
    if digest:
        plan = listed(modified(plan, digest))
    return forward_tile(plan, lambda rows, keys: call_of(dim, mod, rows, keys))


def backward_rows(dim: int, mod: str) -> dict[str, dict[str, Any]]:
    """By what a pass owns."""
    found = {}
    for owned in ("keys", "rows"):
        size = {64: 256, 128: 128}[dim]
        runs = []
        for length in (_SHORT, _LONG):
            sizes = (length, size) if owned == "keys" else (size, length)
            call = call_of(dim, mod, *sizes)
            if mod == "plain":
                call = call._replace(softcap=30.0)
            runs.append(
                watched("hip/attn_bwd.hip", lambda x, call=call: samples._run_backward(x, call))
            )
        for plan, first in runs[0].items():
            if dict(plan.constants)["OWNS"] == (0 if owned == "keys" else 1):
                found[owned] = row_of(plan, [first, runs[1][plan]], _STREAMED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = []
    for dim in (64, 128):
        for mod in MODS:
            row = {"head_dim": dim, "mod": mod, "forward": forward_row(dim, mod)}
            row |= {f"backward, owns {owned}": x for owned, x in backward_rows(dim, mod).items()}
            rows.append(row)
            print(row, flush=True)
    if options.save:
        results = {"what": "model, not measured", "rows": rows}
        saved = machine.RESULTS / "mi300x_mods.json"
        if saved.exists():  # of kernels before a change, and of variants
            kept = json.loads(saved.read_text())
            results |= {name: kept[name] for name in KEPT if name in kept}
        print(machine.save("mi300x_mods", results))


if __name__ == "__main__":
    main()
