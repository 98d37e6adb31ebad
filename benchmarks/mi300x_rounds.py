"""The gain from splitting keys if the last round of workgroups is not full (model, not measured).

python benchmarks/mi300x_rounds.py        # writes results/mi300x_rounds.json

Models a forward without a mask, so all blocks take equal time. *Whole*: the keys of every block are
split into as many parts as the plan chooses. *Tail*: only the keys of the last round's blocks are
split, in the same launch; no kernel of pyfa does this. The time of merging is that of the bytes
that it moves. Times are means of the model's low and high ends.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import machine
import mi300x_own

from pyfa.backends.common import splits
from pyfa.backends.hip import runtime_timing
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import tiling
from pyfa.cli.problem import modeled
from pyfa.emulator.timing import constants, device

LENGTHS = (2048, 4096, 8192, 16384, 65536)
HEADS = (2, 3, 5, 8, 10, 16, 20, 24, 32, 40, 64, 128, 256)  # of all sequences
UNITS = 304


def rows_of(dim: int) -> list[dict[str, Any]]:
    """Every grid of up to 14 rounds whose last is not full."""
    explanation, model, _ = modeled(mi300x_own.options_of(f"{mi300x_own.LONG} --head-dim {dim}"))
    (plan,) = (one.plan for one in explanation.answers if one.backend == "hip")
    assert plan is not None
    ((tiled, one),) = tiling.pairs_of(TARGET, plan, explanation.problem, model.shape)
    kernel, block = runtime_timing.kernel(one), TARGET.block_of(one)
    assert kernel is not None
    found = []
    for length in LENGTHS:
        tiles = length / tiled.tiling.block_k
        for heads in HEADS:
            blocks, rows = -(-length // block.rows) * heads, length * heads
            if not blocks % UNITS or not 0.5 < blocks / UNITS < 14:
                continue

            def seconds(whole: int, split: int, parts: int, merged: int, n: int = length) -> float:
                tiles = n / tiled.tiling.block_k
                times = []
                for number, end in enumerate(constants.ends()):
                    cost = kernel.cost(number)
                    clocks = [cost.fixed + cost.tile * tiles] * whole
                    clocks += [cost.fixed + cost.tile * tiles / parts] * (split * parts)
                    count = whole + split * parts
                    matrix = cost.fixed_matrix * count
                    matrix += cost.matrix_of_tile * tiles * (whole + split)
                    launches = [device.Launch(clocks, matrix, kernel.resident)]
                    if merged:
                        moved = merged * dim * (8 * parts + 2)
                        launches.append(device.Launch([1.0], 1.0, 1, moved))
                    times.append(device.time(launches, end).seconds)
                return fmean(times)

            now = splits.within_a_round(blocks, length, UNITS, rows, block.costs)
            parts = splits.of_prefill(blocks, length, UNITS, rows, block.costs, block.rounds)
            before = seconds(0, blocks, now, rows if now > 1 else 0)
            after = seconds(0, blocks, parts, rows if parts > 1 else 0)
            tail = blocks % UNITS
            best = min(
                seconds(blocks - tail, tail, p, tail * block.rows)
                for p in range(2, 17)
                if p == 2 or length / p >= 256
            )
            found.append(
                {"dim": dim, "length": length, "heads": heads, "rounds": blocks / UNITS,
                 "tiles": tiles, "parts_before": now, "parts": parts, "seconds": after,
                 "whole": after / before - 1, "tail": best / before - 1}
            )  # fmt: skip
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [row for dim in (64, 128) for row in rows_of(dim)]
    for row in rows:
        grid = f"{row['dim']:4d} {row['length']:6d} {row['heads']:4d} heads"
        gain = f"{row['parts']} parts {row['whole']:+.1%}, tail alone {row['tail']:+.1%}"
        print(f"{grid} {row['rounds']:6.2f} rounds {gain}")
    print("wrote", machine.save("mi300x_rounds", {"what": "model, not measured", "grids": rows}))


if __name__ == "__main__":
    main()
