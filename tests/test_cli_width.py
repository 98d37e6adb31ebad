"""What commands print at 80 and at 200 columns: it fits, and no word is broken.

The snapshots are written anew by ``python tests/test_cli_width.py``; read the difference before
you commit it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyfa import cache, cli
from pyfa.cli import inspect_timing, layout

SNAPSHOTS = Path(__file__).parent / "snapshots" / "cli"
WIDTHS = (80, 200)
PROBLEM = ("--seqlen", "16384", "--heads", "16", "--head-dim", "128", "--causal")
# The same on every machine: figures by formula, of named devices, without a backend's tiles.
SHOWN = {
    "explain": ("explain", *PROBLEM, "--device", "RTX 3090"),
    "explain_reasons": ("explain", "--dtype", "float32", "--features", "paged,sinks",
                        "--device", "MI355X"),
    "plan": ("plan", *PROBLEM, "--features", "backward", "--device", "L40S", "--backend", "torch"),
    "cache_list": ("cache", "list"),
    "cache_list_v": ("cache", "list", "--verbose"),
}  # fmt: skip
# Also those whose figures change with the kernels.
CHECKED = {
    **SHOWN,
    "plan_hip": ("plan", *PROBLEM, "--features", "backward", "--device", "MI300X", "-v"),
    "explain_v": ("explain", *PROBLEM, "--device", "H200", "-v"),
    "info": ("info",),
    "compat": ("compat",),
}  # fmt: skip


def printed(width: int, *arguments: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main(arguments)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return out.getvalue()


@contextlib.contextmanager
def small_cache(folder: Path) -> Iterator[None]:
    """Two entries, one by a plan, in a folder of their own; what is printed of it is fixed."""
    before = os.environ.get("PYFA_CACHE_DIR")
    os.environ["PYFA_CACHE_DIR"] = str(folder)
    plan = "hip/attn_fwd.hip BLOCK_K=64 DTYPE=1 HEAD_DIM=192 HEAD_DIM_V=128 PAGED=1 SCORE=1 WAVES=8"
    try:
        for name, meta in (("attn_fwd", {"arch": "gfx942", "plan": plan}), ("emulator", {})):
            key = cache.key(name, [], "compiler 1", "gfx942")
            cache.get_or_build(name, key, suffix=".hsaco", source="x", meta=meta, build=lambda: b"")
        yield
    finally:
        cache._memory.clear()
        if before is None:
            del os.environ["PYFA_CACHE_DIR"]
        else:
            os.environ["PYFA_CACHE_DIR"] = before


def shown(name: str, width: int, folder: Path) -> str:
    """A command's output, with the machine's own facts replaced."""
    with small_cache(folder):
        found = printed(width, *CHECKED[name])
        for entry in cache.entries():
            found = found.replace(entry.key[:8], "0" * 8)
            total, one = (f"{n} B" for n in (sum(e.size for e in cache.entries()), entry.size))
            found = found.replace(total, "2000 B").replace(one, "999 B".ljust(len(one)))
    import time

    return found.replace(str(folder), "CACHE").replace(time.strftime("%Y-%m-%d"), "2026-01-01")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SHOWN)
def test_snapshots(name: str, width: int, tmp_path: Path) -> None:
    assert shown(name, width, tmp_path) == (SNAPSHOTS / f"{name}_{width}.txt").read_text()


@pytest.mark.parametrize("name", CHECKED)
def test_it_fits_and_no_word_is_broken(name: str, tmp_path: Path) -> None:
    narrow, wide = (shown(name, width, tmp_path).splitlines() for width in WIDTHS)
    known = {word for line in wide for word in line.split()}
    assert narrow, name
    assert {word for line in narrow for word in line.split()} <= known
    for line in narrow:
        # Only a word that is alone on its line may be too long.
        assert len(line) <= 80 or len(line.split()) == 1, line


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, ...]]:
    yield (name,) if name else ()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, each in action.choices.items():
                for rest in commands(each, below):
                    yield (name, *rest) if name else rest


@pytest.mark.parametrize("command", list(commands(cli.parser(), "")), ids=" ".join)
def test_every_help_has_examples_that_parse_and_defaults(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    narrow, wide = (printed(width, *command, "--help") for width in WIDTHS)
    assert max(map(len, narrow.splitlines())) <= 80
    assert {*narrow.split()} <= {*wide.split()}
    examples = wide.partition("examples:\n")[2].split("\n\n")[0].splitlines()
    assert examples
    for example in examples:
        program, *arguments = example.split()
        assert program == "pyfa"
        assert tuple(arguments[: len(command)]) == command
        cli.parser().parse_args(arguments)


def test_every_option_says_what_it_is_and_its_default() -> None:
    parsers = [cli.parser()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
                continue
            assert action.help, (parser.prog, action.dest)
            optional = action.option_strings and action.nargs != 0 and not action.required
            # A file is written, read or drawn only if it is named.
            if parser.prog == "pyfa inspect" and action.dest in inspect_timing._FLAGS:
                continue  # those of `pyfa explain`, where any is given
            if optional and action.default in (None, ()) and action.metavar not in ("FILE", "DIR"):
                assert "default" in action.help, (parser.prog, action.dest)


class TestLayout:
    HEAD = ("kernel", "what it is", "size")
    ROWS = (("attn_fwd", "the forward kernel of every problem", "12 B"), ("x", "", "1 B"))

    def test_wide_enough(self) -> None:
        assert layout.table(self.HEAD, self.ROWS, 80)[1] == (
            "attn_fwd  the forward kernel of every problem  12 B"
        )

    def test_cells_wrap_between_words(self) -> None:
        lines = layout.table(self.HEAD, self.ROWS, 45)
        assert lines[1:3] == [
            "attn_fwd  the forward kernel of every    12 B",
            "          problem",
        ]

    def test_too_many_columns_are_turned(self) -> None:
        head = [f"column{number}" for number in range(12)]
        rows = [["a" * 8] * 12, ["b" * 8] * 12]
        assert layout.table(head, rows, 40)[0] == "column0   aaaaaaaa  bbbbbbbb"

    def test_or_each_row_is_a_block(self) -> None:
        head = [f"column{number}" for number in range(12)]
        rows = [[letter * 30] * 12 for letter in "ab"]
        lines = layout.table(head, rows, 60)
        assert lines[0] == "a" * 30
        assert lines[1] == "  column1   " + "a" * 30
        assert len(lines) == 24

    def test_a_word_is_never_broken(self) -> None:
        path = "/a/path/that/is/longer/than/all/that/there/is/room/for"
        for width in (10, 20, 40):
            assert path in "\n".join(layout.table(("name", "where"), [("x", path)], width))
            assert path in layout.paragraph(f"written to {path}", width)


if __name__ == "__main__":
    import tempfile

    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        for width in WIDTHS:
            with tempfile.TemporaryDirectory() as folder:
                text = shown(name, width, Path(folder))
            (SNAPSHOTS / f"{name}_{width}.txt").write_text(text)
