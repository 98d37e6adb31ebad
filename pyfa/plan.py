"""``Plan``: how a backend will run a problem. Made by a pure function of problem and device."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """A backend's decision: which kernel or path, its compile-time constants, and why.

    ``constants``: the constants that the source is compiled with (tiles, stages, head-dim bucket),
    as sorted pairs so that plans can be hashed. ``notes``: sentences for ``explain``, such as a
    copy that will be made, or head dims rounded up to a bucket.
    """

    backend: str
    kernel: str
    constants: tuple[tuple[str, int | str | bool], ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        text = self.kernel
        if self.constants:
            text += " " + " ".join(f"{name}={value}" for name, value in self.constants)
        return text

    def as_dict(self) -> dict[str, object]:
        """Return the plan as plain data, for ``--json``."""
        return {
            "backend": self.backend,
            "kernel": self.kernel,
            "constants": dict(self.constants),
            "notes": list(self.notes),
        }
