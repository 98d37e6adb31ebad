"""What is handed out: the wheel's job and its check, recipes for containers, a warning in info."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from pyfa.backends.cuda import plans as of_cuda
from pyfa.backends.hip import plans as of_hip
from pyfa.cli import info, main, parser

ROOT = Path(__file__).parent.parent
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a recipe: comments dropped, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (x.partition(" ") for x in joined.splitlines())]


@pytest.mark.parametrize(("vendor", "other"), [("rocm", "cuda"), ("cuda", "rocm")])
def test_the_recipes_of_containers(vendor: str, other: str) -> None:
    """Their form, the shell they run and the Python in it; no image was built."""
    found = instructions(ROOT / "docker" / f"{vendor}.Dockerfile")
    assert {name for name, _ in found} == INSTRUCTIONS
    assert found[0] == (
        "ARG",
        f"BASE={'rocm/pytorch' if vendor == 'rocm' else 'pytorch/pytorch'}:latest",
    )
    assert found[1] == ("FROM", "${BASE}")
    copied = dict(found)["COPY"].split()
    assert copied == ["build/wheel/*.whl", "/tmp/wheel/"]
    assert "build/wheel" in (ROOT / "ci" / "wheel").read_text()
    command = dict(found)["RUN"]
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    kept = re.findall(r'python3 -c "([^"]*)"', command)
    assert len(kept) == 2
    for code in kept:
        compile(code, "RUN", "exec")
        assert {"rocm": "torch.version.hip", "cuda": "torch.version.cuda"}[vendor] in code
    # An extra would bring a torch or a Triton of its own.
    (wheel,) = (part for part in shlex.split(command) if part.endswith(".whl"))
    assert wheel == "/tmp/wheel/*.whl"
    parser().parse_args(shlex.split(re.sub(r'[\[\],"]', " ", dict(found)["CMD"]))[1:])
    assert other not in " ".join(rest for _, rest in found)


def test_the_wheels_job_is_a_selection_that_exists() -> None:
    text = (ROOT / "ci" / "wheel").read_text()
    (arguments,) = re.findall(r"set -- (.*)", text)
    options = parser().parse_args(["compile", *shlex.split(arguments), "--bundle"])
    assert options.all
    archs = set(options.arch.split(","))
    assert archs <= {*of_hip.ARCHS, *of_cuda.TILED}
    assert archs == {"gfx942", "sm_80", "sm_86", "sm_89", "sm_90"}
    assert subprocess.run(["bash", "-n", ROOT / "ci" / "wheel"]).returncode == 0
    job = (ROOT / ".github" / "workflows" / "wheel.yml").read_text()
    assert "run: ci/wheel\n" in job
    assert "path: build/wheel/*" in job


def test_a_wheel_without_a_bundle_fails_the_check(tmp_path: Path) -> None:
    """The check itself: a package without code objects is not one to hand out."""
    with zipfile.ZipFile(tmp_path / "pyfa_attention-0-py3-none-any.whl", "w") as wheel:
        for path in (ROOT / "pyfa").rglob("*"):
            name = path.relative_to(ROOT)
            if path.is_file() and not {"_bundle", "__pycache__"} & set(name.parts):
                wheel.write(path, name)
        info = "pyfa_attention-0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: pyfa-attention\nVersion: 0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    tarfile.open(tmp_path / "pyfa_attention-0.tar.gz", "w").close()
    command = [sys.executable, ROOT / "ci" / "check_wheel.py", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "check_wheel: bundle: 0 objects" in ended.stderr


@pytest.mark.parametrize(("device", "kernel"), [("H200", "attn_bwd"), ("MI300X", "row_sums")])
def test_the_checks_first_call_names_what_a_bundle_lacks(
    device: str, kernel: str, tmp_path: Path
) -> None:
    """The script that the check runs beside a wheel, here beside no bundle and no compiler."""
    check = runpy.run_path(str(ROOT / "ci" / "check_wheel.py"))
    hidden = f"""
import blind
from pathlib import Path
blind.hide({check["ABSENT"]!r})
from pyfa import bundle
bundle.FOLDER = Path({str(tmp_path)!r})
"""
    script = hidden + check["FIRST_CALL"].format(absent=check["ABSENT"])
    problem = json.dumps([device, ["causal", "backward"], 4096, 128])
    command = [sys.executable, "-c", script, problem]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["origins"] == []
    assert kernel in found["missing"]
    assert "is bundled" in found["missing"]


@pytest.mark.parametrize(
    ("cuda", "hip", "ready", "driver", "warns"),
    [
        ("13.0", None, False, True, True),
        ("13.0", None, False, False, False),
        ("13.0", None, True, True, False),  # a machine with both
        (None, "6.4", False, True, False),
        (None, None, False, True, False),  # a CPU build: that is said elsewhere
    ],
)
def test_info_warns_of_a_torch_for_the_other_vendor(
    cuda: str | None, hip: str | None, ready: bool, driver: bool, warns: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: ready)
    if driver:
        (tmp_path / "kfd").touch()
    told = info.wrong_torch((tmp_path / "none", tmp_path / "kfd"))
    if warns:
        assert told is not None
        assert told.startswith(f"this PyTorch is a build for CUDA 13.0, and {tmp_path}/kfd says")
    else:
        assert told is None


def test_info_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "wrong_torch", lambda: "this PyTorch is for other machines")
    assert main(["info"]) == 0
    assert "warning: this PyTorch is for other machines" in capsys.readouterr().out
