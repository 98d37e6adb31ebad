"""A block of a larger problem is the slice of the whole, on every backend that a CPU runs."""

import json
import os
import subprocess
import sys

import block_cases
import pytest


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_a_block_is_a_slice_of_the_whole(backend):
    assert block_cases.failures(backend) == []


@pytest.mark.night
def test_in_tritons_interpreter():
    """There the merging of outputs is asked too."""
    # Read when the kernels are decorated: a process of its own.
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, block_cases.__file__, "triton"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
