"""Faults planted in a kernel's source."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyfa.backends.hip import code
from pyfa.emulator import native
from pyfa.plan import Plan

Plant = Callable[[str, str, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Plant]:
    """Replaces a snippet, which must occur exactly once, in the source of every plan of a kernel.

    Code objects go to a cache of their own.
    """
    native.load()
    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path))
    original = code.source_of

    def plant(kernel: str, snippet: str, other: str) -> None:
        def changed(plan: Plan) -> str:
            text = original(plan)
            if plan.kernel != kernel:
                return text
            assert text.count(snippet) == 1, f"the kernel has {text.count(snippet)} × {snippet!r}"
            return text.replace(snippet, other)

        monkeypatch.setattr(code, "source_of", changed)
        code.load.cache_clear()

    yield plant
    code.load.cache_clear()
