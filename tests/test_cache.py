"""The code cache: one compile for many processes, nothing half-written served, nothing trusted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyfa import cache

KEY = cache.key("source", ["-O3"], "cc 1", "gfx942")
OTHER = cache.key("source", ["-O2"], "cc 1", "gfx942")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet, and a process that has not used one."""
    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYFA_CACHE_READONLY_DIRS", raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


def never() -> bytes:
    raise AssertionError("compiled although the code is known")


def ask(build: Callable[[], bytes] = never, key: str = KEY) -> cache.Entry:
    meta = {"compiler": "cc 1", "arch": "gfx942", "options": "-O3"}
    return cache.get_or_build(
        "attn_fwd", key, suffix=".hsaco", source="source", meta=meta, build=build
    )


def ask_quietly(build: Callable[[], bytes] = never, key: str = KEY) -> cache.Entry:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ask(build, key)


def place(home: Path, key: str = KEY) -> Path:
    return home / f"attn_fwd-{key}"


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()}


@contextlib.contextmanager
def one_warning(start: str) -> Iterator[None]:
    """The block warns once, a ``RuntimeWarning`` that opens with ``start``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert str(warning.message).startswith(f"pyfa's code cache: {start}")


def expect_memory_only(start: str) -> None:
    """Two kernels, each compiled once and kept in memory; one warning for both."""
    built = []

    def build() -> bytes:
        built.append(1)
        return b"compiled %d" % len(built)

    with one_warning(start):
        assert ask(build) == cache.Entry(b"compiled 1", None, "built")
        assert ask(build) == cache.Entry(b"compiled 1", None, "memory")
        assert ask(build, OTHER) == cache.Entry(b"compiled 2", None, "built")
        assert ask(build, OTHER) == cache.Entry(b"compiled 2", None, "memory")


# ---- processes ----

# Forked from a process that loads the cache and nothing else: forking needs one without threads,
# and a thousand forks need a small one.
PRELUDE = """
import json, os, random, re, shutil, signal, sys, threading, time, traceback, types
from pathlib import Path

package = types.ModuleType("pyfa")
package.__path__ = [sys.argv[1]]
sys.modules["pyfa"] = package
from pyfa import cache

home = Path(os.environ["PYFA_CACHE_DIR"])

def ask(source, build):
    key = cache.key(source, [], "cc", "arch")
    return cache.get_or_build("k", key, suffix=".bin", source=source, meta={}, build=build)

def fork(job):
    child = os.fork()
    if child:
        return child
    try:
        job()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def blob(source):
    return random.Random(source).randbytes(20_000)

def check_whole():
    # Independent of the cache's own check: all that has an entry's name has every byte.
    for path in home.glob("k-*"):
        source = (path / "source").read_text()
        assert (path / "code.bin").read_bytes() == blob(source), path
        assert json.loads((path / "meta.json").read_bytes())["entry"] == path.name, path
"""


def run_light(home: Path, body: str) -> str:
    """What ``body`` prints, run after the prelude in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(Path(cache.__file__).parent)],
        env={**os.environ, "PYFA_CACHE_DIR": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


RACE = """
    start, go = os.pipe()

    def job():
        os.close(go)
        os.read(start, 1)  # until the parent closes its end, for all at once

        def build():
            with open(home.with_name("builds"), "ab", 0) as log:
                log.write(b".")
            time.sleep(0.3)
            return b"compiled by %d" % os.getpid()

        entry = ask("source", build)
        home.with_name(f"got.{entry.origin}.{os.getpid()}").write_bytes(entry.code)

    children = [fork(job) for _ in range(16)]
    os.close(go)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


def test_many_processes_compile_once(home: Path) -> None:
    run_light(home, RACE)
    got = list(home.parent.glob("got.*"))
    assert (home.parent / "builds").read_bytes() == b"."
    assert sorted(path.name.split(".")[1] for path in got) == ["built"] + 15 * ["cache"]
    assert len({path.read_bytes() for path in got}) == 1


def test_without_locks_the_losers_of_the_race_use_the_winners(home: Path) -> None:
    no_locks = """
    def refuse(*args, **kwargs):
        raise OSError(37, "No locks available")

    cache.filelock.FileLock.acquire = refuse
    """
    run_light(home, textwrap.dedent(no_locks) + textwrap.dedent(RACE))
    got = list(home.parent.glob("got.*"))
    assert (home.parent / "builds").read_bytes() == 16 * b"."
    assert sorted(path.name.split(".")[1] for path in got) == ["built"] + 15 * ["cache"]
    (code,) = home.glob("k-*/code.bin")
    assert {path.read_bytes() for path in got} == {code.read_bytes()}
    assert len(list(home.iterdir())) == 1, "the losers left something behind"


def test_a_thousand_kills(home: Path) -> None:
    out = run_light(
        home,
        """
        chance = random.Random(20)
        sources = [f"source {number}" for number in range(6)]

        def job(seed):
            own = random.Random(seed)
            while True:
                source = own.choice(sources)
                entry = ask(source, lambda: blob(source))
                assert entry.code == blob(source)
                if own.random() < 0.5:
                    cache._discard(entry.path.parent)

        died = 0
        for round in range(500):
            children = [fork(lambda: job(2 * round + index)) for index in range(2)]
            time.sleep(chance.uniform(0.002, 0.03))
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                died += os.waitpid(child, 0)[1] == signal.SIGKILL
            check_whole()

        abandoned = list(home.glob(cache._TEMPORARY + "*"))
        began = time.monotonic()
        for source in sources:
            assert ask(source, lambda: blob(source)).code == blob(source)
        assert time.monotonic() - began < 5, "a dead process still holds a lock"
        assert [info.intact for info in cache.entries()] == 6 * [True]

        old = time.time() - 2 * 86400
        for path in abandoned:
            os.utime(path, (old, old))
        cache.prune()
        assert not list(home.glob(cache._TEMPORARY + "*"))
        print(died, len(abandoned))
        """,
    )
    died, abandoned = map(int, out.split())
    assert died == 1000
    assert abandoned >= 100, "the kills missed the writing"


@pytest.mark.parametrize("before", ["nothing", "damaged"])
def test_a_kill_at_every_line(home: Path, before: str) -> None:
    out = run_light(
        home,
        f"""
        damaged = {before == "damaged"}
        def job(fatal):
            lines = 0
            def trace(frame, event, argument):
                nonlocal lines
                if frame.f_code.co_filename != cache.__file__:
                    return None
                lines += event == "line"
                if lines == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace
            sys.settrace(trace)
            ask("source", lambda: blob("source"))

        for fatal in range(1, 2000):
            shutil.rmtree(home, ignore_errors=True)
            if damaged:
                damage = home / ("k-" + cache.key("source", [], "cc", "arch"))
                damage.mkdir(parents=True)
                (damage / "meta.json").write_text("damage")
            status = os.waitpid(fork(lambda: job(fatal)), 0)[1]
            if not damaged or list(home.glob("k-*/code.bin")):
                check_whole()
            assert ask("source", lambda: blob("source")).code == blob("source")
            check_whole()
            if status == 0:
                break
            assert status == signal.SIGKILL
        print(fatal)
        """,
    )
    assert 60 < int(out) < 2000, "the kills did not walk through the whole call"


def test_a_fork_during_a_compile_does_not_hang_the_child(home: Path) -> None:
    run_light(
        home,
        """
        compiling, go_on = threading.Event(), threading.Event()

        def build():
            compiling.set()
            go_on.wait()
            return b"parent"

        thread = threading.Thread(target=ask, args=("source", build))
        thread.start()
        compiling.wait()
        cache._LOCK_SECONDS = 0.3
        child = fork(lambda: sys.exit(ask("source", lambda: b"child").code != b"child"))
        deadline = time.monotonic() + 10
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                go_on.set()
                raise AssertionError("the child waits for a thread that it does not have")
            time.sleep(0.02)
        go_on.set()
        thread.join()
        """.replace("sys.exit(", "os._exit("),
    )


@pytest.mark.parametrize("usable", [True, False])
def test_threads_compile_once(home: Path, usable: bool) -> None:
    if not usable:
        home.mkdir(mode=0o700)
        home.chmod(0o777)
    built, got = [], []

    def build() -> bytes:
        built.append(1)
        time.sleep(0.1)
        return b"code"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=lambda: got.append(ask(build))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(built) == 1
    assert [entry.code for entry in got] == 8 * [b"code"]


# ---- entries ----


def test_an_entry_is_kept_with_its_source_and_what_made_it(home: Path) -> None:
    before = time.time()
    first = ask_quietly(lambda: b"code")
    assert first == cache.Entry(b"code", place(home) / "code.hsaco", "built")
    assert ask_quietly() == cache.Entry(b"code", place(home) / "code.hsaco", "cache")
    assert names(place(home)) == {"code.hsaco", "source", "meta.json"}
    assert (place(home) / "source").read_text() == "source"
    meta = json.loads((place(home) / "meta.json").read_text())
    assert meta["compiler"] == "cc 1"
    assert meta["options"] == "-O3"
    (info,) = cache.entries()
    size = sum(file.stat().st_size for file in place(home).iterdir())
    assert (info.name, info.key, info.size) == ("attn_fwd", KEY, size)
    assert (info.arch, info.intact) == ("gfx942", True)
    assert before <= info.created <= time.time()


def test_all_of_it_is_the_users_alone(home: Path) -> None:
    umask = os.umask(0)
    try:
        ask(lambda: b"code")
    finally:
        os.umask(umask)
    for path in (home, *home.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_failed_build_leaves_no_entry_and_no_lock(home: Path) -> None:
    def fail() -> bytes:
        raise OSError("the compiler is gone")

    for _ in range(2):
        with pytest.raises(OSError, match="the compiler is gone"):
            ask(fail)
    assert cache.entries() == []
    assert ask_quietly(lambda: b"code").origin == "built"


@pytest.mark.parametrize(
    ("name", "key", "suffix"),
    [
        ("../attn", KEY, ".co"),
        (".attn", KEY, ".co"),
        ("", KEY, ".co"),
        ("a" * 65, KEY, ".co"),
        ("attn", KEY[:-1], ".co"),
        ("attn", KEY.upper(), ".co"),
        ("attn", "../" + KEY[3:], ".co"),
        ("attn", KEY, "co"),
        ("attn", KEY, "./../x"),
        ("attn\n", KEY, ".co"),
        ("attn", KEY + "\n", ".co"),
        ("attn", KEY, ".co\n"),
    ],
)
def test_unsafe_names_are_refused(home: Path, name: str, key: str, suffix: str) -> None:
    with pytest.raises(ValueError, match="name, key, suffix"):
        cache.get_or_build(name, key, suffix=suffix, source="", meta={}, build=never)
    assert not home.exists()


def edit_meta(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        (path / "meta.json").write_text(json.dumps({**meta, **changes}))

    return edit


def replace(name: str, data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).write_bytes(data)

    return write


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


def become_a_dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


def point_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_bytes(b"outside")
    name = "../../outside"
    edit_meta(code=name, sha256={name: hashlib.sha256(b"outside").hexdigest()})(path)


def become_another_entry(path: Path) -> None:
    ask(lambda: b"other code", OTHER)
    shutil.rmtree(path)
    os.rename(place(path.parent, OTHER), path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no meta": remove("meta.json"),
    "no code": remove("code.hsaco"),
    "no source": remove("source"),
    "a changed byte": replace("code.hsaco", b"cOde"),
    "cut code": replace("code.hsaco", b"cod"),
    "longer code": replace("code.hsaco", b"code!"),
    "no bytes of code": lambda path: (path / "code.hsaco").write_bytes(b""),
    "changed source": replace("source", b"another source"),
    "empty meta": lambda path: (path / "meta.json").write_bytes(b""),
    "cut meta": lambda path: os.truncate(path / "meta.json", 40),
    "binary meta": replace("meta.json", bytes(range(128, 256))),
    "a list for meta": replace("meta.json", b"[1, 2]"),
    "a number for meta": replace("meta.json", b"7"),
    "bottomless meta": replace("meta.json", b"[" * 200_000),
    "another schema": edit_meta(schema=cache.SCHEMA + 1),
    "another entry's name": edit_meta(entry="attn_bwd-" + KEY),
    "no digests": edit_meta(sha256={}),
    "digests of the wrong type": edit_meta(sha256=[1]),
    "code outside": edit_meta(code="../code.hsaco"),
    "whole, but outside": point_outside,
    "a time that is none": edit_meta(created="yesterday"),
    "others can write the code": lambda path: (path / "code.hsaco").chmod(0o666),
    "others can write meta": lambda path: (path / "meta.json").chmod(0o620),
    "an empty folder": empty,
    "a file": become_a_file,
    "a dangling link": become_a_dangling_link,
    "another entry": become_another_entry,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_is_rebuilt(home: Path, kind: str) -> None:
    ask(lambda: b"code")
    DAMAGE[kind](place(home))
    assert not any(info.intact for info in cache.entries())
    assert ask_quietly(lambda: b"rebuilt") == cache.Entry(
        b"rebuilt", place(home) / "code.hsaco", "built"
    )
    assert ask_quietly().code == b"rebuilt"
    assert [info.intact for info in cache.entries()] == [True]
    assert all(name.endswith(".lock") for name in names(home) - {place(home).name})


@pytest.mark.parametrize("kind", ["no meta", "another schema", "an empty folder"])
def test_a_damaged_entry_is_listed_and_cleared(home: Path, kind: str) -> None:
    ask(lambda: b"code")
    DAMAGE[kind](place(home))
    (info,) = cache.entries()
    assert (info.name, info.key, info.arch, info.intact) == ("attn_fwd", KEY, "", False)
    assert cache.clear() == [info]
    assert cache.entries() == []


@needs_root
def test_an_entry_of_another_user_is_a_miss(home: Path) -> None:
    code = ask(lambda: b"code").path
    assert code is not None
    os.chown(code, 65534, 65534)
    assert ask_quietly(lambda: b"rebuilt").code == b"rebuilt"


def test_what_is_not_the_caches_own_stays(home: Path) -> None:
    ask(lambda: b"code")
    lock = f".{place(home).name}.lock"
    foreign = {"notes.txt", "other-1234", ".pyfa-tmp", "attn_fwd-" + KEY[:16], ".elsewhere.lock"}
    for name in foreign - {"other-1234"}:
        (home / name).write_text(name)
    (home / "other-1234").mkdir()
    (home / "other-1234" / "file").write_text("kept")
    for path in home.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    assert [info.key for info in cache.entries()] == [KEY]
    assert ask_quietly().origin == "cache"
    cache.prune(max_age_days=0, max_bytes=0)
    ask_quietly(lambda: b"code")
    assert [info.key for info in cache.clear()] == [KEY]
    assert names(home) == foreign | {lock}
    assert (home / "other-1234" / "file").read_text() == "kept"


def test_prune_by_age_and_by_size(home: Path) -> None:
    keys = [cache.key(str(age), [], "", "") for age in range(4)]
    for age, key in enumerate(keys):
        ask(lambda: bytes(1000), key)
        edit_meta(created=time.time() - age * 86400 - 60)(place(home, key))
    assert [info.key for info in cache.entries()] == keys[::-1]
    assert cache.prune() == []
    assert [info.key for info in cache.prune(max_age_days=2.5)] == [keys[3]]
    sizes = [info.size for info in cache.entries()]
    assert cache.prune(max_bytes=sum(sizes)) == []
    assert [info.key for info in cache.prune(max_bytes=sum(sizes) - 1)] == [keys[2]]
    assert [info.key for info in cache.entries()] == [keys[1], keys[0]]


def test_prune_leaves_a_writer_that_is_at_work(home: Path) -> None:
    ask(lambda: b"code")
    young, old = home / (cache._TEMPORARY + "young"), home / (cache._TEMPORARY + "old")
    for path in (young, old):
        path.mkdir()
        (path / "code").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    cache.clear()
    assert young.exists()
    assert not old.exists()


def test_clear_forgets_what_is_in_memory(home: Path) -> None:
    home.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="is not a folder"):
        ask(lambda: b"code")
    assert ask_quietly().origin == "memory"
    assert cache.clear() == []
    assert ask_quietly(lambda: b"again").code == b"again"


# ---- keys ----

few = "a ,\0"  # letters that joining might use, and short: fields run together often, if they can
inputs = st.tuples(
    st.text(few, max_size=3),
    st.lists(st.text(few, max_size=3), max_size=3),
    st.text(few, max_size=3),
    st.text(few, max_size=3),
)


@given(inputs, inputs)
def test_different_inputs_have_different_keys(
    one: tuple[str, list[str], str, str], two: tuple[str, list[str], str, str]
) -> None:
    assert (cache.key(*one) == cache.key(*two)) == (one == two)


def test_fields_do_not_run_together() -> None:
    same_when_joined = [
        ("ab", ["c", "d"], "e", "f"),
        ("a", ["c", "d"], "be", "f"),
        ("ab", ["cd"], "e", "f"),
        ("ab", ["c d"], "e", "f"),
        ("ab", ["c,d"], "e", "f"),
        ("ab", ["c\0d"], "e", "f"),
        ("ab", ["", "c", "d"], "e", "f"),
        ("ab", ["c", "d", ""], "e", "f"),
        ("ab", ["d"], "e", "fc"),
        ("ab", [], "e", "fcd"),
        ("abe", ["c", "d"], "", "f"),
        ("", ["c", "d"], "abe", "f"),
        ("ab\0", ["c", "d"], "e", "f"),
    ]
    assert len({cache.key(*fields) for fields in same_when_joined}) == len(same_when_joined)


def test_the_schema_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # Keys are found again by later releases: what changes this digest must change SCHEMA too.
    assert cache.SCHEMA == 1
    assert KEY == "8fb054c7a4e09452db8ec9f47f6bce706a063b7f281fd3e6d8dd07e2aab364aa"
    monkeypatch.setattr(cache, "SCHEMA", 2)
    assert cache.key("source", ["-O3"], "cc 1", "gfx942") != KEY


# ---- folders that cannot be used ----


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
