"""Compute Sanitizer over conformance cases of the cuda backend: memcheck, initcheck, racecheck.

``python benchmarks/sanitize.py [--cases 72] [--tools memcheck,…] [--save]``. Without PyTorch's
caching allocator, so that every tensor is an allocation of its own, and with the cases' own guard
zones around their tensors. Cases are those of the full level with at most 300 rows and keys, drawn
by hash. What a tool reports counts where it names one of pyfa's kernels; anything else that it says
is listed.

Racecheck takes for races what barriers of a part of a block's warps order (backward's, by which one
warp hands its P to another: bar.arrive and bar.sync of 64 threads). So it runs twice: on the
kernels as they are, and with these barriers made those of the whole block, where every warp passes
as many of them in the same order. Only the second counts. Backward by turns (``deterministic``)
has other barriers of the block in between and is left out of it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine

from pyfa.backends import BACKENDS
from pyfa.backends.cuda import code
from pyfa.conformance import grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import PASSED, REFUSED
from pyfa.plan import Plan

TOOLS = ("memcheck", "initcheck", "racecheck", "racecheck-widened")
_WIDENED = "-widened"
# Barriers of some warps: what they are in the source, and those of the block.
_SOME = re.compile(r'asm volatile\("bar\.(?:arrive|sync) %0, %1;"[^;]*;')
_WHOLE = "barrier();"
KERNELS = re.compile(r"\b(attn_fwd|attn_bwd|attn_decode|combine|append|row_sums|dq_convert)\b")
_LONGEST = 300
_SUMMARY = re.compile(r"(ERROR SUMMARY|RACECHECK SUMMARY): .*")


def chosen(count: int) -> list[Case]:
    """The cases whose names hash smallest, of those that are short and that the backend takes."""
    backend = BACKENDS["cuda"]
    cases = grid.cases("full", backend.FEATURES, backend.DTYPES)
    short = [
        case
        for case in cases
        if case.features <= backend.FEATURES
        and case.dtype in backend.DTYPES
        and max((*case.lengths_q, *case.lengths_k), default=0) <= _LONGEST
    ]
    return sorted(short, key=lambda case: hashlib.sha256(case.name.encode()).digest())[:count]


def widen() -> None:
    """From now on kernels of this process have only barriers of all of a block's warps."""
    original = code.source_of

    def widened(plan: Plan) -> str:
        return _SOME.sub(_WHOLE, original(plan))

    code.source_of = widened


def run(count: int, widened: bool) -> int:
    """The cases, in this process; whether one failed is the status."""
    backend = BACKENDS["cuda"]
    where = runner.device_of("cuda")
    cases = chosen(count)
    if widened:
        widen()
        cases = [case for case in cases if not case.deterministic]
    results = [runner.run_case(backend, case, where) for case in cases]
    passed, refused = (sum(x.status == status for x in results) for status in (PASSED, REFUSED))
    for result in results:
        if result.status not in (PASSED, REFUSED):
            print(f"{result.status}: {result.name} {result.messages}")
    print(f"{passed} of {len(results)} cases passed, {refused} declined")
    return min(len(results) - passed - refused, 1)


def sanitized(tool: str, count: int) -> dict[str, Any]:
    """What ``tool`` reports of the cases."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        ended = subprocess.run(
            [sanitizer, "--tool", tool.removesuffix(_WIDENED), "--report-api-errors", "no",
             "--log-file", log.name, sys.executable, __file__, "--cases", str(count),
             "--run", "widened" if tool.endswith(_WIDENED) else "as-is"],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        text = Path(log.name).read_text()
    blocks = re.split(r"(?m)^=========\s*$", text)
    ours = [block for block in blocks if KERNELS.search(block)]
    summary = _SUMMARY.search(text)
    return {
        "tool": tool,
        "cases": (ended.stdout.strip().splitlines() or ["nothing was run"])[-1],
        "status": ended.returncode,
        "of_our_kernels": len(ours),
        "first": ours[0].strip()[:2000] if ours else "",
        "summary": summary[0] if summary else text[-500:],
        "seconds": round(time.monotonic() - begin),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=72)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--save", action="store_true")
    parser.add_argument(
        "--run", choices=("as-is", "widened"), help="only run the cases, without a tool"
    )
    options = parser.parse_args()
    if options.run:
        return run(options.cases, options.run == "widened")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(sanitized, options.tools.split(","), itertools.repeat(options.cases)))
    for each in found:
        print(each)
    if options.save:
        print(machine.save("sanitizer_cuda", {"cases": options.cases, "tools": found}))
    counted = [each for each in found if each["tool"] != "racecheck"]
    return int(any(each["of_our_kernels"] or each["status"] for each in counted))


if __name__ == "__main__":
    sys.exit(main())
