"""How the emulator's core is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyfa.emulator import native


def test_it_is_built_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has none: zig would not start for want of a cache folder."""
    seen = '__attribute__((visibility("default")))'
    (tmp_path / "one.c").write_text(f"{seen} int one(void) {{ return 1; }}\n")
    for name in ("HOME", "XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    command, _ = native.compiler()
    with monkeypatch.context() as small:
        small.setattr(native, "SOURCES", tmp_path)
        code = native._build(command, ("-shared", "-fPIC", "-nostdlib"))
    monkeypatch.undo()  # the core's own cache is wanted
    # Under the number of a file that another library had, which the loader would give instead.
    native.load.__wrapped__()
    assert native._loaded(code).one() == 1
