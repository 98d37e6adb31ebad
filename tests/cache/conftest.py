"""A cache folder of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyfa import cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet, and a process that has not used one."""
    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYFA_CACHE_READONLY_DIRS", raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"
