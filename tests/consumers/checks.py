"""What the programs of this folder share: a line of JSON for each check."""

from __future__ import annotations

import json

import torch


def check(name: str, found: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-5) -> None:
    """The largest difference, relative to the largest value that is wanted."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{name}: {tuple(found.shape)} for {tuple(wanted.shape)}")
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    error = float(difference) if bool(difference.isfinite()) else 1e9
    print(json.dumps({"name": name, "error": error, "limit": limit}), flush=True)
