"""Code objects that come with the package. They were checked when the package was built, and are
found by their digest.

The folder ``pyfa/_bundle`` holds one file per code object and ``manifest.json``. ``pyfa compile
--bundle`` makes it, and wheels contain it. A checkout has none until it is built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from .errors import CodeObjectError

SCHEMA = 2
FOLDER = Path(__file__).parent / "_bundle"


@functools.cache
def manifest() -> dict[str, Any]:
    """Return the bundle's manifest: ``{"schema": 2, "objects": {key: {…}}}``; no objects without a
    bundle, or if it has another schema.

    Each object has ``file``, ``sha256``, ``arch``, ``plan``, ``compiler`` and ``emulated``, the
    conformance cases that this digest passed in the emulator (none for cubins, which the emulator
    cannot run). Code for AMD also has ``kernel``, its metadata, because reading them from the file
    needs packages that a machine without a compiler lacks.
    """
    try:
        data: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    except FileNotFoundError:
        return {"schema": SCHEMA, "objects": {}}
    if data.get("schema") != SCHEMA:
        text = "%s is not used: expected schema %d, got %s; rebuild it with pyfa compile --bundle"
        logging.getLogger("pyfa").warning(text, FOLDER, SCHEMA, data.get("schema"))
        return {"schema": SCHEMA, "objects": {}}
    return data


def entry(arch: str, key: str) -> dict[str, Any] | None:
    """Return what the bundle lists under this key, or None."""
    found: dict[str, Any] | None = manifest()["objects"].get(key)
    return found if found is not None and found["arch"] == arch else None


def has(arch: str, key: str) -> bool:
    """Return whether the bundle lists a code object with this key."""
    return entry(arch, key) is not None


def archs() -> frozenset[str]:
    """Return the archs for which the bundle contains code."""
    return frozenset(found["arch"] for found in manifest()["objects"].values())


def find(arch: str, key: str) -> bytes | None:
    """Return the bundled code object with this key, or None.

    Raises ``CodeObjectError`` if its bytes are not those that were verified.
    """
    found = entry(arch, key)
    if found is None:
        return None
    data: bytes = (FOLDER / found["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != found["sha256"]:
        raise CodeObjectError(f"{FOLDER / found['file']} is not the file that was verified")
    return data
