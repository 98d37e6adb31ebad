"""What the programs of this folder share: a line of JSON for each check, calls that are counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

import pyfa.api


def report(name: str, error: float, limit: float = 0.0) -> None:
    print(json.dumps({"name": name, "error": error, "limit": limit}), flush=True)


def check(name: str, found: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-5) -> None:
    """The largest difference, relative to the largest value that is wanted."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{name}: {tuple(found.shape)} for {tuple(wanted.shape)}")
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    report(name, float(difference) if bool(difference.isfinite()) else 1e9, limit)


def declined(words: str, call: Callable[[], Any]) -> None:
    """Check that ``call`` raises ``NotImplementedError`` with ``words``."""
    try:
        call()
    except NotImplementedError as error:
        if words in str(error):
            return
        raise
    raise AssertionError(f"{words}: not declined")


def calls_of(*names: str) -> list[dict[str, Any]]:
    """The named arguments of all calls of these functions of pyfa from now on."""
    seen: list[dict[str, Any]] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            seen.append(named)
            return function(*arguments, **named)

        return noted

    for name in names:
        setattr(pyfa.api, name, noting(getattr(pyfa.api, name)))
    return seen
