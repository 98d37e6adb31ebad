"""Time the first calls of a fresh process on a GPU without a compiler, phase by phase.

    python benchmarks/first_call.py [--save] [--rounds N] [--compiler]

Needs an NVIDIA GPU and a bundle that has bfloat16 and head_dim 128 (`pyfa compile --arch sm_90
--head-dim 128 --bundle`). Each round starts new processes, and an import of a package that a user
of the wheel lacks fails (``--compiler`` lets it succeed). The phases are:

- "context": CUDA's context, and torch's first memory. "tensors": inputs, copied from the host.
- "no-op": torch's autograd engine itself, through a Function that launches nothing, with a gradient
  that is given. In the order "pyfa first" it comes last.
- "sum": a kernel of torch's own, for comparison.

Of each: wall-clock and processor time, the functions in it that are measured by name, the modules
that it imports, the files that it opens. All seconds are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
ABSENT = ("ziglang", "cuda", "elftools", "msgpack", "triton")
ORDERS = ("pyfa first", "engine first")

_CHILD = r'''
import contextlib, functools, json, sys, time

order, absent, here = json.loads(sys.argv[1])
sys.path.insert(0, here)
import blind
sys.path.pop(0)
blind.hide(absent)
opened, libraries, inner, phases = [], [], {}, {}

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.append(arguments[0])
    elif event == "ctypes.dlopen":
        libraries.append(str(arguments[0]))

sys.addaudithook(hook)

@contextlib.contextmanager
def phase(name):
    inner.clear(), opened.clear(), libraries.clear()
    modules = set(sys.modules)
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.synchronize()
    new = sorted(set(sys.modules) - modules)
    phases[name] = {
        "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu,
        "parts_s": dict(inner), "modules": len(new),
        "of": sorted({x.split(".")[0] for x in new}),
        "files": len(opened), "libraries": libraries[:],
    }

def timed(owner, name, label=None):
    """Add up what calls of a function take, with what it calls."""
    whole = getattr(owner, name)
    def call(*args, **more):
        began = time.perf_counter()
        try:
            return whole(*args, **more)
        finally:
            key = label or name
            inner[key] = inner.get(key, 0.0) + time.perf_counter() - began
    setattr(owner, name, call)

with phase("import torch"):
    import torch
with phase("context"):
    torch.empty(1, device="cuda")
host = [torch.randn(1, 4096, heads, 128).bfloat16() for heads in (32, 8, 8, 32)]
with phase("tensors"):
    q, k, v, dout = (x.cuda() for x in host)

class NoOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, dx):
        return dx

def engine():
    with phase("no-op forward"):
        y = NoOp.apply(q.detach().requires_grad_())
    with phase("no-op backward"):
        y.backward(dout)

if order == "engine first":
    engine()
with phase("import pyfa"):
    import pyfa
from pyfa import bundle, dispatch, ops
from pyfa.backends import BACKENDS
backend = BACKENDS["cuda"]
from pyfa.backends.common import libcuda, program
from pyfa.backends.cuda import code, counters, launcher, runtime_compiler, tensor_maps
for owner, name in (
    (bundle, "manifest"), (bundle, "find"), (code, "key_of"), (code, "source_of"), (code, "load"),
    (code, "why_no_compiler"), (code, "why_missing"), (counters, "source"), (counters, "zeros"),
    (tensor_maps, "maps_of"), (tensor_maps, "movable"), (libcuda, "load"), (libcuda, "launcher"),
    (libcuda, "library"), (libcuda, "version"), (dispatch, "_choose"), (dispatch.Prepared, "bind"),
    (dispatch.Prepared, "bind_backward"), (ops, "_gradients"),
):
    timed(owner, name)
driver = libcuda.library()
for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
             "cuTensorMapEncodeTiled", "cuLaunchKernelEx"):
    timed(driver, name)

def forward(wanted=False):
    given = [x.detach().requires_grad_(wanted) for x in (q, k, v)]
    return given, pyfa.attention(*given, causal=True)

for number in ("first", "second"):
    with phase(f"{number} forward"):
        given, out = forward()
for number in ("first", "second"):
    with phase(f"{number} forward for a backward"):
        given, out = forward(True)
    with phase(f"{number} backward"):
        out.backward(dout)
gradients = [x.grad for x in given]
with phase("first decode"):
    last = pyfa.attention(q[:, -1:], k, v, causal=True)
if order == "pyfa first":
    engine()
with phase("first sum"):
    out.detach().sum()
given, out = forward(True)
with phase("sum and its backward, with pyfa's"):
    out.sum().backward()

wanted = [x.detach().float().requires_grad_() for x in (q, k, v)]
right = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in wanted), is_causal=True, enable_gqa=True).transpose(1, 2)
right.backward(dout.float())
def error(x, y):
    return float((x.float() - y.float()).abs().max() / y.float().abs().max())
origins = sorted({x.split()[0] for x in backend.launch.digests})
bundled = {each["sha256"] for each in bundle.manifest()["objects"].values()}
print(json.dumps({
    "phases": phases, "kernels": origins,
    "bundled": all(digest in bundled for digest in backend.launch.digests.values()),
    "absent": {x: x in sys.modules for x in absent},
    "errors": {"out": error(out.detach(), right.detach()), "decode": error(last, right[:, -1:]),
               "gradients": [error(x, y.grad) for x, y in zip(gradients, wanted)]},
}))
'''


def once(order: str, absent: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, json.dumps([order, absent, str(HERE)])]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of ``rounds`` with the medians of the seconds."""
    told = rounds[-1]
    for name, phase in told["phases"].items():
        all_of_it = [each["phases"][name] for each in rounds]
        for figure in ("wall_s", "cpu_s"):
            values = [each[figure] for each in all_of_it]
            phase[figure] = round(statistics.median(values), 5)
            phase[f"{figure[:-2]}_range_s"] = [round(min(values), 5), round(max(values), 5)]
        for part in phase["parts_s"]:
            values = [each["parts_s"].get(part, 0.0) for each in all_of_it]
            phase["parts_s"][part] = round(statistics.median(values), 6)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiler", action="store_true", help="with what compiles")
    parser.add_argument("--save", action="store_true", help="write results/first_call_h200.json")
    options = parser.parse_args()
    absent = () if options.compiler else ABSENT
    results: dict[str, Any] = {"rounds": options.rounds, "absent": list(absent)}
    for order in ORDERS:
        first, *rounds = (once(order, absent) for _ in range(options.rounds + 1))
        results[order] = {"first process": first, "then": middle(rounds)}
        for title in ("first process", "then"):
            print(f"\n{order}, {title}")
            for name, phase in results[order][title]["phases"].items():
                print(f"  {phase['wall_s']:8.4f} s, {phase['cpu_s']:8.4f} of a core  {name:<36}"
                      f" {phase['modules']:4} modules {phase['files']:4} files")  # fmt: skip
                for part, seconds in phase["parts_s"].items():
                    if seconds > 2e-4:
                        print(f"      {seconds:8.4f}  {part}")
                if name != "import torch" and phase["modules"]:
                    print(f"      {phase['of']}")
            print(" ", results[order][title]["errors"], results[order][title]["bundled"])
        if options.save:
            print(machine.save(f"first_call_{machine.gpu()}", results))


if __name__ == "__main__":
    main()
