"""Inline assembly: what it tells the compiler, and what the compiler does not do for it."""

from __future__ import annotations

import re

import pytest

from pyfa import sources
from pyfa.backends.hip import code, compiler
from pyfa.backends.hip.runtime_emulator import faults
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog

STATEMENT = re.compile(r"\basm\b(?:\s+volatile)?\s*\((.*?)\);", re.DOTALL)
WRITES_M0 = re.compile(r"\bs_\w+ m0\b")
LOAD = '"s_mov_b32 m0, %3\\n\\ts_nop 0\\n\\tbuffer_load_dword'
INPUTS = '"v"(offset), "s"(from), "s"(scalar_offset), "s"(to)'


def statements(text: str) -> list[str]:
    return [match[1] for match in STATEMENT.finditer(text)]


def silent_about_m0(text: str) -> list[str]:
    """Statements that write M0 and do not say so in their list of clobbers."""
    found = [s for s in statements(text) if WRITES_M0.search(s)]
    return [s for s in found if '"m0"' not in s.rpartition(":")[2]]


def test_every_statement_that_writes_m0_says_so() -> None:
    texts = [path.read_text() for path in sorted((sources.directory() / "hip").iterdir())]
    assert sum(len(statements(text)) for text in texts) >= 6
    assert sum(bool(WRITES_M0.search(s)) for text in texts for s in statements(text)) == 4
    for text in texts:
        assert silent_about_m0(text) == []
        assert len(silent_about_m0(text.replace(', "m0"', ""))) == text.count(', "m0"')


# Each: what it becomes, and what the gate says. Two of them are of one compile.
WITHOUT_NOP = LOAD, LOAD.replace("s_nop 0\\n\\t", ""), "a scalar instruction writes M0"
# A scalar register written by a vector instruction just before.
LATE_SCALAR = (
    INPUTS,
    INPUTS.replace("scalar_offset", "__builtin_amdgcn_readfirstlane(offset)"),
    "a scalar register that a memory instruction reads",
)
# An address made by a transcendental at the last moment.
LATE_ADDRESS = (
    LOAD,
    LOAD.replace("buffer_load", "v_rcp_f32 %0, %0\\n\\tbuffer_load"),
    "a transcendental's result",
)


@pytest.mark.parametrize(
    "changes", [(WITHOUT_NOP, LATE_SCALAR), (LATE_ADDRESS,)], ids=["scalar", "address"]
)
def test_the_compiler_leaves_its_hazards_and_the_gate_finds_them(
    changes: tuple[tuple[str, str, str], ...],
) -> None:
    if compiler.why_unavailable():
        pytest.skip(compiler.why_unavailable() or "")
    plan = next(
        plan for plan in catalog.common_plans(TARGET, "gfx942") if plan.kernel == "hip/attn_fwd.hip"
    )
    text = code.source_of(plan)
    for snippet, other, _ in changes:
        assert text.count(snippet) == 1
        text = text.replace(snippet, other)
    found = faults(compiler.compile_hip(text, arch="gfx942", options=code.OPTIONS))
    for *_, expected in changes:
        assert sum(expected in each for each in found) > 2
