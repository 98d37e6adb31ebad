"""What a newcomer stumbled over and no other test holds: see the history of this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyfa import cli, device

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["mi300x", "tutorial_mi300x"])
def test_the_extras_that_an_owner_installs_suffice_for_the_commands(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert "pyfa bench --report" in text  # needs matplotlib and jinja2
    first = re.search(r"pip install '\.\[([\w,]+)\]'", text)
    assert first is not None
    assert {"compile", "bench"} <= set(first[1].split(","))
    assert "open an issue" in text or "to an issue" in text  # where the report goes


def test_an_owner_starts_from_a_bare_machine() -> None:
    text = (ROOT / "docs" / "tutorial_mi300x.md").read_text()
    for needed in ("docker run", "/dev/kfd", "--group-add", "minutes:", "should show", "Expect"):
        assert needed in text, needed
    assert "tutorial_mi300x.md" in (ROOT / "docs" / "mi300x.md").read_text()


@pytest.mark.parametrize(
    "name",
    ["B200", "H200", "RTX 5090", "RTX4090", "RTX 3090", "L40S", "MI300A", "MI325X", "MI308X"],
)
def test_devices_have_the_names_that_people_use(name: str) -> None:
    assert device.by_name(name).arch


@pytest.mark.parametrize(("name", "own", "other"), [
    ("MI300X", "LDS", "shared memory"),
    ("H200", "shared memory", "LDS"),
])  # fmt: skip
def test_on_chip_memory_has_the_vendors_word(
    name: str, own: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["plan", "--seqlen", "4096", "--head-dim", "128", "--device", name])
    text = capsys.readouterr().out
    assert own in text
    assert other not in text


@pytest.mark.parametrize("plan", ["sdpa", "tiled"])
def test_the_demo_says_when_it_times_pytorchs_own_attention(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyfa.cli import demo

    data: dict[str, Any] = {
        "device": "CPU", "threads": 2, "problem": "p", "backend": "torch", "plan": plan,
        "note": "", "checks": {}, "speedup": 1.0,
    }  # fmt: skip
    demo._print_what(data)
    assert ("PyTorch's own fused attention" in capsys.readouterr().out) == (plan == "sdpa")


def test_bench_says_how_far_rounds_differ() -> None:
    from pyfa.cli import bench

    rows = [
        {"peer": "pyfa", "round_medians": [1.0, 1.1, 1.0]},
        {"peer": "pyfa", "round_medians": [2.0, 2.0]},
        {"peer": "flash", "round_medians": [1.0, 9.0]},
        {"peer": "pyfa"},
    ]
    assert bench._spread(rows) == "5.0%, 10.0%"
    assert bench._spread(rows[2:]) == ""


@pytest.mark.parametrize(("page", "words"), [
    ("training", "one thread computes the dropout bits"),
    ("integrations", "it is the mean of the values"),
    ("integrations", "`flash_attn.losses`, `flash_attn.modules`"),
    ("start", "`plan: sdpa`"),
])  # fmt: skip
def test_known_limits_are_said(page: str, words: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert words in text
