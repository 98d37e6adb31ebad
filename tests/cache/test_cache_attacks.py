"""``benchmarks/cache_attacks.py``, a few rounds of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cache_attacks.py"


@pytest.mark.skipif(sys.platform != "linux", reason="it forks, kills and looks into /proc")
def test_attacks() -> None:
    command = [sys.executable, str(PROGRAM), "--rounds", "40", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    outcome = json.loads(done.stdout)
    assert outcome["wrong"] == []
    assert outcome["killed"] == 3 * 40
    assert done.returncode == 0
