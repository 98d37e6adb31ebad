"""Faults planted in a kernel's source, and what finds them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from pyfa.backends.hip import code
from pyfa.conformance import build, cases, examine
from pyfa.emulator import EmulatorError, native
from pyfa.plan import Plan

Replace = Callable[[str, str], None]


def sources(monkeypatch: pytest.MonkeyPatch, folder: Path, kernel: str) -> Iterator[Replace]:
    """Yields what replaces a snippet of the source of every plan of ``kernel``.

    The snippet must occur exactly once. Code objects go to a cache of their own.
    """
    native.load()
    monkeypatch.setenv("PYFA_CACHE_DIR", str(folder))
    original = code.source_of

    def replace(snippet: str, other: str) -> None:
        def changed(plan: Plan) -> str:
            text = original(plan)
            if plan.kernel != kernel:
                return text
            assert text.count(snippet) == 1, f"the kernel has {text.count(snippet)} × {snippet!r}"
            return text.replace(snippet, other)

        monkeypatch.setattr(code, "source_of", changed)
        code.load.cache_clear()

    yield replace
    code.load.cache_clear()


def faults_found(wanted: Iterable[cases.Case]) -> list[str]:
    """What the emulator or the rule finds wrong, case by case."""
    found = []
    for case in wanted:
        try:
            checks = examine.examine(
                examine.Expected(build.build(case)), "emulator", torch.device("cpu")
            ).checks
        except EmulatorError as error:
            found.append(str(error))
        else:
            found += [check.message for check in checks if not check.passed]
    return found
