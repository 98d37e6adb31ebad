"""Save the results of these scripts together with a description of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyfa import bench

RESULTS = Path(__file__).parent / "results"


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write ``results`` beside their environment to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    bench.write(path, results)
    return path
