"""Which of many checks of one kind run on a pull request. At night all of them run.

With an empty cache, compiling every CUDA plan and every kernel with a planted fault takes most
of an hour of two cores. ``docs/ci.md`` lists what takes turns.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

Thing = TypeVar("Thing")
ALL = "PYFA_TEST_ALL"


def all_run() -> bool:
    """Whether nothing is left to the night."""
    return os.environ.get(ALL) == "1"


def cases(every: Iterable[Hashable], night: Iterable[Hashable]) -> list[Any]:
    """Cases, to parametrize by; those of ``night`` run only there. They take long to compile, and
    others reach all but the widest of the same source's code."""
    found, left = list(every), set(night)
    assert left < set(found)
    return [pytest.param(x, marks=pytest.mark.night) if x in left else x for x in found]


def faults(every: Mapping[str, tuple[str, ...]], night: Iterable[str]) -> list[Any]:
    """Names of faults, to parametrize by; each has first the case that shows it. Those of the cases
    of ``night`` run only there."""
    return cases(every, {name for name, (case, *_) in every.items() if case in set(night)})


def some(
    every: Iterable[Thing], of: int, kind: Callable[[Thing], Hashable], name: Callable[[Thing], str]
) -> list[Thing]:
    """One in ``of`` of each kind, at least one, always the same; all if PYFA_TEST_ALL is 1.

    The order is that of the names' checksums, so that of two lists the same are taken.
    """
    things = list(dict.fromkeys(every))
    if all_run():
        return things
    kinds: dict[Hashable, list[Thing]] = defaultdict(list)
    for thing in sorted(things, key=lambda thing: zlib.crc32(name(thing).encode())):
        kinds[kind(thing)].append(thing)
    taken = {thing for alike in kinds.values() for thing in alike[: -(-len(alike) // of)]}
    return [thing for thing in things if thing in taken]
