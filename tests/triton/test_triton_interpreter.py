"""The kernels against the reference, in Triton's interpreter: every feature at small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import turns

pytest.importorskip("triton")


# In one process: Triton and PyTorch take 4 s to import. What changes the kernels is last.
GROUPS = ("bands", "wide", "gradients", "trees", "float8", "hostile", "paths",
          "scores", "layouts", "mods", "masks", "latent", "lists", "invariance")  # fmt: skip


@pytest.mark.long
def test_interpreted_kernels_keep_the_rule() -> None:
    script = Path(__file__).with_name("interpreted.py")
    one_in = "1" if turns.all_run() else "3"
    done = subprocess.run(
        [sys.executable, str(script), one_in, *GROUPS],
        # numpy multiplies with OpenBLAS, whose kernels for Haswell and AMD's Zen add up a product
        # in an order that depends on the row's place in the matrix: then bits differ.
        env=os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "SandyBridge"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
