"""What every result file says of the machine and the versions it was measured with."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pyfa

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCHEMA = 1


def environment() -> dict[str, Any]:
    """CPU, cores, load, Python, torch, pyfa and its commit, date; the GPU where there is one."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyfa": pyfa.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write ``results`` beside their environment to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    data = {"schema": SCHEMA, "environment": environment(), **results}
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


def _commit() -> str:
    """The checkout's commit, with ``+`` where files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    dirty = git("status", "--porcelain", "--", "../pyfa")
    return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
