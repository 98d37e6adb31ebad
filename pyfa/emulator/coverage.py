"""Which instructions of which kernels launches have executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyfa.emulator.counters import Counters
from pyfa.emulator.machine import LoadedKernel


@dataclass
class Covered:
    """Of one code object: its kernel, how many instructions it has, the addresses of those that
    were executed."""

    kernel: str
    static: int
    executed: set[int] = field(default_factory=set)


class Coverage:
    """``objects``: what was launched, by the sha256 of its code object."""

    def __init__(self) -> None:
        self.objects: dict[str, Covered] = {}

    def note(self, digest: str, kernel: LoadedKernel, counters: Counters) -> None:
        """``kernel`` was launched and executed what ``counters`` holds."""
        found = self.objects.get(digest)
        if found is None:
            found = Covered(kernel.kernel.name, len(kernel.code.names))
            self.objects[digest] = found
        found.executed.update(counters.executed)

    def add(self, other: Mapping[str, Covered]) -> None:
        """What another process has launched."""
        for digest, covered in other.items():
            mine = self.objects.setdefault(digest, Covered(covered.kernel, covered.static))
            mine.executed |= covered.executed

    def by_kernel(self) -> dict[str, tuple[int, int, int]]:
        """By kernel: code objects that ran, their instructions, those that were executed."""
        return {
            name: _sums(each for each in self.objects.values() if each.kernel == name)
            for name in sorted({each.kernel for each in self.objects.values()})
        }


def _sums(objects: Iterable[Covered]) -> tuple[int, int, int]:
    given = list(objects)
    return len(given), sum(x.static for x in given), sum(len(x.executed) for x in given)
