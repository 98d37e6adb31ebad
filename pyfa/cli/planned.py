"""A plan in a few words, and its compile-time constants (``--verbose``)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

_DTYPES = {"0": "float16", "1": "bfloat16", "2": "float8"}
_SCORES = {"1": "score terms", "2": "dropout", "3": "softcap", "4": "ALiBi"}  # 0: none


def words(constants: Mapping[str, object]) -> str:
    """Return what distinguishes one plan of a kernel from the next: ``bfloat16, head_dim 128,
    paged``."""
    given = {name: str(value) for name, value in constants.items()}
    parts = []
    for name, form in (("DTYPE", "{}"), ("KEY_DTYPE", "{} keys"), ("OUT_DTYPE", "{} output")):
        if given.get(name) in _DTYPES:
            parts.append(form.format(_DTYPES[given[name]]))
    dims = [given[name] for name in ("HEAD_DIM", "HEAD_DIM_V") if given.get(name, "0") != "0"]
    if dims:
        parts.append(f"head_dim {'/'.join(dict.fromkeys(dims))}")
    if given.get("SCORE") in _SCORES:
        parts.append(_SCORES[given["SCORE"]])
    for name, word in (
        ("GENERAL", "score terms"),
        ("PAGED", "paged"),
        ("DETERMINISTIC", "deterministic"),
        ("BANDED", "chunks or a shifted window"),
    ):
        if given.get(name, "0") != "0":
            parts.append(word)
    return ", ".join(parts)


def of_text(plan: str) -> dict[str, str]:
    """Return the constants in ``str(plan)``, as an entry of the cache keeps it."""
    return dict(part.split("=", 1) for part in plan.split() if "=" in part)


def text(constants: Mapping[str, object]) -> str:
    """Return all constants as text."""
    return " ".join(f"{name}={value}" for name, value in constants.items())


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-v``."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also show the plans' compile-time constants"
    )
