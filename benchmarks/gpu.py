"""Run all measurements on a GPU with one command, and write them to results/*.json.

    python benchmarks/gpu.py [NAME …] [--tag h200]

In order: every suite of `pyfa bench`, naive against pyfa, 262,144 tokens, DRAM bytes by ncu, the
figures of the documents, the report. What fails is said in the end, with status 1, and stops
nothing else. With names only these parts run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from machine import RESULTS

from pyfa import bench

HERE = Path(__file__).parent
REPORT = HERE.parent / "build" / "report"


def parts(tag: str) -> dict[str, list[str]]:
    """Commands by name."""
    python, pyfa = [sys.executable], [sys.executable, "-m", "pyfa"]
    found = {
        suite: [*pyfa, "bench", suite, "--out", str(RESULTS / f"bench_{suite}_{tag}.json")]
        for suite in bench.SUITES
    }
    for script in ("naive_vs_pyfa", "long_context", "hbm_traffic"):
        found[script] = [*python, str(HERE / f"{script}.py"), "--save"]
    found["report"] = [*pyfa, "bench", "--report", str(REPORT), "--from", str(RESULTS)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tag", default="h200", help="in the names of the suites' files")
    options = parser.parse_args()
    known = parts(options.tag)
    for name in options.names:
        if name not in known:
            parser.error(f"expected some of {', '.join(known)}; got {name}")
    failed = []
    for name in options.names or known:
        begin = time.perf_counter()
        print(f"== {name}", flush=True)
        status = subprocess.run(known[name], check=False).returncode
        print(f"== {name}: status {status}, {time.perf_counter() - begin:.0f} s", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
