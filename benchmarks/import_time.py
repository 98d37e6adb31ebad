"""Time what ``import pyfa`` adds to ``import torch``, each time in a new process.

``python benchmarks/import_time.py [--save]``. The median of the rounds, in ms; the first round only
warms the disk's cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import machine

_ROUNDS = 15
_GOAL = 60.0
_CODE = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import pyfa
print(middle - begin, time.perf_counter() - middle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--save", action="store_true", help="write results/import_time.json")
    options = parser.parse_args()
    rounds = [_once() for _ in range(options.rounds + 1)][1:]
    figures = {}
    for name, column in (("torch", 0), ("pyfa after torch", 1)):
        low, middle, high = (
            x * 1e3 for x in statistics.quantiles([each[column] for each in rounds], n=4)
        )
        figures[name] = {
            "median_ms": round(middle, 1),
            "quartiles_ms": [round(low, 1), round(high, 1)],
        }
        print(f"import {name:<17} {middle:7.1f} ms  ({low:.1f} … {high:.1f})")
    print(f"goal: pyfa after torch at most {_GOAL} ms")
    if options.save:
        results = {"goal_ms": _GOAL, "rounds": options.rounds, "imports": figures}
        print(machine.save("import_time", results))


def _once() -> list[float]:
    ended = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    ended.check_returncode()
    return [float(part) for part in ended.stdout.split()]


if __name__ == "__main__":
    main()
