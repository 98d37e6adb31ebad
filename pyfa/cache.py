"""The code cache: compiled kernels on disk, found by what they were compiled from.

An entry is a folder ``<name>-<key>/`` with the code, its source and ``meta.json``. It is written
under another name, synced, renamed, and checked by digest when read. So an entry with its final
name is complete, also on NFS; the lock per key only saves work. Because entries are executable, a
folder that another user owns or can write to is refused. Without a usable folder, kernels stay in
memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyfa import env

if TYPE_CHECKING:
    import filelock

Build = Callable[[], bytes]
SCHEMA = 1  # part of every key and entry: raised when the meaning of either changes
_ENTRY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}-[0-9a-f]{64}")
_NO_HOME = Path(os.devnull, "no home")  # where nothing can ever be
_TEMPORARY = ".pyfa-tmp-"
_STALE_SECONDS = 86400.0  # no writer needs a day: an older temporary folder was left by a kill
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_READ = os.O_RDONLY | _NO_WAIT
_MOST_BYTES = 1 << 28  # of a file: a hundred times the largest code; a sparse one fills no memory
_POLL_SECONDS = 0.25  # between looks at the entry, while another process holds its lock
_TELL_SECONDS = 2.0  # a wait as long as this is worth a message
_LOCK_SECONDS = 600.0  # several times the slowest compile: the holder is stopped, or its lock stale

_log = logging.getLogger("pyfa")
_memory: dict[str, Entry] = {}
_warned: set[Path] = set()
_warning = threading.Lock()
_building: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):
    # A child has none of its parent's other threads, so nobody would release what they hold.
    os.register_at_fork(after_in_child=_building.clear)


@dataclass(frozen=True)
class Entry:
    """Compiled code. ``path`` is its file, or None if it is only in memory. ``origin`` says where
    the code was found, or that it was built."""

    code: bytes
    path: Path | None
    origin: Literal["memory", "cache", "readonly", "built"]


@dataclass(frozen=True)
class EntryInfo:
    """One entry on disk. ``created`` is in seconds since the epoch. Only ``intact`` entries are
    used.

    ``plan``: the source and constants that it was compiled from, if recorded.
    """

    name: str
    key: str
    size: int
    created: float
    arch: str
    intact: bool
    plan: str = ""


def key(source: str, options: Sequence[str], compiler: str, arch: str) -> str:
    """Return the digest that names an entry. ``compiler`` includes its version, ``source`` its
    includes."""
    digest = hashlib.sha256()  # each field after its length, the only list last: none run together
    for field in (str(SCHEMA), source, compiler, arch, *options):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def directory() -> Path:
    """Return where entries are written: ``PYFA_CACHE_DIR``, otherwise the user's cache folder.

    A user may have no cache folder: a container may run under an unknown uid, without ``HOME``.
    """
    chosen: Path | None = env.get("PYFA_CACHE_DIR")
    if chosen is not None:
        return chosen.absolute()
    import platformdirs

    try:
        found = platformdirs.user_cache_dir("pyfa", appauthor=False)
    except (RuntimeError, KeyError):
        return _NO_HOME
    return _NO_HOME if found.startswith("~") else Path(found).absolute()


def why_unusable(path: Path, *, readonly: bool = False) -> str | None:
    """Return why no code may be read from ``path``, or ``None`` if it may.

    A folder that does not exist yet is usable; it is created with mode 0700. A ``readonly`` folder
    must exist, and may belong to root.
    """
    if path == _NO_HOME:
        return "this user has no home folder; set PYFA_CACHE_DIR to a folder"
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return f"{path} does not exist" if readonly else None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    fault = _fault(status, readonly) if stat.S_ISDIR(status.st_mode) else "is not a folder"
    return f"{path} {fault}" if fault else None


def get_or_build(
    name: str, key: str, *, suffix: str, source: str, meta: Mapping[str, str], build: Build
) -> Entry:
    """Return the entry ``name``, ``key``: from memory, the cache, a read-only cache, or else
    ``build()``.

    If several processes and threads request an entry at once, one of them builds it. ``meta``
    (compiler, arch, options) is kept in ``meta.json``. Raises what ``build`` raises, and
    ``ValueError`` for a name, key or suffix that is not safe in a file name. A faulty folder gives
    one ``RuntimeWarning``.
    """
    entry = f"{name}-{key}"
    if not _ENTRY.fullmatch(entry) or not re.fullmatch(r"\.[A-Za-z0-9]+", suffix):
        expected = "expected a plain name, a sha256 in hex and a suffix such as .hsaco"
        raise ValueError(f"name, key, suffix: {expected}, got {name!r}, {key!r}, {suffix!r}")
    with _building.setdefault(entry, threading.Lock()), ExitStack() as held:
        unusable = why_unusable(home := directory())
        found = _memory.get(entry) or (None if unusable else _read(home / entry))
        found = found or _read_prebuilt(entry)
        if not unusable:
            found = found or _wait_for_turn(held, home / entry)
        if found:
            return found
        code = build()
        if not unusable:
            files = {f"code{suffix}": code, "source": source.encode()}
            try:
                return _publish(home / entry, files, meta)
            except OSError as error:
                unusable = f"{home} cannot be written: {error.strerror or error}"
        _warn_once(home, f"{unusable}; compiled kernels are kept in memory only")
        _memory[entry] = Entry(code, None, "memory")
        return Entry(code, None, "built")


def entries() -> list[EntryInfo]:
    """Return the entries in the cache's folder, oldest first; none if the folder may not be
    used."""
    infos = []
    for path in _paths():
        with suppress(OSError):  # another process may have pruned it just now
            found = _verified(path)
            meta = found[1] if found else {}
            created, arch = meta.get("created", path.lstat().st_mtime), str(meta.get("arch", ""))
            named, plan = (path.name[:-65], path.name[-64:]), str(meta.get("plan", ""))
            infos.append(EntryInfo(*named, _size(path), created, arch, found is not None, plan))
    return sorted(infos, key=lambda info: info.created)


def occupied() -> tuple[int, int]:
    """Return how many entries ``entries`` would list, and their size in bytes, without reading
    any."""
    sizes = []
    for path in _paths():
        with suppress(OSError):
            sizes.append(_size(path))
    return len(sizes), sum(sizes)


def prune(*, max_age_days: float = math.inf, max_bytes: float = math.inf) -> list[EntryInfo]:
    """Remove entries older than ``max_age_days``, then the oldest until ``max_bytes`` suffice.

    Returns the removed entries. Remains of killed writers are removed after a day. Foreign files
    stay.
    """
    home, now = directory(), time.time()
    for path in [] if why_unusable(home) else list(home.glob(_TEMPORARY + "*")):
        with suppress(OSError):
            if now - path.lstat().st_mtime > _STALE_SECONDS:
                _discard(path)
    present, removed = entries(), []
    total = sum(info.size for info in present)
    for info in present:
        doomed = now - info.created > max_age_days * 86400 or total > max_bytes
        if doomed and _discard(home / f"{info.name}-{info.key}"):
            removed.append(info)
            total -= info.size
    return removed


def clear() -> list[EntryInfo]:
    """Remove every entry, on disk and in this process's memory; like ``prune`` otherwise."""
    _memory.clear()
    return prune(max_bytes=-1)


def _paths() -> list[Path]:
    """Return where the entries are; none if the folder may not be used."""
    home = directory()
    found = [] if why_unusable(home) else home.glob("*-*")
    return [path for path in found if _ENTRY.fullmatch(path.name)]


def _size(path: Path) -> int:
    """Return the size in bytes of an entry's files, or of what is in its place."""
    with suppress(NotADirectoryError, PermissionError):
        if not path.is_symlink():
            return sum(file.lstat().st_size for file in path.iterdir())
    return path.lstat().st_size


def _fault(status: os.stat_result, readonly: bool) -> str | None:
    """Return why an untrusted user could change a file with this status."""
    if sys.platform == "win32":
        return None  # a user's folder is guarded by access lists there, not by owner and mode
    if status.st_uid != os.geteuid() and not (readonly and status.st_uid == 0):
        return f"belongs to another user (uid {status.st_uid}, this process has {os.geteuid()})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _warn_once(home: Path, why: str) -> None:
    with _warning:
        first = home not in _warned
        _warned.add(home)
    if first:
        warnings.warn(f"pyfa's code cache: {why}", RuntimeWarning, stacklevel=3)


def _read(path: Path, readonly: bool = False) -> Entry | None:
    """Return the entry at ``path``, or ``None`` unless it is complete and trusted."""
    return found[0] if (found := _verified(path, readonly)) else None


def _verified(path: Path, readonly: bool = False) -> tuple[Entry, dict[str, Any]] | None:
    """Return the entry at ``path`` and its ``meta.json``, or ``None`` as ``_read`` does.

    The folder is opened once and its files from it, so that all are of one entry, whatever takes
    its place meanwhile.
    """

    def load(name: str) -> bytes:
        if Path(name).name != name:
            raise PermissionError(f"{name} is not a file of {path}")
        # The flags prevent waiting if the file is a pipe, to which perhaps no process ever writes.
        number = os.open(path / name if folder is None else name, _READ, dir_fd=folder)
        try:  # by hand: open() would not close the number of a folder, which it refuses
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or _fault(status, readonly):
                raise PermissionError(f"{path / name} is not to be trusted")
            if status.st_size > _MOST_BYTES:
                raise ValueError(f"{path / name} is too large to be a kernel")
            with open(number, "rb", closefd=False) as file:
                return file.read(_MOST_BYTES)
        finally:
            os.close(number)

    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError), ExitStack() as held:
        folder = None
        if os.open in os.supports_dir_fd:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, folder)
        if _fault(os.stat(path) if folder is None else os.fstat(folder), readonly):
            return None  # who can write the folder can put other files into it
        meta = json.loads(load("meta.json"))
        files = {name: load(name) for name in meta["sha256"]}
        sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        whole = (meta["schema"], meta["entry"], meta["sha256"]) == (SCHEMA, path.name, sha256)
        if whole and isinstance(meta["created"], float) and math.isfinite(meta["created"]):
            code = meta["code"]
            origin: Literal["readonly", "cache"] = "readonly" if readonly else "cache"
            return Entry(files[code], path / code, origin), meta
    return None


def _read_prebuilt(entry: str) -> Entry | None:
    for home in env.get("PYFA_CACHE_READONLY_DIRS"):
        if unusable := why_unusable(home, readonly=True):
            _warn_once(home, f"{unusable}; it is not read")
        elif found := _read(home / entry, readonly=True):
            return found
    return None


def _wait_for_turn(held: ExitStack, path: Path) -> Entry | None:
    """Wait until another process has published the entry, or until this process may build it."""
    # 70 ms on the host of an H200, where a first call from the bundle needs nothing but ``key``.
    import filelock

    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), mode=0o600)
    began, told = time.monotonic(), False
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire(timeout=_POLL_SECONDS)
            held.callback(_release, lock)
            return _read(path)
        except filelock.Timeout:
            waited = time.monotonic() - began
        except (OSError, NotImplementedError):
            return None  # no locks here, which is no harm; or no writing, which publishing reports
        if found := _read(path):  # a thousand processes need not pass the lock along to see it
            return found
        if waited >= _LOCK_SECONDS:
            _log.warning("compiling %s here: its lock was not free for %.0f s", path.name, waited)
            return None
        if waited >= _TELL_SECONDS and not told:
            told, text = True, "waiting for another process to compile %s: %.0f s of at most %.0f s"
            _log.warning(text, path.name, waited, _LOCK_SECONDS)


def _release(lock: filelock.BaseFileLock) -> None:
    with suppress(OSError):  # an unlock that NFS fails is done by the end of the process
        lock.release()


def _publish(path: Path, files: dict[str, bytes], meta: Mapping[str, str]) -> Entry:
    """Write the entry, whose first file is the code; if another process was faster, return its
    entry."""
    code = next(iter(files))
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    own = {"schema": SCHEMA, "entry": path.name, "code": code, "sha256": sha256}
    text = json.dumps({**meta, **own, "created": time.time()}, indent=1)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(_TEMPORARY + uuid.uuid4().hex)
    temporary.mkdir(mode=0o700)
    try:
        for name, data in {**files, "meta.json": text.encode()}.items():
            with open(os.open(temporary / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(temporary)
        for last in (False, False, True):
            try:
                os.rename(temporary, path)
                break
            except OSError as error:
                if last or error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            if winner := _read(path):
                return winner
            _discard(path)  # it is damaged
        _sync_folder(path.parent)
        return Entry(files[code], path / code, "built")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some network file systems refuse; the digests catch what that loses
        os.fsync(folder)
    os.close(folder)


def _discard(path: Path) -> bool:
    """Rename ``path`` away, then delete it. Returns whether it is gone; never raises."""
    aside = path.with_name(_TEMPORARY + uuid.uuid4().hex)
    with suppress(OSError):
        os.rename(path, aside)  # needs no space, so that a full disk can be cleared
        if stat.S_ISDIR(aside.lstat().st_mode):
            shutil.rmtree(aside, ignore_errors=True)
        else:  # rmtree would wait for a writer where it is a pipe
            os.unlink(aside)
    return not os.path.lexists(path)
