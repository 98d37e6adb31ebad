"""What tests of the CUDA kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def kept_reports(monkeypatch: pytest.MonkeyPatch, code_of_tests: Path) -> None:
    """``ptxas.compiled`` finds what an earlier session compiled."""
    monkeypatch.setenv("PYFA_CACHE_DIR", str(code_of_tests))
