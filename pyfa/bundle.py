"""Code objects that come with the package: verified when it was built, found by their digest.

The folder ``pyfa/_bundle`` holds one file per code object and ``manifest.json``. ``pyfa compile
--bundle`` makes it, and wheels contain it. A checkout has none until it is built.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from .errors import CodeObjectError

SCHEMA = 1
FOLDER = Path(__file__).parent / "_bundle"


@functools.cache
def manifest() -> dict[str, Any]:
    """Return the bundle's manifest: ``{"schema": 1, "objects": {key: {…}}}``; no objects without a
    bundle.

    Each object has ``file``, ``sha256``, ``arch``, ``plan``, ``compiler`` and ``emulated``, the
    conformance cases that this digest passed in the emulator.
    """
    try:
        data: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    except FileNotFoundError:
        return {"schema": SCHEMA, "objects": {}}
    if data.get("schema") != SCHEMA:
        raise CodeObjectError(f"{FOLDER} has schema {data.get('schema')}, expected {SCHEMA}")
    return data


def has(arch: str, key: str) -> bool:
    """Return whether the bundle lists a code object with this key."""
    entry = manifest()["objects"].get(key)
    return entry is not None and entry["arch"] == arch


def find(arch: str, key: str) -> bytes | None:
    """Return the bundled code object with this key, or None.

    Raises ``CodeObjectError`` if its bytes are not those that were verified.
    """
    if not has(arch, key):
        return None
    entry = manifest()["objects"][key]
    data: bytes = (FOLDER / entry["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CodeObjectError(f"{FOLDER / entry['file']} is not the file that was verified")
    return data
