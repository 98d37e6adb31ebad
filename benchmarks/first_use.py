"""How long the first use of a plan that no code was compiled for takes, stage by stage.

    python benchmarks/first_use.py [--rounds N] [--vendors V …] [--cases C …] [--save]

Needs no GPU: ``no_gpu.py`` stands in for the driver, and the compilers are real (NVRTC for an H200,
the HIP compiler for an MI300X). Each measurement is a process with an empty code cache, which calls
``attention`` and its backward once. ``cases`` are three mods of ``mods.py`` and a plain causal
call, in bfloat16 with head_dim 128.

``stages``: seconds of one process that builds the kernels one by one. ``compile`` has for each
kernel wall-clock and processor seconds; of NVRTC's also those of its phases, from a second compile
of the same source. ``total``: forward and backward, ``one by one`` and ``in threads``
(``pyfa/backends/native/builds.py``), in alternation, each with all rounds; none with ``--rounds
0``, as on a busy machine, where only processor time says much. ``forward_s`` ends when the forward
is launched, ``gradient_s`` when the backward is; ``cpu_s`` is the processor time of both.
``--save`` writes ``results/first_use.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
VENDORS = ("cuda", "hip")
CASES = ("causal, no mod", "sliding mask", "document mask", "softcap score")
MEASURED = ("forward_s", "gradient_s", "cpu_s")
WAYS = ("one by one", "in threads")

_CHILD = r'''
import csv, json, resource, sys, time

vendor, case, threads, phases, here = json.loads(sys.argv[1])
sys.path.insert(0, here)
began = time.perf_counter()
import torch
stages = {"import torch": time.perf_counter() - began}
began = time.perf_counter()
import pyfa
stages["import pyfa"] = time.perf_counter() - began
import no_gpu
from pyfa import mods
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import code as cuda_code, launcher as cuda_launcher, plans, runtime_compiler
from pyfa.backends.hip import code as hip_code, launcher as hip_launcher

def timed(owner, name, key):
    """Add up what calls of a function take."""
    whole = getattr(owner, name)
    def call(*args, **more):
        began = time.perf_counter()
        try:
            return whole(*args, **more)
        finally:
            stages[key] = stages.get(key, 0.0) + time.perf_counter() - began
    setattr(owner, name, call)

def processor():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)

compiled = []

def noted(code):
    whole = code.build
    def build(plan, arch):
        began, used = time.perf_counter(), processor()
        data = whole(plan, arch)
        row = {"kernel": plan.kernel, "wall_s": time.perf_counter() - began}
        if not threads:
            row["cpu_s"] = processor() - used
        compiled.append(row | {"plan": plan, "arch": arch})
        return data
    code.build = build

if not threads:
    timed(mods, "trace", "trace")
    timed(runtime_compiler, "version", "load the compiler")
    timed(cuda_code, "source_of", "emit")
    timed(hip_code, "source_of", "emit")
noted(cuda_code)
noted(hip_code)

q, k, v, dout = (torch.zeros(4, 4096, 16, 128, dtype=torch.bfloat16) for _ in range(4))
inputs = [x.requires_grad_() for x in (q, k, v)]
document = torch.arange(4096, dtype=torch.int32) // 512
options = {
    "causal, no mod": {"causal": True},
    "sliding mask": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 1024)},
    "document mask": {"mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (i >= j)},
    "softcap score": {"score_mod": lambda s, b, h, i, j: 30 * torch.tanh(s / 30)},
}[case]
with no_gpu.nvidia() if vendor == "cuda" else no_gpu.amd() as driver:
    launch = BACKENDS[vendor].launch
    if vendor == "cuda":
        fake = launch._load_new
        def load(plan, threads, index):
            cuda_code.load(cuda_launcher._plain(plan), plans.compiled_for("sm_90a", plan))
            return fake(plan, threads, index)
        launch._load_new = load
        real = cuda_launcher.Launcher
    else:
        real = hip_launcher.Launcher
        launch._load = real._load.__get__(launch)
    if threads:
        launch.begin = real.begin.__get__(launch)
    began, used = time.perf_counter(), processor()
    out = pyfa.attention(*inputs, **options)
    forward = time.perf_counter() - began
    torch.autograd.grad(out, inputs, dout)
    gradient, used = time.perf_counter() - began, processor() - used

if phases:
    from cuda.core import Program, ProgramOptions
    for row in compiled:
        source = cuda_code.source_of(row["plan"])
        given = ProgramOptions(arch=row["arch"], std="c++17", ptxas_options=["-v"], time=phases)
        open(phases, "w").close()
        Program(source, "c++", given).compile("cubin")
        rows = csv.reader(open(phases), skipinitialspace=True)
        found = {x[1]: float(x[2]) / 1000 for x in rows if len(x) == 4 and x[3] == "ms"}
        row["phases_s"] = found
for row in compiled:
    del row["plan"], row["arch"]
stages["compile"] = compiled
print(json.dumps({
    "forward_s": forward, "gradient_s": gradient, "cpu_s": used, "stages": stages,
}))
'''


def once(vendor: str, case: str, threads: bool, phases: bool = False) -> dict[str, Any]:
    """Return what a process with an empty cache measured."""
    with tempfile.TemporaryDirectory() as folder:
        timings = f"{folder}/phases.csv" if phases and vendor == "cuda" else ""
        given = json.dumps([vendor, case, threads, timings, str(HERE)])
        paths = {"PYTHONPATH": str(HERE.parent), "PYFA_CACHE_DIR": f"{folder}/cache"}
        ended = subprocess.run(
            [sys.executable, "-c", _CHILD, given],
            env=os.environ | paths, capture_output=True, text=True,
        )  # fmt: skip
    if ended.returncode:
        sys.exit(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(each) for each in x]
    return round(x, 4) if isinstance(x, float) else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vendors", nargs="+", default=VENDORS, choices=VENDORS)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for vendor in options.vendors:
        for case in options.cases:
            row: dict[str, Any] = {"vendor": vendor, "case": case}
            row["stages"] = once(vendor, case, False, phases=True)["stages"]
            rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way in WAYS:
                    rounds[way].append(once(vendor, case, way == "in threads"))
            row["total"] = {
                way: {
                    "median": {name: statistics.median(x[name] for x in each) for name in MEASURED},
                    "rounds": [[x[name] for name in MEASURED] for x in each],
                }
                for way, each in rounds.items()
                if each
            }
            rows.append(rounded(row))
            print(json.dumps(rows[-1], indent=1), flush=True)
            if options.save:
                print(machine.save("first_use", {"rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
