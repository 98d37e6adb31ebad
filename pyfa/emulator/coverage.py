"""Records which instructions of which kernels launches have executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyfa.emulator.counters import Counters
from pyfa.emulator.machine import LoadedKernel


@dataclass
class Covered:
    """One code object: its kernel, the number of its instructions, and the addresses of those that
    were executed."""

    kernel: str
    static: int
    executed: set[int] = field(default_factory=set)


class Coverage:
    """The instructions that were executed. ``objects`` holds the launched code objects, by
    sha256."""

    def __init__(self) -> None:
        self.objects: dict[str, Covered] = {}

    def note(self, digest: str, kernel: LoadedKernel, counters: Counters) -> None:
        """Record a launch of ``kernel`` and the instructions that ``counters`` lists as
        executed."""
        found = self.objects.get(digest)
        if found is None:
            found = Covered(kernel.kernel.name, len(kernel.code.names))
            self.objects[digest] = found
        found.executed.update(counters.executed)

    def add(self, other: Mapping[str, Covered]) -> None:
        """Add the record of another process."""
        for digest, covered in other.items():
            mine = self.objects.setdefault(digest, Covered(covered.kernel, covered.static))
            mine.executed |= covered.executed

    def by_kernel(self) -> dict[str, tuple[int, int, int]]:
        """Return, by kernel, the code objects that ran, their instructions, and those that were
        executed."""
        return {
            name: _sums(each for each in self.objects.values() if each.kernel == name)
            for name in sorted({each.kernel for each in self.objects.values()})
        }


def _sums(objects: Iterable[Covered]) -> tuple[int, int, int]:
    given = list(objects)
    return len(given), sum(x.static for x in given), sum(len(x.executed) for x in given)
