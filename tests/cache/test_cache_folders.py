"""The code cache's folders: whom it trusts, full and read-only disks, locks, prebuilt ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import (
    DAMAGE,
    KEY,
    OTHER,
    ask,
    ask_quietly,
    expect_memory_only,
    names,
    needs_root,
    one_warning,
    place,
)

from pyfa import cache


def test_the_folder(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.directory() == home
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYFA_CACHE_DIR", "relative")
    assert cache.directory() == tmp_path / "relative"
    monkeypatch.delenv("PYFA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache.directory() == tmp_path / "xdg" / "pyfa"
    assert cache.why_unusable(cache.directory()) is None
    assert cache.entries() == []
    assert cache.clear() == []
    assert not (tmp_path / "xdg").exists(), "a look created the folder"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(home: Path, mode: int) -> None:
    ask(lambda: b"planted")
    home.chmod(mode)
    before = names(home)
    why = cache.why_unusable(home)
    assert why == f"{home} can be written by others (mode {mode:04o})"
    expect_memory_only(f"{home} can be written by others")
    assert cache.entries() == []
    assert cache.clear() == []
    assert names(home) == before


@needs_root
def test_a_folder_of_another_user_is_refused(home: Path) -> None:
    ask(lambda: b"planted")
    os.chown(home, 65534, 65534)
    before = names(home)
    assert "belongs to another user (uid 65534" in str(cache.why_unusable(home))
    expect_memory_only(f"{home} belongs to another user")
    assert names(home) == before


def test_no_home_and_no_such_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container under a uid that its passwd does not have."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("PYFA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    expect_memory_only("this user has no home folder; set PYFA_CACHE_DIR to a folder")
    assert cache.entries() == []
    assert cache.clear() == []


@needs_root
def test_an_entry_in_a_folder_of_another_user_is_not_read(home: Path) -> None:
    ask(lambda: b"planted")
    os.chown(place(home), 65534, 65534)
    assert ask_quietly(lambda: b"own").code == b"own"
    assert ask_quietly().code == b"own"


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_an_entry_in_a_folder_that_others_can_write_is_not_read(home: Path, mode: int) -> None:
    ask(lambda: b"planted")
    place(home).chmod(mode)
    assert [info.intact for info in cache.entries()] == [False]
    assert ask_quietly(lambda: b"own").code == b"own"


@pytest.mark.parametrize("name", ["meta.json", "code.hsaco", "source"])
def test_a_pipe_in_an_entry_is_not_waited_for(home: Path, name: str) -> None:
    ask(lambda: b"code")
    (place(home) / name).unlink()
    os.mkfifo(place(home) / name)
    found: list[cache.Entry] = []
    asking = threading.Thread(
        target=lambda: found.append(ask_quietly(lambda: b"again")), daemon=True
    )
    asking.start()
    asking.join(20)
    assert [entry.code for entry in found] == [b"again"]
    assert ask_quietly().code == b"again"


def test_a_file_in_the_folders_place(home: Path) -> None:
    home.write_text("")
    expect_memory_only(f"{home} is not a folder")


def test_a_file_in_the_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("")
    monkeypatch.setenv("PYFA_CACHE_DIR", str(home / "below"))
    expect_memory_only(f"{home}/below cannot be read: Not a directory")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename"])
def test_a_folder_that_cannot_be_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    real = getattr(os, call)

    def refuse(*args: object, **kwargs: object) -> object:
        if call == "open" and not int(args[1]) & os.O_CREAT:  # type: ignore[call-overload]
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    expect_memory_only(f"{home} cannot be written: {os.strerror(code)}")
    monkeypatch.undo()
    if home.exists():
        assert all(name.endswith(".lock") for name in names(home)), "a half entry was left behind"


def mount(path: Path, options: str) -> None:
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command to make a small disk with")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(home: Path) -> Iterator[Path]:
    """The cache folder on a disk of its own, of 256 KB."""
    mount(home, "size=256k,mode=700")
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk(disk: Path) -> None:
    third = cache.key("third", [], "", "")
    ask(lambda: b"earlier", third)
    fill(disk)
    assert ask_quietly(key=third).code == b"earlier"
    expect_memory_only(f"{disk} cannot be written: No space left on device")
    assert not list(disk.glob(cache._TEMPORARY + "*"))
    assert [info.key for info in cache.clear()] == [third]
    (disk / "filler").unlink()
    assert ask_quietly(lambda: b"code").path == place(disk) / "code.hsaco"


def test_a_read_only_disk(disk: Path) -> None:
    third = cache.key("third", [], "", "")
    ask(lambda: b"earlier", third)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert ask_quietly(key=third) == cache.Entry(
        b"earlier", place(disk, third) / "code.hsaco", "cache"
    )
    expect_memory_only(f"{disk} cannot be written: Read-only file system")
    assert cache.clear() == []
    assert [info.key for info in cache.entries()] == [third]


# ---- locks ----


@pytest.fixture
def held_lock(home: Path) -> Iterator[Path]:
    """The lock of ``KEY``, held by somebody else."""
    home.mkdir(mode=0o700)
    path = home / f".{place(home).name}.lock"
    holder = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    yield path
    assert os.stat(path).st_ino == os.fstat(holder).st_ino, "another process's lock was replaced"
    os.close(holder)


def test_a_wait_is_told_and_ends_in_a_compile(
    held_lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cache, "_TELL_SECONDS", 0.3)
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.8)
    began = time.monotonic()
    entry = ask_quietly(lambda: b"code")
    assert 0.8 <= time.monotonic() - began < 5
    assert entry.origin == "built"
    assert ask_quietly().origin == "cache", "what was compiled without the lock is kept as well"
    told, gave_up = [record.getMessage() for record in caplog.records if record.name == "pyfa"]
    assert told.startswith(f"waiting for another process to compile attn_fwd-{KEY}: 0 s of at most")
    assert gave_up == f"compiling attn_fwd-{KEY} here: its lock was not free for 1 s"


def test_a_waiting_process_takes_the_entry_when_it_appears(
    held_lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 10.0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PYFA_CACHE_DIR", str(home / "elsewhere"))
        ask(lambda: b"code")
    publish = threading.Timer(0.3, os.rename, (place(home / "elsewhere"), place(home)))
    publish.start()
    assert ask_quietly().origin == "cache"
    publish.join()


# ---- read-only folders ----


@pytest.fixture
def prebuilt(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``KEY`` in it that is to be read and not written, after one with nothing."""
    path, nothing = tmp_path / "prebuilt", tmp_path / "nothing"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PYFA_CACHE_DIR", str(path))
        ask(lambda: b"prebuilt")
    nothing.mkdir(mode=0o755)
    path.chmod(0o755)
    monkeypatch.setenv("PYFA_CACHE_READONLY_DIRS", f"{nothing}{os.pathsep}{path}")
    return path


def test_a_read_only_folder_is_read_and_never_written(home: Path, prebuilt: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (prebuilt, *prebuilt.rglob("*"))}
    found = cache.Entry(b"prebuilt", place(prebuilt) / "code.hsaco", "readonly")
    assert ask_quietly() == found
    assert not home.exists()
    assert ask_quietly(lambda: b"mine", OTHER).path == place(home, OTHER) / "code.hsaco"
    assert [info.key for info in cache.clear()] == [OTHER]
    assert ask_quietly() == found
    assert before == {path: path.stat().st_mtime_ns for path in (prebuilt, *prebuilt.rglob("*"))}


def test_a_read_only_folder_serves_where_the_cache_is_refused(home: Path, prebuilt: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    assert ask_quietly().origin == "readonly"


def refuse_group(path: Path) -> None:
    path.chmod(0o775)


def refuse_owner(path: Path) -> None:
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (refuse_group, "can be written by others"),
        pytest.param(refuse_owner, "belongs to another user", marks=needs_root),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_a_read_only_folder_that_is_refused(
    home: Path, prebuilt: Path, change: Callable[[Path], None], why: str
) -> None:
    change(prebuilt)
    with one_warning(f"{prebuilt} {why}"):
        assert ask(lambda: b"code").origin == "built"
        assert ask(lambda: b"code", OTHER).origin == "built"


@pytest.mark.parametrize("kind", ["a changed byte", "others can write the code"])
def test_damage_in_a_read_only_folder_is_a_miss(home: Path, prebuilt: Path, kind: str) -> None:
    DAMAGE[kind](place(prebuilt))
    assert ask_quietly(lambda: b"code").path == place(home) / "code.hsaco"
    assert place(prebuilt).exists()


@needs_root
def test_only_a_read_only_folder_may_be_roots(
    home: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(lambda: b"mine", OTHER)
    assert stat.S_IMODE(prebuilt.stat().st_mode) == 0o755
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert "belongs to another user (uid 0" in str(cache.why_unusable(prebuilt))
    assert cache.why_unusable(prebuilt, readonly=True) is None
    assert ask_quietly().origin == "readonly"
