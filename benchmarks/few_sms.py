"""Makes the grids of CUDA's persistent blocks as small as on a GPU with few SMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyfa.backends.cuda import plans


def run_on(sms: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make grids for so many SMs from now on, or for the device's own if 0. Each block then takes
    many work tiles, also in small calls.

    A test passes ``monkeypatch.setattr`` as ``replace``, which undoes it.
    """
    grid_of = plans.grid_of
    replace(plans, "grid_of", lambda plan, blocks, units: grid_of(plan, blocks, sms or units))
