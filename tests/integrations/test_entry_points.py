"""Plug-ins that pyfa's metadata names: found by their programs, not imported by pyfa."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize("name", GROUPS)
def test_the_entry_point_leads_to_register(name: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    line = project.split(f'[project.entry-points."{GROUPS[name]}"]\n')[1].splitlines()[0]
    key, value = line.replace('"', "").split(" = ")
    point = importlib.metadata.EntryPoint(key, value, GROUPS[name])
    assert point.load() is importlib.import_module(f"pyfa.integrations.{name}").register


@pytest.mark.parametrize("name", GROUPS)
def test_importing_pyfa_does_not_import_the_plugin(name: str) -> None:
    code = f"import sys, pyfa; sys.exit(any({name!r} in each for each in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
