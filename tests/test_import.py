"""``import pyfa`` is torch and nothing else heavy, touches no device, needs no optional package.

Every check runs in a process of its own: this one has long imported everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
OPTIONAL = (
    "triton", "hip", "cuda", "rocm", "ziglang", "elftools", "msgpack", "matplotlib", "jinja2",
    "transformers",
)  # fmt: skip
LATER = ("pyfa.cli", "pyfa.conformance", "pyfa.compat", "pyfa.integrations")
HEAVY = (*OPTIONAL, "rich", "filelock", "platformdirs", "importlib.metadata", "subprocess")

# As if the optional packages were not installed.
WITHOUT_OPTIONAL = f"""
import sys
sys.path.insert(0, {BENCHMARKS!r})
import blind
sys.path.pop(0)
blind.hide({OPTIONAL!r})
"""


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, json, torch; before = set(sys.modules); import pyfa;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = json.loads(run(code))
    assert "pyfa.api" in new
    assert [name for name in new if name.startswith(HEAVY)] == []
    assert [name for name in new if name.startswith(LATER)] == []


def test_no_device_is_touched() -> None:
    code = """
import torch

def touched(*args, **kwargs):
    raise AssertionError("the import touched a device")

for name in ("_lazy_init", "init", "is_available", "device_count", "current_device",
             "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, touched)
import pyfa
assert not torch.cuda.is_initialized()
print("good")
"""
    assert run(code) == "good\n"


def test_import_works_without_optional_packages() -> None:
    code = f"""
{WITHOUT_OPTIONAL}
import torch
import pyfa

q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
assert pyfa.attention(q, k, v).shape == q.shape
print(pyfa.explain(q, k, v))
from pyfa.cli import main
main(["info"])
"""
    printed = run(code)
    assert "* torch" in printed
    assert "torch     ready" in printed


def test_the_missing_packages_are_missing() -> None:
    """The blindness above does what the test before it relies on."""
    code = f"""
{WITHOUT_OPTIONAL}
for name in {OPTIONAL!r}:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
"""
    assert run(code) == ""


def test_nothing_is_printed() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import pyfa"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_backend_comes_without_models_and_collections() -> None:
    """A first call launches; it does not estimate. Importing a backend sets off no collection of
    torch's objects, even if one is due, and leaves the collector as it was."""
    code = """
import gc, json, sys, torch, pyfa
from pyfa.backends import BACKENDS
ran = []
gc.callbacks.append(lambda phase, info: ran.append(phase))
gc.set_threshold(100, 1, 1)
gc.collect(0)
ran.clear()
before = gc.isenabled()
backend = BACKENDS["hip"]
seen = len(ran)
gc.disable()
BACKENDS["cuda"]
names = ("pyfa.traffic", "pyfa.mods.emit")
print(json.dumps([before, seen, gc.isenabled(), [x for x in names if x in sys.modules]]))
"""
    before, collections, after, heavy = json.loads(run(code))
    assert before
    assert collections <= 2  # the start and end of one, when the collector runs again
    assert not after
    assert heavy == []
