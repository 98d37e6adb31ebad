"""Check a release wheel: its size, its bundle, and the first call without a compiler.

    python ci/check_wheel.py DIR [--out FILE]

A fresh environment gets the wheel and, from this one, torch and what pyfa requires; no ziglang,
NVRTC, pyelftools or msgpack. There, each kernel that a problem may launch must come from the
bundle.

The script measures CPU time in a process that has just imported pyfa. For AMD it is the time of the
first call of ``pyfa.attention`` with CPU tensors on the backend ``hip``, up to the driver's load
and launch, and of reading the code of every kernel that the problem may launch. For NVIDIA it is
the time of choosing the kernels and reading their code; ``first_call_h200.json`` has first calls on
an H200. Each figure is the median of new processes, and must not exceed ``MOST_SECONDS``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

MOST_BYTES = 60_000_000
MOST_SECONDS = 0.1  # of a first call, without the driver
ROUNDS = 9
# What a machine gets with torch and the wheel, and nothing that compiles or reads ELF.
LENT = (
    "torch", "torchgen", "functorch", "numpy", "filelock", "platformdirs", "rich", "pygments",
    "markdown_it", "mdurl", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2",
    "markupsafe", "fsspec",
)  # fmt: skip
ABSENT = ("ziglang", "cuda", "elftools", "msgpack", "triton")

FIRST_CALL = """
import gc, importlib.util, json, sys, time
device, features, seqlen_q, dim = json.loads(sys.argv[1])
import torch
import pyfa
for name in {absent!r}:
    assert importlib.util.find_spec(name) is None, name
backward, amd = "backward" in features, device == "MI300X"
q = torch.ones(1, seqlen_q, 32, dim, dtype=torch.bfloat16, requires_grad=backward)
k = torch.ones(1, 4096, 8, dim, dtype=torch.bfloat16)

class Unlaunched:
    # The runtime of the hip backend without a driver.
    from pyfa._torch import empty_cpu as empty
    APART, empty = False, staticmethod(empty)
    launched = 0
    def why_unavailable(self): return None
    def describe(self): return ""
    def why_not(self, problem): return None
    def launch_of(self, program, kernels):
        def launch(*arguments, **more):
            self.launched += len(kernels)
            raise KeyboardInterrupt
        return launch

full = []
gc.callbacks.append(lambda phase, info: full.append(1) if info["generation"] == 2 else None)
began = time.process_time()
from pyfa import bundle
from pyfa.backends import BACKENDS
from pyfa.device import DEVICES
from pyfa.problem import Problem
backend = BACKENDS["hip" if amd else "cuda"]
launched = 1
if amd:
    runtime = Unlaunched()
    BACKENDS["emulator"] = type(backend)("emulator", runtime)
    try:
        pyfa.attention(q, k, k, causal="causal" in features, backend="emulator")
    except (KeyboardInterrupt, pyfa.UnsupportedProblem):  # launched, or ``missing`` says why not
        pass
    launched = runtime.launched
problem = Problem(1, seqlen_q, 4096, 32, 8, dim, dim, "bfloat16", frozenset(features),
                  DEVICES[device], seqlen_q == 4096)
arch = DEVICES[device].arch
kernels = backend.kernels(problem)
if amd:
    from pyfa.backends.hip import code
    wanted = [(plan, arch) for plan in kernels]
    missing = code.why_missing(kernels, arch)
else:
    from pyfa.backends.cuda import code, plans
    wanted = [(plan, plans.compiled_for(arch, plan)) for plan in kernels]
    missing = code.why_missing(kernels, arch, code.why_no_compiler())
origins = [] if missing else [code.load(*each).origin for each in wanted]
seconds = time.process_time() - began
print(json.dumps({{"seconds": seconds, "missing": missing, "origins": origins,
                   "launched": launched, "full_collections": len(full) // 2,
                   "file": pyfa.__file__}}))
"""
PROBLEMS = ((["causal"], 4096), (["causal", "backward"], 4096), ([], 1))


def bare(folder: Path, wheel: Path) -> Path:
    """Return the Python of a new environment with the wheel."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    theirs = Path(str(metadata.distribution("torch").locate_file("")))
    for name in LENT:
        for path in (theirs / name, theirs / f"{name}.py"):
            if path.exists():
                (site / path.name).symlink_to(path)
    for distribution in ("torch", "numpy", "filelock", "platformdirs", "rich"):
        path = Path(str(metadata.distribution(distribution)._path))  # type: ignore[attr-defined]
        (site / path.name).symlink_to(path)
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", wheel], check=True)
    return python


def head_dims(objects: list[dict[str, Any]], arch: str) -> list[int]:
    """Return those that the bundle has for ``arch``; sm_90's cubins are of sm_90 and sm_90a. Above
    256 there is no backward, which PROBLEMS ask for."""
    found = {
        int(part[9:])
        for each in objects
        if each["arch"].startswith(arch)
        for part in each["kernel"].split()
        if part.startswith("HEAD_DIM=")
    }
    return sorted(dim for dim in found if 0 < dim <= 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where one wheel and one sdist are")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    (wheel,) = options.folder.glob("*.whl")
    (sdist,) = options.folder.glob("*.tar.gz")
    size = wheel.stat().st_size
    faults = [] if size <= MOST_BYTES else [f"{wheel.name}: {size} bytes, at most {MOST_BYTES}"]
    results = {"wheel_bytes": size, "sdist_bytes": sdist.stat().st_size, "first_calls": []}
    with tempfile.TemporaryDirectory() as name:
        python = bare(Path(name) / "env", wheel)
        told = subprocess.check_output(
            [python, "-m", "pyfa", "info", "--json"], cwd=name, text=True
        )
        bundle = json.loads(told)["bundle"]
        objects = bundle["objects"]
        if not objects or bundle["damaged"]:
            faults.append(f"bundle: {len(objects)} objects, damaged: {bundle['damaged']}")
        archs = {each["arch"] for each in objects}
        counts = {arch: sum(each["arch"] == arch for each in objects) for arch in sorted(archs)}
        results["objects"] = counts
        script = FIRST_CALL.format(absent=ABSENT)
        for device, arch in (("MI300X", "gfx942"), ("L40S", "sm_89"), ("H200", "sm_90")):
            for dim in head_dims(objects, arch) if arch in archs else ():
                for features, seqlen_q in PROBLEMS:
                    problem = [device, features, seqlen_q, dim]
                    command = [python, "-c", script, json.dumps(problem)]
                    rounds = [
                        json.loads(subprocess.check_output(command, cwd=name, text=True))
                        for _ in range(ROUNDS)
                    ]
                    found = rounds[-1]
                    assert found["file"].startswith(name), found["file"]
                    assert found["launched"] or found["missing"], problem
                    times = sorted(each["seconds"] for each in rounds)
                    seconds = statistics.median(times)
                    collections = max(each["full_collections"] for each in rounds)
                    row = [*problem, seconds, times[0], times[-1], collections]
                    results["first_calls"].append(row)
                    if seconds > MOST_SECONDS:
                        faults.append(f"{problem}: {seconds:.3f} s, at most {MOST_SECONDS} s")
                    if found["missing"] or set(found["origins"]) != {"bundle"}:
                        faults.append(f"{problem}: {found['missing'] or found['origins']}")
        if not results["first_calls"]:
            faults.append(f"no first call was tried: no device here has code of {sorted(archs)}")
    print(f"{wheel.name}: {size / 1e6:.1f} MB; code objects {counts}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {ROUNDS} processes each")
    for device, features, seqlen_q, dim, seconds, least, most, _ in results["first_calls"]:
        times = f"{seconds:.3f} s ({least:.3f} to {most:.3f})"
        print(f"{times}  {device}, {seqlen_q} rows, head_dim {dim}, {features}")
    for fault in faults:
        print(f"check_wheel: {fault}", file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps({**results, "faults": faults}, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
