"""The command line where something is too large, closed, or of another encoding."""

from __future__ import annotations

import io
import sys

import pytest

from pyfa.cli import main


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_a_problem_beyond_any_tensor(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--batch", "999999999999", "--seqlen", "999999999"])
    assert ended.value.code == 2
    assert "--batch: expected at most 2,147,483,647" in capsys.readouterr().err
    assert main([command, "--batch", "999999999", "--seqlen", "999999999"]) == 2
    assert "got shape (999999999, 999999999, 8, 64)" in capsys.readouterr().err


def test_closed_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "pyfa: error: standard output is closed\n"


def test_an_encoding_without_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["plan", "--device", "MI300X", "--backend", "hip"]) == 0
    sys.stdout.flush()
    text = written.getvalue().decode("ascii")
    assert "No timing model" in text
    assert "\\xd7" in text or "\\u" in text
