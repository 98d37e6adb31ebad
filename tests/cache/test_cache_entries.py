"""The code cache's entries and keys: what is kept, what damage does, what goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from asking import (
    DAMAGE,
    KEY,
    ask,
    ask_quietly,
    edit_meta,
    names,
    needs_root,
    never,
    place,
)
from hypothesis import given
from hypothesis import strategies as st

from pyfa import cache


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


@pytest.mark.parametrize(
    "kind",
    ["no meta", "another schema", "an empty folder", "a file", "a pipe", "a dangling link"],
)
def test_a_damaged_entry_is_listed_and_cleared(home: Path, kind: str) -> None:
    ask(lambda: b"code")
    DAMAGE[kind](place(home))
    (info,) = cache.entries()
    assert (info.name, info.key, info.arch, info.intact) == ("attn_fwd", KEY, "", False)
    assert cache.occupied() == (1, info.size)
    assert cache.clear() == [info]
    assert cache.entries() == []
    assert cache.occupied() == (0, 0)


def test_entries_are_counted_without_being_read(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(lambda: b"code")
    (info,) = cache.entries()
    monkeypatch.setattr(cache.os, "open", lambda *given, **named: pytest.fail(str(given)))
    assert cache.occupied() == (1, info.size)


@pytest.mark.parametrize("kind", ["a folder for meta", "a folder for code", "a changed byte"])
def test_a_look_at_a_damaged_entry_keeps_no_descriptor(home: Path, kind: str) -> None:
    ask(lambda: b"code")
    DAMAGE[kind](place(home))
    before = os.dup(0)
    os.close(before)
    for _ in range(3):
        assert [info.intact for info in cache.entries()] == [False]
    after = os.dup(0)  # the lowest free number
    os.close(after)
    assert after == before


def test_what_was_verified_is_what_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of an entry and the list that names it, it may be gone or another."""
    ask(lambda: b"code")
    verified = cache._verified

    def then_change(path: Path, readonly: bool = False) -> object:
        found = verified(path, readonly)
        (path / "meta.json").write_text("[1")
        return found

    monkeypatch.setattr(cache, "_verified", then_change)
    (info,) = cache.entries()
    assert (info.arch, info.intact) == ("gfx942", True)


@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="no files by their folder here")
def test_all_files_are_of_the_folder_that_was_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another entry takes the place while this one is read: its code is not mixed in."""
    ask(lambda: b"code")
    loads = cache.json.loads

    def then_swap(text: bytes) -> object:
        os.rename(place(home), home / "aside")
        place(home).mkdir(mode=0o700)
        for name in ("code.hsaco", "source"):
            (place(home) / name).write_bytes(b"another")
        monkeypatch.setattr(cache.json, "loads", loads)
        return loads(text)

    monkeypatch.setattr(cache.json, "loads", then_swap)
    found = cache._read(place(home))
    assert found is not None
    assert found.code == b"code"


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
