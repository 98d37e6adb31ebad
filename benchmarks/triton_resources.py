"""Compile every Triton plan for every arch, without a GPU: registers, spills, shared memory.

    python benchmarks/triton_resources.py [--arch gfx942,sm_90a] [--only forward] [--json FILE]

Exit code 1 where a kernel does not compile, asks for more shared memory than a block may have, or
a forward kernel for gfx942 spills.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pyfa import bench
from pyfa.backends.triton import resources


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(resources.ARCH_NAMES))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    rows, bad = [], 0
    print(f"{'arch':8} {'kernel':34} {'registers':>9} {'spill B':>8} {'shared':>8} {'limit':>8}")
    for arch in arguments.arch.split(","):
        for name, spec in resources.specs_of(arch):
            if arguments.only not in name:
                continue
            begin = time.perf_counter()
            try:
                found = resources.measure(spec, arch)
            except Exception as error:
                print(f"{arch:8} {name:34} {str(error).splitlines()[0][:80]}", flush=True)
                bad += 1
                continue
            flags = []
            if found.block_limit and found.shared_bytes > found.block_limit:
                flags.append("too much shared memory")
            if arch == "gfx942" and "forward" in name and found.spill_bytes:
                flags.append("spills")
            bad += len(flags)
            print(
                f"{arch:8} {name:34} {found.registers:9} {found.spill_bytes:8}"
                f" {found.shared_bytes:8} {found.block_limit:8}  {', '.join(flags)}",
                flush=True,
            )
            seconds = round(time.perf_counter() - begin, 2)
            rows.append({"arch": arch, "kernel": name, **found._asdict(), "seconds": seconds})
    if arguments.json:
        Path(arguments.json).write_text(bench.to_text(rows) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
