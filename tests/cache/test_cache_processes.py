"""The code cache among processes and threads: one compile for all, and kills at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import turns
from asking import (
    ask,
)

from pyfa import cache

# Forked from a process that loads the cache and nothing else: forking needs one without threads,
# and a thousand forks need a small one.
PRELUDE = """
import json, os, random, re, shutil, signal, sys, threading, time, traceback, types
from pathlib import Path

package = types.ModuleType("pyfa")
package.__path__ = [sys.argv[1]]
sys.modules["pyfa"] = package
from pyfa import cache
import filelock  # once, not in each of the forks

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

    filelock.FileLock.acquire = refuse
    """
    run_light(home, textwrap.dedent(no_locks) + textwrap.dedent(RACE))
    got = list(home.parent.glob("got.*"))
    assert (home.parent / "builds").read_bytes() == 16 * b"."
    assert sorted(path.name.split(".")[1] for path in got) == ["built"] + 15 * ["cache"]
    (code,) = home.glob("k-*/code.bin")
    assert {path.read_bytes() for path in got} == {code.read_bytes()}
    assert len(list(home.iterdir())) == 1, "the losers left something behind"


def test_a_thousand_kills(home: Path) -> None:
    """At night; else a quarter of them."""
    rounds = 500 if turns.all_run() else 125
    out = run_light(
        home,
        f"""
        rounds = {rounds}"""
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
        for round in range(rounds):
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
    assert died == 2 * rounds
    assert abandoned >= rounds // 5, "the kills missed the writing"


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
