"""What tests of the CUDA kernels share."""

from __future__ import annotations

import pytest

from pyfa.backends.cuda import plans


@pytest.fixture
def preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that have not passed conformance on a GPU yet."""
    monkeypatch.setattr(plans, "PREVIEW", True)
