"""Save the results of these scripts together with a description of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyfa import bench
from pyfa.device import DEVICES

RESULTS = Path(__file__).parent / "results"


def gpu() -> str:
    """Return the short name of this machine's GPU for a file: h100 of "NVIDIA H100 80GB HBM3"."""
    name = torch.cuda.get_device_name()
    known = (each for each in DEVICES if each.split("-")[0] in name.replace(" ", ""))
    return next(known, name.split()[-1]).lower()


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write ``results`` beside their environment to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    bench.write(path, results)
    return path
