"""``pyfa compat``: what it writes works by name, is found by importlib.metadata, and goes again."""

from __future__ import annotations

import csv
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyfa import __version__, cli
from pyfa.compat import (
    bert_padding,
    fa2,
    fa2_extension,
    fa2_interface,
    fa3,
    fa3_interface,
    fa4,
    fa4_interface,
    rotary,
    shim,
)

STATES = "absent", "absent", "absent"
WRITTEN = "installed", "installed", "installed"


# Functions that pyfa.compat's own modules share.
_FOR_OTHER_MODULES = {"attend", "attend_cache", "their_lse", "refuse_missing", "pyfas_window"}


def states(target: Path | None) -> tuple[str, ...]:
    return tuple(each.state for each in shim.status(target))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def asked(folder: Path, code: str) -> str:
    """What ``code`` prints in a process that finds ``folder`` first."""
    paths = os.pathsep.join([str(folder), *sys.path])
    variables = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_names_that_people_import(tmp_path: Path) -> None:
    shim.install(tmp_path)
    code = """
import json
import flash_attn, flash_attn_interface, flash_attn.cute
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
from flash_attn.cute.interface import flash_attn_combine
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, flash_attn_varlen_func
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn_2_cuda import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd
from flash_attn_3.flash_attn_interface import get_scheduler_metadata
from importlib.metadata import packages_distributions, version
import pyfa.compat.fa2, pyfa.compat.fa3, pyfa.compat.fa4
assert flash_attn.flash_attn_func is pyfa.compat.fa2.flash_attn_func
assert flash_attn_interface.flash_attn_func is pyfa.compat.fa3.flash_attn_func
assert flash_attn.cute.flash_attn_func is pyfa.compat.fa4.flash_attn_func
names = "flash_attn", "flash-attn", "flash_attn_3", "flash-attn-4"
found = packages_distributions()
print(json.dumps({
    "versions": [version(name) for name in names] + [flash_attn.__version__],
    "flash_attn": sorted(set(found["flash_attn"])),
    "interface": sorted(set(found["flash_attn_interface"])),
}))
"""
    found = json.loads(asked(tmp_path, code))
    versions = [f"{x}+pyfa.{__version__}" for x in ("2.8.3", "2.8.3", "3.0.0", "4.0.0", "2.8.3")]
    assert found["versions"] == versions
    assert found["flash_attn"] == ["flash_attn", "flash_attn_4"]
    assert found["interface"] == ["flash_attn_3"]


def test_every_public_name_is_handed_on(tmp_path: Path) -> None:
    """``from … import *`` hands on what is in ``__all__``: nothing else may be meant for users."""
    for module in (fa2, fa3, fa4, bert_padding, rotary, fa2_extension):
        own = {
            name
            for name, x in vars(module).items()
            if inspect.isfunction(x) and x.__module__ == module.__name__ and name[0] != "_"
        } - _FOR_OTHER_MODULES
        assert own <= set(module.__all__)
    for public, interface in ((fa2, fa2_interface), (fa3, fa3_interface), (fa4, fa4_interface)):
        assert set(public.__all__) < set(interface.__all__)


def test_what_is_recorded_is_what_is_there(tmp_path: Path) -> None:
    shim.install(tmp_path)
    recorded = {
        row[0]
        for record in tmp_path.glob("*.dist-info/RECORD")
        for row in csv.reader(record.read_text().splitlines())
    }
    assert recorded == files(tmp_path)


def test_installing_twice_changes_nothing_and_removing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbor.py").write_text("")
    assert states(tmp_path) == STATES
    assert tuple(each.state for each in shim.install(tmp_path)) == WRITTEN
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in files(tmp_path)}
    assert tuple(each.state for each in shim.install(tmp_path)) == WRITTEN
    assert before == {path: (tmp_path / path).stat().st_mtime_ns for path in files(tmp_path)}
    asked(tmp_path, "import flash_attn.cute, flash_attn_interface")  # leaves bytecode behind
    assert any(path.endswith(".pyc") for path in files(tmp_path))
    assert [each.name for each in shim.remove(tmp_path)] == [x.name for x in shim.DISTRIBUTIONS]
    assert [path.name for path in tmp_path.iterdir()] == ["neighbor.py"]
    assert files(tmp_path) == {"neighbor.py"}
    assert shim.remove(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        "flash_attn/__init__.py",
        "flash_attn/cute/__init__.py",
        "flash_attn_interface.py",
        "flash_attn-2.7.0.dist-info/METADATA",
        "Flash.Attn_3-3.0.0.dist-info/METADATA",
    ],
)
def test_it_never_overwrites(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("theirs")
    with pytest.raises(shim.ShimError, match="never overwritten"):
        shim.install(tmp_path)
    assert files(tmp_path) == {path}
    assert shim.remove(tmp_path) == []
    assert (tmp_path / path).read_text() == "theirs"


@pytest.mark.parametrize("path", ["flash_attn/__init__.py", "flash_attn_interface.py"])
def test_a_package_elsewhere_on_the_path_counts(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (there / path).parent.mkdir(parents=True)
    (there / path).write_text("")
    monkeypatch.setattr(shim, "purelib", lambda: here)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.syspath_prepend(str(there))
    with pytest.raises(shim.ShimError, match=r"installed already \(.*there"):
        shim.install()
    assert files(here) == set()
    # A folder that was asked for by name is its own business.
    shim.install(here)
    assert states(here) == WRITTEN


def test_the_environments_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "purelib", lambda: tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shim.install()
    assert states(None) == WRITTEN
    shim.install()
    shim.remove()
    assert states(None) == STATES
    assert files(tmp_path) == set()


def test_changed_files_stay(tmp_path: Path) -> None:
    shim.install(tmp_path)
    mine = tmp_path / "flash_attn" / "bert_padding.py"
    mine.write_text("# patched\n")
    assert states(tmp_path)[0] == "changed"
    before = files(tmp_path)
    for action in (shim.remove, shim.install):
        with pytest.raises(shim.ShimError, match=r"changed since .*bert_padding\.py"):
            action(tmp_path)
        assert files(tmp_path) == before
    assert mine.read_text() == "# patched\n"


def test_files_of_others_beside_its_own_stay(tmp_path: Path) -> None:
    shim.install(tmp_path)
    (tmp_path / "flash_attn" / "losses.py").write_text("theirs")
    shim.remove(tmp_path)
    assert files(tmp_path) == {"flash_attn/losses.py"}


def test_a_record_cannot_reach_outside(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    shim.install(folder)
    victim = tmp_path / "victim.py"
    victim.write_text("")
    (record,) = folder.glob("flash_attn-*.dist-info/RECORD")
    record.write_text(record.read_text() + f"../victim.py,{shim._digest(b'')},0\n")
    shim.remove(folder)
    assert victim.exists()


def test_another_version_and_an_interrupted_one_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shim, "__version__", "0.0.1")
        shim.install(tmp_path)
    assert states(tmp_path) == ("outdated",) * 3
    shim.install(tmp_path)
    assert states(tmp_path) == WRITTEN
    assert not list(tmp_path.glob("*0.0.1*"))
    (tmp_path / "flash_attn_interface.py").unlink()
    assert states(tmp_path) == ("installed", "outdated", "installed")
    shim.install(tmp_path)
    assert states(tmp_path) == WRITTEN


def test_a_write_cut_short_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = Path.write_bytes

    def until_the_fifth(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 5:
            raise OSError("no space left")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", until_the_fifth)
        with pytest.raises(OSError, match="no space"):
            shim.install(tmp_path)
    assert states(tmp_path)[0] == "outdated"
    shim.remove(tmp_path)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_one_alone(tmp_path: Path, name: str) -> None:
    """The others are neither written, nor in the way, nor removed."""
    number = ("fa2", "fa3", "fa4").index(name)
    shim.install(tmp_path, only=[name])
    expected = tuple("installed" if i == number else "absent" for i in range(3))
    assert states(tmp_path) == expected
    foreign = shim.DISTRIBUTIONS[(number + 1) % 3].name
    (tmp_path / f"{foreign}-9.9.dist-info").mkdir()
    (tmp_path / f"{foreign}-9.9.dist-info" / "METADATA").write_text("theirs")
    assert [each.state for each in shim.install(tmp_path, only=[name])] == ["installed"]
    with pytest.raises(shim.ShimError, match="never overwritten"):
        shim.install(tmp_path)
    others = [each for each in ("fa2", "fa3", "fa4") if each != name]
    assert shim.remove(tmp_path, only=others) == []
    assert states(tmp_path)[number] == "installed"
    assert [each.name for each in shim.remove(tmp_path, only=[name])] == [
        shim.DISTRIBUTIONS[number].name
    ]
    assert files(tmp_path) == {f"{foreign}-9.9.dist-info/METADATA"}


def test_the_command_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--target", str(tmp_path), "--json"]
    assert cli.main(["compat", "install", "--only", "fa2", *where]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["packages"]] == ["flash_attn"]
    assert states(tmp_path) == ("installed", "absent", "absent")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--target", str(tmp_path)]
    assert cli.main(["compat", *where]) == 0
    assert "not installed" in capsys.readouterr().out
    assert cli.main(["compat", "install", *where]) == 0
    assert "written" in capsys.readouterr().out
    assert cli.main(["compat", *where, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in report["packages"]] == list(WRITTEN)
    assert cli.main(["compat", "remove", *where]) == 0
    assert "removed" in capsys.readouterr().out
    assert files(tmp_path) == set()
    (tmp_path / "flash_attn_interface.py").write_text("")
    assert cli.main(["compat", "install", *where]) == 1
    assert "never overwritten" in capsys.readouterr().err
