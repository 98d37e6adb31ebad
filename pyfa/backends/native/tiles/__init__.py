"""Tiles, one file per arch: what its kernels are compiled with, each row with its reason.

Fields have the names of the kernels' constants in lower case. An arch is known if it has a file
here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

GROUP = 16  # keys of a step of decode; splits of the keys are multiples of it
Pair = tuple[int, int]  # head_dim and head_dim_v that a kernel is compiled for


@functools.cache
def archs(prefix: str) -> tuple[str, ...]:
    """Return the archs that begin with ``prefix`` and have a file here, the oldest first."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    found = [name.replace("sm", "sm_") for name in names if name.startswith(prefix)]
    return tuple(sorted(found, key=lambda name: (len(name), name)))


def of(arch: str) -> Any:
    """Return ``TILES`` from the file of ``arch``."""
    return importlib.import_module(f".{arch.replace('_', '')}", __name__).TILES


def constants_of(tiles: Any) -> Mapping[str, int]:
    """Return a row of tiles as the kernels' constants."""
    return {name.upper(): int(value) for name, value in tiles._asdict().items()}
