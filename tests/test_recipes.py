"""CONTRIBUTING's recipes, followed: an arch, a head dim and a feature are added to a copy of pyfa.

Each recipe changes the files that it names and no other. Where another file had to change, the copy
would not plan, explain or decline as it is asked to here. No kernel is compiled: what a kernel
needs is for its author.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# One process follows the recipes, for all of these.
pytestmark = pytest.mark.xdist_group("recipes")

ROOT = Path(__file__).parent.parent
TILES = "backends/native/tiles"

ASKS = """
import json, sys
from dataclasses import replace
import torch
import pyfa
from pyfa import device, dispatch
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import plans as cuda
from pyfa.backends.cuda.target import TARGET as CUDA
from pyfa.backends.hip import code, plans as hip
from pyfa.backends.hip.target import TARGET as HIP
from pyfa.backends.native import catalog
from pyfa.cli import problem as command
from pyfa.problem import Problem

sys.path.insert(0, DOCS)
import generated

def plan(name, where, dim=128, rows=2048, features=()):
    problem = Problem(2, rows, rows, 16, 4, dim, dim, "bfloat16", frozenset(features), where, True)
    found = dispatch.ask(name, problem, hypothetical=True)
    return dict(found.plan.constants) if found.plan else list(found.reasons)

nvidia = replace(device.DEVICES["A100-80GB"], arch="sm_130")
amd = replace(device.DEVICES["MI300X"], arch="gfx955")
arch = {
    "file": pyfa.__file__,
    "archs": cuda.TILED + hip.ARCHS,
    "cuda": plan("cuda", nvidia),
    "old": plan("cuda", device.DEVICES["A100-80GB"]),
    "cuda decode": plan("cuda", nvidia, rows=1),
    "cuda backward": [dict(p.constants) for p in CUDA.backward_plans(
        "cuda", "sm_130", (128, 128), 1, False, False, "")][1],
    "target": cuda.compiled_for("sm_130"),
    "listed": len(catalog.all_plans(CUDA, "sm_130")),
    "limit": cuda.limits_of("sm_130").shared_bytes_per_block,
    "hip": plan("hip", amd),
    "hip decode": plan("hip", amd, rows=1),
    "hip training": plan("hip", amd, features=("backward",)),
    "mi300x": plan("hip", device.DEVICES["MI300X"]),
    "unknown": plan("hip", replace(amd, arch="gfx956")),
    "hip key": code.key_of(catalog.all_plans(HIP, "gfx955")[0], "gfx955")
        != code.key_of(catalog.all_plans(HIP, "gfx955")[0], "gfx942"),
}
dim = {
    name: {rows: plan(name, device.DEVICES[where], 160, rows)["HEAD_DIM"] for rows in (1, 2048)}
    for name, where in (("cuda", "A100-80GB"), ("hip", "MI300X"))
}
dim["backward"] = [dict(p.constants)["HEAD_DIM"] for p in CUDA.backward_plans(
    "cuda", "sm_80", (160, 160), 1, False, False, "")]
dim["hip backward"] = [dict(p.constants)["HEAD_DIM"] for p in HIP.backward_plans(
    "hip", "gfx942", (160, 160), 1, False, True, "")][1:]
q = torch.zeros(1, 4, 2, 64)
told = pyfa.explain(q, q, q, softcap=50.0)
feature = {
    "reasons": {answer.backend: answer.reasons for answer in told.answers},
    "chosen": told.chosen,
    "shown": told.problem.described,
    "said by": command.by_name(),
    "docs": "a made-up thing" in generated.features(),
    "others": pyfa.explain(q, q, q, softcap=30.0).problem.described,
}
print(json.dumps({"arch": arch, "dim": dim, "feature": feature}))
"""


def add(file: Path, text: str, before: str) -> None:
    """``text`` in front of ``before``."""
    source = file.read_text()
    assert source.count(before) == 1, before
    file.write_text(source.replace(before, text + before))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("recipes")
    package = root / "pyfa"
    shutil.copytree(ROOT / "pyfa", package, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "kernels").symlink_to(ROOT / "kernels")
    (root / "docs").symlink_to(ROOT / "docs")
    # An arch: its file of tiles, and a row of limits.
    (package / TILES / "sm130.py").write_text(
        "from .sm80 import TILES as OF_SM80\n"
        "from .sm80 import Backward, Decode, Forward\n\n"
        "_ROW = Forward(32, 4, 112, False, 1)\n"
        "TILES = OF_SM80._replace(\n"
        "    forward={**OF_SM80.forward, (128, 128): (_ROW, _ROW, _ROW)},\n"
        "    small_grid={},\n"
        "    decode={**OF_SM80.decode, (128, 128): (Decode(2, 1, 8, 5),)},\n"
        "    backward={**OF_SM80.backward, (128, 128): (Backward(32, 96, 4),) * 2},\n"
        ")\n"
    )
    (package / TILES / "gfx955.py").write_text(
        "from .gfx942 import Decode, Forward\n"
        "from .gfx942 import TILES as OF_GFX942\n\n"
        "TILES = OF_GFX942._replace(\n"
        "    forward={**OF_GFX942.forward, (128, 128): Forward(128, 8)},\n"
        "    decode={**OF_GFX942.decode, (128, 128): (Decode(4, 6, 1),)},\n"
        "    one_pass={},\n"
        ")\n"
    )
    for row in (
        '_arch("sm_130", "nvidia", 32, 328, 327, 256, 255, 64, 128, _rates(8192, 256), "made up"),',
        '_arch("gfx955", "amd", 64, 320, 320, 512, 512, 32, 256, _rates(4096, 256), "made up"),',
    ):
        add(package / "arch.py", f"{row}\n            ", before='_arch("gfx90a"')
    # A head dim: a row in the tables of an arch's file.
    sm80, gfx942 = (package / TILES / f"{name}.py" for name in ("sm80", "gfx942"))
    for file, row, before in (
        (sm80, "(_192, _192, _192)", "(64, 64): (_64, _64, Forward("),
        (sm80, "sizes((1, 1, 6, 2))", "(64, 64): sizes((1, 1, 8, 3)"),
        (sm80, "sizes((1, 1, 8, 4))", "(64, 64): sizes((1, 1, 8, 6)"),
        (sm80, "(Backward(64, 64, 2, 2),) * 2", "(64, 64): (Backward(128, 128"),
        (gfx942, "Forward(32, 8)", "(64, 64): Forward("),
        (gfx942, "(Decode(1, 2, 2),)", "(64, 64): (Decode(1, 4, 2)"),
        (gfx942, "(Decode(1, 4, 2),)", "(64, 64): (Decode(1, 8, 2)"),
        (gfx942, "(_1, _1, _1, _1)", "(64, 64): (_SLOTS_TWICE"),
    ):
        add(file, f"(160, 160): {row},\n        ", before)
    # A feature: its record.
    add(
        package / "problem.py",
        '        Feature("made_up", "a made-up thing", lambda asked: asked.call.softcap == 50.0,\n'
        '                frozenset({"torch"}), shown="made up at {softcap}"),\n',
        before='        Feature("alibi"',
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYFA_")}
    asks = ASKS.replace("DOCS", repr(str(root / "docs")))
    ended = subprocess.run(
        [sys.executable, "-c", asks], cwd=root, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["arch"]["file"] == str(package / "__init__.py")
    return found


def test_an_nvidia_arch_is_a_file_of_tiles_and_a_row(copy: dict[str, Any]) -> None:
    arch = copy["arch"]
    assert "sm_130" in arch["archs"]
    assert (arch["cuda"]["BLOCK_K"], arch["cuda"]["BLOCKS"]) == (112, 1)
    assert arch["old"]["BLOCK_K"] != 112
    assert (arch["cuda decode"]["STAGES"], arch["cuda decode"]["TILES"]) == (5, 2)
    assert arch["cuda backward"]["BLOCK_K"] == 96
    assert (arch["target"], arch["limit"]) == ("sm_130", 327 * 1024)
    assert arch["listed"] > 100


def test_a_successor_of_gfx942_is_a_file_of_tiles_and_a_row(copy: dict[str, Any]) -> None:
    arch = copy["arch"]
    assert "gfx955" in arch["archs"]
    assert (arch["hip"]["BLOCK_K"], arch["mi300x"]["BLOCK_K"]) == (128, 64)
    assert (arch["hip decode"]["STAGES"], arch["hip decode"]["TILES"]) == (6, 4)
    assert arch["hip training"]["BLOCK_K"] == 128
    assert arch["unknown"] == ["gfx956 is not gfx942 or gfx955"]
    assert arch["hip key"]


def test_a_head_dim_is_a_row_in_each_table(copy: dict[str, Any]) -> None:
    assert copy["dim"] == {
        "cuda": {"1": 160, "2048": 160},
        "hip": {"1": 160, "2048": 160},
        "backward": [160, 160, 160],
        "hip backward": [160, 160],
    }


def test_a_feature_is_a_record(copy: dict[str, Any]) -> None:
    """Who does not have it declines it, with its words; commands and documents know it."""
    feature = copy["feature"]
    reason = "a made-up thing is not implemented"
    declining = {name for name, reasons in feature["reasons"].items() if reason in reasons}
    assert declining == {"hip", "emulator", "cuda", "triton"}
    assert feature["chosen"] == "torch"
    assert "made up at 50.0" in feature["shown"]
    assert "made up" not in feature["others"]
    assert "made_up" in feature["said by"]
    assert feature["docs"]


@pytest.mark.parametrize(
    ("heading", "files"),
    [
        ("A new NVIDIA arch", {f"pyfa/{TILES}/sm80.py", "pyfa/arch.py", "pyfa/device.py"}),
        ("A successor of gfx942", {f"pyfa/{TILES}/gfx942.py", "pyfa/arch.py", "pyfa/device.py"}),
        ("A new head dim", {f"pyfa/{TILES}/sm80.py", f"pyfa/{TILES}/gfx942.py"}),
        ("A new feature", {"pyfa/problem.py"}),
    ],
)
def test_contributing_names_these_files(heading: str, files: set[str]) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert files <= set(re.findall(r"`((?:pyfa)/[\w./]+)`", section))
