"""A first forward and backward from the bundle, without a compiler: modules and files they need.

In a process of its own, with a driver that launches nothing: all but libcuda is real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = ("cuda", "triton", "elftools", "ziglang", "msgpack")

CODE = """
import json, sys
from pathlib import Path

folder, hidden = sys.argv[1], sys.argv[2:]
import blind
blind.hide(hidden)

import hashlib
import torch
import no_gpu
import pyfa
from pyfa import bundle
from pyfa.backends import BACKENDS
from pyfa.backends.common import libcuda

# Every plan is in the bundle, as one file.
bundle.FOLDER = Path(folder)
(bundle.FOLDER / "code.cubin").write_bytes(b"code")
bundle.entry = lambda arch, key: {
    "file": "code.cubin", "sha256": hashlib.sha256(b"code").hexdigest(),
    "arch": arch, "compiler": "nvrtc 12.9.86",
}
bundle.archs = lambda: frozenset({"sm_90a"})
machine = no_gpu.nvidia("H200", notes=True)
driver = machine.__enter__()
backend = BACKENDS["cuda"]
del backend.why_unavailable  # the stand-ins of a machine with a compiler
del backend.launch._load_new, backend.launch.begin
torch.version.cuda, torch.cuda.is_available = "13.0", lambda: True
libcuda.load = lambda data, name, index, shared: driver.function(name)

# PyTorch's own first use of a gradient that is given: the same for any autograd.Function.
x = torch.ones(1, requires_grad=True)
torch.autograd.grad(x * 2, x, torch.ones(1))

q, k, v, dout = (torch.zeros(1, 256, 8, 128, dtype=torch.bfloat16) for _ in range(4))
inputs = [x.requires_grad_() for x in (q, k, v)]
before, opened = set(sys.modules), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
# PLANTED
out = pyfa.attention(*inputs, causal=True)
torch.autograd.grad(out, inputs, dout)
files = opened[:]
print(json.dumps({
    "modules": sorted(set(sys.modules) - before), "files": files,
    "launched": [name.split()[0] for name, *_ in driver.launched],
    "digests": sorted(set(backend.launch.digests.values())),
}))
"""


def first_call(folder: Path, planted: str = "") -> dict[str, Any]:
    code = CODE.replace("# PLANTED", planted)
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "HOME": str(folder), "PATH": ""}
    command = [sys.executable, "-c", code, str(folder), *HIDDEN]
    ended = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def beyond(found: dict[str, Any], folder: Path) -> list[str]:
    """Return modules that are not pyfa's, and files that are neither sources nor bundled code."""
    kernels, package = str(ROOT / "kernels"), str(ROOT / "pyfa")
    modules = [name for name in found["modules"] if name.split(".")[0] != "pyfa"]
    own = (kernels, package, str(folder))
    return modules + [name for name in found["files"] if not name.startswith(own)]


def test_it_imports_pyfa_alone_and_reads_sources_and_the_bundle(tmp_path: Path) -> None:
    found = first_call(tmp_path)
    assert beyond(found, tmp_path) == []
    assert {"attn_fwd", "attn_bwd"} <= set(found["launched"])
    assert len(found["digests"]) == 1  # the bundle's one file
    kernels = len(set(found["launched"]))
    assert sum(name.endswith("code.cubin") for name in found["files"]) == kernels


@pytest.mark.parametrize("planted", ["import filelock", "open('/dev/null')"])
def test_what_else_is_read_is_seen(tmp_path: Path, planted: str) -> None:
    assert beyond(first_call(tmp_path, planted), tmp_path)
