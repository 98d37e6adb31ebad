"""An interrupted ``pyfa compile --out``: what was built is there, and is not built again."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyfa.backends.hip import code
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.backends.native.plans import name_of
from pyfa.cli import bundling, main
from pyfa.plan import Plan

KERNELS = ("append", "combine", "gaps")  # the fastest to compile
Compile = Callable[[], list[Plan]]


def quick_plans() -> list[Plan]:
    return [plan for plan in catalog.all_plans(TARGET, "gfx942") if name_of(plan) in KERNELS]


@pytest.fixture(scope="module")
def true(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a true code object of each kernel."""
    folder = tmp_path_factory.mktemp("true")
    for plan in quick_plans():
        (folder / name_of(plan)).write_bytes(code.load(plan, "gfx942").data)
    return folder


def made(true: Path, plan: Plan) -> bytes:
    """What the compiler of these tests makes of a plan: another end for each."""
    return (true / name_of(plan)).read_bytes() + str(plan).encode()


# ``pyfa compile`` with that compiler; it kills itself at the third plan, or as soon as the third
# file is written.
KILLED = """
import os, signal, sys
from pathlib import Path

from pyfa.backends.hip import code
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.backends.native.plans import name_of
from pyfa.cli import main

true, kernels, kill, out = sys.argv[1:]
plans = [plan for plan in catalog.all_plans(TARGET, "gfx942") if name_of(plan) in kernels.split()]
replace, replaced = os.replace, []

def build(plan, arch):
    if kill == "plan" and plan == plans[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return (Path(true) / name_of(plan)).read_bytes() + str(plan).encode()

def replace_until(source, target):
    if str(target).endswith(".hsaco"):
        replaced.append(target)
        if kill == "file" and len(replaced) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

catalog.chosen_plans = lambda *_: plans
code.build = build
os.replace = replace_until
os.cpu_count = lambda: 1  # one plan after another
main(["compile", "--arch", "gfx942", "--out", out])
"""


@pytest.fixture
def compile_here(true: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Runs ``pyfa compile --out`` here, and returns the plans that were built."""
    built: list[Plan] = []

    def build(plan: Plan, arch: str) -> bytes:
        built.append(plan)
        return made(true, plan)

    def run() -> list[Plan]:
        built.clear()
        assert main(["compile", "--arch", "gfx942", "--out", str(tmp_path / "objects")]) == 0
        return built

    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "chosen_plans", lambda *_: quick_plans())
    monkeypatch.setattr(code, "build", build)
    return run


def kill(what: str, true: Path, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(true), " ".join(KERNELS), what, str(folder / "objects")],
        env={**os.environ, "PYFA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def inodes(folder: Path) -> dict[str, int]:
    """The code objects of a folder; one that is written again has another inode."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.hsaco")}


def check(folder: Path, true: Path) -> None:
    """Every code object is there, byte for byte, and nothing else."""
    wanted = {}
    for plan in quick_plans():
        data = made(true, plan)
        wanted[f"{name_of(plan)}-gfx942-{hashlib.sha256(data).hexdigest()[:16]}.hsaco"] = data
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def test_a_run_that_was_killed_resumes(true: Path, tmp_path: Path, compile_here: Compile) -> None:
    """While it compiled its third plan: the code of two is there, and stays as it is."""
    kill("plan", true, tmp_path)
    before = inodes(tmp_path / "objects")
    assert len(before) == 2
    assert sorted(compile_here(), key=str) == sorted(quick_plans()[2:], key=str)
    assert inodes(tmp_path / "objects").items() > before.items()
    check(tmp_path / "objects", true)


def test_half_a_file_never_has_a_code_objects_name(
    true: Path, tmp_path: Path, compile_here: Compile
) -> None:
    """Killed between writing the third file and giving it its name."""
    kill("file", true, tmp_path)
    assert len(inodes(tmp_path / "objects")) == 2
    assert len([*(tmp_path / "objects").iterdir()]) == 3
    assert sorted(compile_here(), key=str) == sorted(quick_plans()[3:], key=str)
    check(tmp_path / "objects", true)


def test_what_does_not_match_is_written_again(
    true: Path, tmp_path: Path, compile_here: Compile
) -> None:
    assert len(compile_here()) == len(quick_plans())
    short, *others = sorted(before := inodes(tmp_path / "objects"))
    path = tmp_path / "objects" / short
    path.write_bytes(path.read_bytes()[:-1])
    assert compile_here() == []
    check(tmp_path / "objects", true)
    after = inodes(tmp_path / "objects")
    assert [after[name] for name in others] == [before[name] for name in others]


def test_an_error_keeps_what_was_built(
    tmp_path: Path, compile_here: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the last plan, say."""
    build = code.build

    def failing(plan: Plan, arch: str) -> bytes:
        if plan == quick_plans()[-1]:
            raise MemoryError
        return build(plan, arch)

    monkeypatch.setattr(code, "build", failing)
    with pytest.raises(MemoryError):
        compile_here()
    assert len(inodes(tmp_path / "objects")) == len(quick_plans()) - 1


def test_plans_with_equal_code_share_a_file(tmp_path: Path) -> None:
    """They may be written at the same time: neither takes the other's unfinished file."""
    row = {"kernel": "append", "sha256": "0" * 64, "data": b"code", "bundled": {"arch": "gfx942"}}
    rows = [{**row, "key": "a" * 64}, {**row, "key": "b" * 64}]
    (tmp_path / f".{'a' * 64}.part").write_bytes(b"other code, as yet unfinished")
    bundling.write(tmp_path, rows[1:])
    assert len([*tmp_path.iterdir()]) == 2
    bundling.write(tmp_path, rows)
    assert next(tmp_path.glob("*.hsaco")).read_bytes() == b"code"
