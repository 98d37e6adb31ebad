"""Measure the emulator's speed on one core: millions of wavefront instructions per second.

    python benchmarks/emulator.py [--repeat 3] [--save]

The kernels are the HIP ones of ``tests/emulator``: an attention (MFMA, LDS, barriers) and a
reduction (vector and memory instructions), with the default checks and with none but bounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import machine as results
import numpy as np

from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import Checks, Machine, load, pack_arguments

SOURCE = Path(__file__).parents[1] / "tests" / "emulator" / "kernels.hip"


def main() -> None:
    """Prints a row per kernel and set of checks: the best of ``--repeat`` runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/emulator.json")
    options = parser.parse_args()
    repeat: int = options.repeat
    figures = []
    program = load(compile_hip(SOURCE.read_text(), arch="gfx942", options=()))
    rng = np.random.default_rng(0)
    length, n = 1024, 65536
    q, k, v = rng.standard_normal((3, length, 64)).astype(np.float16)
    out, rows, sums = (
        np.zeros((length, 64), np.float32),
        np.ones((64, n), np.float32),
        np.zeros(64, "f"),
    )
    jobs = {
        "attention": ((length // 64,), [q, k, v, out, length, 0.18]),
        "reduce": ((64,), [rows, sums, n]),
    }
    print(f"{'kernel':<12}{'checks':<10}{'instructions':>14}{'seconds':>10}{'M/s':>8}")
    for name, (grid, arguments) in jobs.items():
        for label, checks in (("default", Checks()), ("bounds", Checks.off())):
            machine = Machine(checks=checks)
            kernel = program.kernel(name)
            values = [
                machine.map_array(a, f"argument {i}") if isinstance(a, np.ndarray) else a
                for i, a in enumerate(arguments)
            ]
            packed = pack_arguments(kernel.kernel, values)
            best, total = float("inf"), 0
            for _ in range(repeat):
                start = time.perf_counter()
                total = machine.launch(kernel, grid=grid, block=(256,), kernarg=packed).total
                best = min(best, time.perf_counter() - start)
            speed = total / best / 1e6
            print(f"{name:<12}{label:<10}{total:>14}{best:>10.3f}{speed:>8.2f}")
            figures.append(
                {"kernel": name, "checks": label, "instructions": total, "M_per_s": round(speed, 2)}
            )
    if options.save:
        print(results.save("emulator", {"repeat": repeat, "runs": figures}))


if __name__ == "__main__":
    main()
