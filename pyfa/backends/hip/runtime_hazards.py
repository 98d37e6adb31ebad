"""The emulator's gate for wait states, for those who build code objects."""

from __future__ import annotations


def faults(data: bytes) -> list[str]:
    """A sentence for each pair of instructions of a code object that is too close together."""
    from ...emulator import hazards

    return [str(found) for found in hazards.check(data)]
