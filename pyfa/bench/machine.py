"""Describes the machine and the software versions, for every result file."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pyfa

SCHEMA = 1  # of every result file: raised when a field changes its meaning or goes
_PACKAGE = Path(pyfa.__file__).parent
_LINE = 240  # characters of a line of a result file, unless it is a record
_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"


def environment() -> dict[str, Any]:
    """Return the CPU, its cores and load, the versions of Python, torch and pyfa, pyfa's commit,
    the date, and the GPU if there is one."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": (gpu_state() or {}).get("driver_version"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": version_of("triton"),
        "pyfa": pyfa.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def gpu_state() -> dict[str, str] | None:
    """Return what nvidia-smi reports for the first GPU: driver, clocks in MHz, power in W and
    temperature."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    line = _said(command).splitlines()[:1]
    if not line or not torch.cuda.is_available():
        return None
    return dict(zip(_QUERY.split(","), (part.strip() for part in line[0].split(",")), strict=False))


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` with the schema number and their environment, one record per line.

    The file is replaced as a whole, so an interrupted run leaves the earlier file. In tracebacks,
    paths under the folder that contains pyfa are written relative to this folder.
    """
    data = {"schema": SCHEMA, "environment": environment(), **results}
    here = json.dumps(f"{_PACKAGE.parent}{os.sep}")[1:-1]
    text = to_text(data).replace(here, "") + "\n"
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text)
        return
    path = path.resolve()  # a link keeps pointing to the file
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def to_text(value: Any, indent: int = 0, *, record: bool = False) -> str:
    """Return ``value`` as JSON with one record per line, so that a diff shows which cases changed.

    A record is an element of a list and contains no list of records itself. Short values and lists
    of numbers take one line.
    """
    line = json.dumps(value)
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or len(line) <= _LINE:
        return line
    if record and not any(_holds_records(part) for part in (value, *parts)):
        return line
    if isinstance(value, list) and all(isinstance(part, (int, float)) for part in parts):
        return line
    inner = indent + 1
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {to_text(part, inner)}" for key, part in value.items()]
    else:
        rows = [to_text(part, inner, record=True) for part in parts]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(" " * inner + row for row in rows)
    return f"{begin}\n{body}\n{' ' * indent}{end}"


def _holds_records(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value)


def load(path: Path) -> dict[str, Any]:
    """Load a result file. Raises ``ValueError`` if the file is not a result file, or has another
    schema."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a result file of pyfa bench; {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: expected results of schema {SCHEMA}; got {schema}")
    result: dict[str, Any] = data
    return result


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


@functools.cache  # of the code that this process runs; asked for with each cell that is written
def _commit() -> str:
    """Return the checkout's commit, with ``+`` if files differ from it; "" outside a checkout."""
    git = ["git", "-C", str(_PACKAGE)]
    dirty = _said([*git, "status", "--porcelain", "--", "."])
    return _said([*git, "rev-parse", "--short", "HEAD"]) + ("+" if dirty else "")


def _said(command: list[str]) -> str:
    """Return the output of a command, "" if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
