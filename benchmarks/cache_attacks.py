"""Attack the code cache: processes compile, read, prune, clear and damage it, killed at random.

A round forks attackers and askers over one folder, waits a moment, kills some, and lets a new
process ask for every entry: each must come back whole, soon, with nothing lost. The compiler is a
stand-in, whose code says what it was made of, so that a wrong byte is seen without the cache's own
check; ``--real N`` rounds kill the emulator's real C compiler instead.

    python benchmarks/cache_attacks.py --rounds 1000 --real 4 --save
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock  # once, not in each of the forks

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    # The cache alone: a thousand rounds of forks need a small process without threads.
    package = types.ModuleType("pyfa")
    package.__path__ = [str(ROOT / "pyfa")]
    sys.modules["pyfa"] = package

from pyfa import cache  # noqa: E402

SOURCES = [f"source {number}" for number in range(6)]
OTHER_USER = 65534
ROUND_SECONDS = 30.0  # far above what a round takes: longer is a hang
ASIDE = "attacked-"


def blob(source: str) -> bytes:
    """What the stand-in compiler makes of ``source``."""
    return random.Random(source).randbytes(20_000)


def place(home: Path, source: str) -> Path:
    """Where the entry of ``source`` is."""
    return home / f"k-{cache.key(source, [], 'cc', 'arch')}"


def ask(source: str, built: list[str] | None = None) -> cache.Entry:
    """The entry of ``source``, every byte of it compared."""

    def build() -> bytes:
        if built is not None:
            built.append(source)
        return blob(source)

    key = cache.key(source, [], "cc", "arch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is kept in memory only
        entry = cache.get_or_build("k", key, suffix=".bin", source=source, meta={}, build=build)
    if entry.code != blob(source):
        raise AssertionError(f"{source}: code that was not compiled from it, from {entry.origin}")
    return entry


# ---- what a process does until it is killed ----


def compile_and_read(home: Path, chance: random.Random) -> None:
    ask(chance.choice(SOURCES))
    cache._memory.clear()


def discard(home: Path, chance: random.Random) -> None:
    cache._discard(place(home, chance.choice(SOURCES)))


def prune(home: Path, chance: random.Random) -> None:
    cache.prune(max_bytes=chance.choice((0, 30_000, 70_000)))


def clear(home: Path, chance: random.Random) -> None:
    cache.clear()


def list_entries(home: Path, chance: random.Random) -> None:
    cache.entries()


def damage_a_file(home: Path, chance: random.Random) -> None:
    path = place(home, chance.choice(SOURCES)) / chance.choice(("code.bin", "source", "meta.json"))
    with open(os.open(path, os.O_RDWR | os.O_NONBLOCK), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = chance.randrange(max(size, 1))
        if chance.random() < 0.3:
            file.truncate(at)
        else:  # one bit
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))


def _put(path: Path, chance: random.Random, home: Path) -> None:
    kind = chance.randrange(5)
    if kind == 0:
        os.mkfifo(path, 0o600)
    elif kind == 1:
        path.symlink_to(chance.choice((home, home / "nowhere", Path("/dev/zero"), path)))
    elif kind == 2:
        path.mkdir(mode=0o700)
    elif kind == 3:
        path.write_bytes(b"{}")
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 42)


def replace_a_file(home: Path, chance: random.Random) -> None:
    path = place(home, chance.choice(SOURCES)) / chance.choice(("code.bin", "source", "meta.json"))
    path.unlink()
    _put(path, chance, home)


def replace_an_entry(home: Path, chance: random.Random) -> None:
    path = place(home, chance.choice(SOURCES))
    os.rename(path, home / f"{ASIDE}{chance.getrandbits(64)}")
    _put(path, chance, home)


def replace_a_lock(home: Path, chance: random.Random) -> None:
    path = home / f".{place(home, chance.choice(SOURCES)).name}.lock"
    path.unlink()
    _put(path, chance, home)


def swap_entries(home: Path, chance: random.Random) -> None:
    one, two = (place(home, source) for source in chance.sample(SOURCES, 2))
    aside = home / f"{ASIDE}{chance.getrandbits(64)}"
    os.rename(one, aside)
    os.rename(two, one)
    os.rename(aside, two)


def give_away(home: Path, chance: random.Random) -> None:
    path = place(home, chance.choice(SOURCES))
    if chance.random() < 0.5:
        path = path / chance.choice(("code.bin", "meta.json"))
    if os.geteuid() == 0 and chance.random() < 0.5:
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    else:
        path.chmod(0o777)


def ask_with_few_descriptors(home: Path, chance: random.Random) -> None:
    most = len(os.listdir("/proc/self/fd")) + chance.randrange(5)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    compile_and_read(home, chance)


def ask_on_a_full_disk(home: Path, chance: random.Random) -> None:
    if chance.random() < 0.5:  # files end where the limit is
        resource.setrlimit(resource.RLIMIT_FSIZE, (chance.randrange(25_000), -1))
    else:
        cache.os = _FullDisk(chance)  # type: ignore[assignment]
    try:
        compile_and_read(home, chance)
    finally:
        cache.os = os


class _FullDisk:
    """The module ``os`` on a disk that is full at random calls."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def __getattr__(self, name: str) -> object:
        if name in ("rename", "fsync") and self._chance.random() < 0.3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, name)


def ask_without_locks(home: Path, chance: random.Random) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    filelock.FileLock.acquire = refuse  # type: ignore[method-assign,assignment]
    compile_and_read(home, chance)


def ask_behind_stale_locks(home: Path, chance: random.Random) -> None:
    """As after a server of files forgot that the holder is dead: nobody ever releases it."""

    def wait(*_: object, **__: object) -> None:
        raise filelock.Timeout("stale")

    filelock.FileLock.acquire = wait  # type: ignore[method-assign,assignment]
    cache._LOCK_SECONDS = 0.05
    compile_and_read(home, chance)


def ask_without_a_home(home: Path, chance: random.Random) -> None:
    for name in ("PYFA_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.setuid(54321) if os.geteuid() == 0 else None  # a uid that has no passwd entry
    compile_and_read(home, chance)


def ask_as_another_user(home: Path, chance: random.Random) -> None:
    if os.geteuid() == 0:
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        assert cache.why_unusable(home), "a folder of another user is used"
    compile_and_read(home, chance)


def ask_in_a_read_only_folder(home: Path, chance: random.Random) -> None:
    if os.geteuid() != 0:  # modes do not bind root
        home.chmod(0o500)
    compile_and_read(home, chance)


# Those that change what the rest of their process can do are asked once, in a process of their own.
ENDLESS: Sequence[Callable[[Path, random.Random], None]] = (
    compile_and_read, compile_and_read, compile_and_read, discard, prune, clear, list_entries,
)  # fmt: skip
DAMAGING: Sequence[Callable[[Path, random.Random], None]] = (
    damage_a_file, replace_a_file, replace_an_entry, replace_a_lock, swap_entries, give_away,
)  # fmt: skip
ONCE: Sequence[Callable[[Path, random.Random], None]] = (
    ask_with_few_descriptors, ask_on_a_full_disk, ask_without_locks, ask_behind_stale_locks,
    ask_without_a_home, ask_as_another_user, ask_in_a_read_only_folder,
)  # fmt: skip


def _fork(job: Callable[[], None], errors: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        job()
        os._exit(0)
    except BaseException:
        os.write(errors, traceback.format_exc()[-1500:].encode() + b"\0")
        os._exit(1)


def _endlessly(home: Path, seed: int, damaging: bool) -> None:
    chance = random.Random(seed)
    while True:
        job = chance.choice(DAMAGING if damaging else ENDLESS)
        if not damaging:
            job(home, chance)
            continue
        with contextlib.suppress(OSError, ValueError):  # gone just now, or not there yet
            job(home, chance)
        time.sleep(0.001)


def _round(home: Path, seed: int, told: Counter[str]) -> list[str]:
    """One round; what went wrong in it."""
    chance = random.Random(seed)
    home.mkdir(mode=0o700, exist_ok=True)
    reading, errors = os.pipe()
    job = chance.choice(ONCE)
    told[job.__name__] += 1
    endless = [_fork(lambda n=n: _endlessly(home, 8 * seed + n, n == 2), errors) for n in range(3)]
    once = _fork(lambda: job(home, random.Random(seed)), errors)
    time.sleep(chance.uniform(0.002, 0.03))
    for child in endless:
        os.kill(child, signal.SIGKILL)
        told["killed"] += os.waitpid(child, 0)[1] == signal.SIGKILL
    wrong = _wait(once, f"{job.__name__} hangs")
    home.chmod(0o700)
    check = _fork(lambda: _check(home), errors)
    wrong += _wait(check, "asking again hangs")
    os.close(errors)
    with open(reading, "rb") as file:
        wrong += [text for text in file.read().decode(errors="replace").split("\0") if text]
    return wrong


def _wait(child: int, hanging: str) -> list[str]:
    end = time.monotonic() + ROUND_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return [hanging]
        time.sleep(0.002)
    return []


def _check(home: Path) -> None:
    """A new process finds every entry, or compiles it; then nothing is compiled again."""
    open_before = len(os.listdir("/proc/self/fd"))
    for source in SOURCES:
        ask(source)
    built: list[str] = []
    for source in SOURCES:
        ask(source, built)
    assert not built, f"lost: {built}"
    whole = {f"{info.name}-{info.key}" for info in cache.entries() if info.intact}
    missing = {place(home, source).name for source in SOURCES} - whole
    assert not missing, f"not intact: {missing}"
    left = len(os.listdir("/proc/self/fd")) - open_before
    assert left <= 0, f"{left} descriptors are left open"


REAL = """
from pyfa.emulator import native
library = native.load()
assert library.emulator_ops() > 100
"""


def _real_round(folder: Path, seed: int) -> list[str]:
    """Kills the real compiler of the emulator's core, then asks for it again."""
    where = {**os.environ, "PYFA_CACHE_DIR": str(folder / "real"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REAL]
    shutil.rmtree(folder / "real", ignore_errors=True)
    victim = subprocess.Popen(command, env=where, start_new_session=True)
    time.sleep(random.Random(seed).uniform(0.5, 12.0))
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    try:
        done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return ["asking after the real compiler was killed hangs"]
    return [done.stderr[-1500:]] if done.returncode else []


def attack(rounds: int, real: int, seed: int = 0) -> dict[str, object]:
    """The rounds' outcome; ``wrong`` is empty where all is well."""
    told: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cache-attacks-") as name:
        home = Path(name, "cache")
        os.environ["PYFA_CACHE_DIR"] = str(home)
        Path(name).chmod(0o755)
        for number in range(rounds):
            wrong += [f"round {number}: {text}" for text in _round(home, seed + number, told)]
            if number % 50 == 49:
                shutil.rmtree(home)
        for number in range(real):
            wrong += [f"real {number}: {x}" for x in _real_round(Path(name), seed + number)]
    facts = {"rounds": rounds, "real compiler killed": real, "seed": seed, **sorted_counts(told)}
    return {**facts, "seconds": round(time.monotonic() - began), "wrong": wrong}


def sorted_counts(told: Counter[str]) -> dict[str, int]:
    """By name, as a result file has them."""
    return dict(sorted(told.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--real", type=int, default=0, help="rounds that kill the real compiler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results")
    arguments = parser.parse_args()
    outcome = attack(arguments.rounds, arguments.real, arguments.seed)
    outcome["root"] = os.geteuid() == 0
    print(json.dumps(outcome, indent=1))
    if arguments.save:
        # In a process of its own, which has all of pyfa.
        code = "import json, sys, machine; machine.save('cache_attacks', json.load(sys.stdin))"
        paths = f"{ROOT}:{ROOT / 'benchmarks'}"
        subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(outcome), text=True, check=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
    sys.exit(bool(outcome["wrong"]))


if __name__ == "__main__":
    main()
