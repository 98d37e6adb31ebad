"""The picture in docs/how.md of a call's way through the code is the way that calls take."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa

ROOT = Path(__file__).parent.parent
PACKAGE = Path(pyfa.__file__).parent
# Files of one first call; a repeated one passes six. Fewer is better.
MOST = 36


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    sys.modules.pop("no_gpu", None)


def picture() -> dict[str, tuple[bool, bool]]:
    """Each file with whether a first call and a repeated one pass it, of this call or another."""
    text = (ROOT / "docs" / "how.md").read_text()
    (drawn,) = re.findall(r"^    pyfa/.*\n((?:    .*\n)+)", text, re.M)
    found = {}
    for line in drawn.splitlines():
        folder = ""
        for name in re.findall(r"[\w/]+\.py", line[:58]):
            if folder and name.startswith(("hip/", "cuda/")):
                name = f"backends/{name}"
            elif folder and "/" not in name:
                name = f"{folder}/{name}"
            folder = str(Path(name).parent) if "/" in name else ""
            marks = line[90:]
            found[name] = ("x" in marks, marks.count("x") == 2)
    return found


def files_of(call: Callable[[], Any]) -> list[str]:
    """Those of pyfa whose functions ``call`` passes, in the order of the first of each."""
    found: dict[str, None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(f"{PACKAGE}/") and code.co_name != "<module>"
        if event == "call" and inside:
            found[Path(code.co_filename).relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def ways(vendor: str, attend: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Of a first call and of the next, where every module was imported before."""
    on = getattr(importlib.import_module("no_gpu"), vendor)
    with on():
        attend()
    with on():
        return files_of(attend), files_of(attend)


def dense(rows: int = 128) -> Callable[[], Any]:
    q, k, v = (torch.randn(2, n, 4, 64).to(torch.bfloat16) for n in (rows, 128, 128))
    return lambda: pyfa.attention(q, k, v)


def cached() -> Callable[[], Any]:
    q, k, v = (torch.randn(2, n, 4, 64).to(torch.bfloat16) for n in (1, 128, 128))
    return lambda: pyfa.attention_kvcache(q, k, v)


def trained() -> Callable[[], Any]:
    q = torch.randn(2, 128, 4, 64).to(torch.bfloat16).requires_grad_()
    return lambda: pyfa.attention(q, q, q).sum().backward()


def test_its_files_are_there() -> None:
    drawn = picture()
    assert len(drawn) > 40
    assert [name for name in drawn if not (PACKAGE / name).is_file()] == []


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
@pytest.mark.parametrize("make", [dense, cached, trained])
def test_calls_pass_what_is_drawn(vendor: str, make: Callable[[], Callable[[], Any]]) -> None:
    drawn = picture()
    first, again = ways(vendor, make())
    assert [name for name in first if name not in drawn or not drawn[name][0]] == []
    if make is not trained:
        assert [name for name in again if not drawn[name][1]] == []
        assert len(first) <= MOST
        assert len(again) <= 6


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_the_picture_is_in_the_order_of_the_call(vendor: str) -> None:
    """The folders, at least: what asks comes before what binds, and that before what launches."""
    first, _ = ways(vendor, dense())
    wanted = ["api.py", "request.py", "dispatch.py", "backends/native/backend.py",
              "backends/native/forward.py", "backends/native/attend.py",
              "backends/common/arguments.py"]  # fmt: skip
    assert [name for name in first if name in wanted] == wanted
    drawn = list(picture())
    assert [name for name in drawn if name in wanted] == wanted
