"""The emulator's check of wait states, used when code objects are built."""

from __future__ import annotations


def faults(data: bytes) -> list[str]:
    """Return a sentence for each pair of instructions of a code object that are too close
    together."""
    from ...emulator import hazards

    return [str(found) for found in hazards.check(data)]
