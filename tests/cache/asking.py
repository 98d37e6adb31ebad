"""What the tests of the cache share: how they ask it, and how they damage an entry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyfa import cache

KEY = cache.key("source", ["-O3"], "cc 1", "gfx942")
OTHER = cache.key("source", ["-O2"], "cc 1", "gfx942")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


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


def become_a_folder(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


def become_a_pipe(path: Path) -> None:
    shutil.rmtree(path)
    os.mkfifo(path)


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
    "never made": edit_meta(created=float("nan")),
    "sparse code": lambda path: os.truncate(path / "code.hsaco", 1 << 42),
    "a folder for meta": become_a_folder("meta.json"),
    "a folder for code": become_a_folder("code.hsaco"),
    "a pipe": become_a_pipe,
    "others can write the code": lambda path: (path / "code.hsaco").chmod(0o666),
    "others can write meta": lambda path: (path / "meta.json").chmod(0o620),
    "an empty folder": empty,
    "a file": become_a_file,
    "a dangling link": become_a_dangling_link,
    "another entry": become_another_entry,
}
