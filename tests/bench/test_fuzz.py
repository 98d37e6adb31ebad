"""benchmarks/fuzz.py: what it draws, and that each kind of fault is found and made small."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import turns

from pyfa.backends import BACKENDS
from pyfa.conformance.build import build
from pyfa.conformance.cases import KINDS, Case
from pyfa.conformance.examine import Expected
from pyfa.conformance.report import CaseResult
from pyfa.conformance.tolerances import judge
from pyfa.problem import FEATURES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


def fuzz(*given: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--jobs", "1", "--longest", "70", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_it_draws_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import fuzz as script

    backend = BACKENDS["torch"]
    # The rarest, gradients of captured tensors, are drawn 9 times in 2,400 problems.
    cases = [script.drawn(f"0/{i}", backend, 300) for i in range(1200)]
    assert script.drawn("0/7", backend, 300) == cases[7], "a number is the same problem everywhere"
    assert set().union(*(case.features for case in cases)) == set(FEATURES) - {
        "topk",
        "wide",
    }
    assert {case.kind for case in cases} == set(KINDS)
    assert any(case.hostile for case in cases)
    for case in cases:
        other = script.again(case)
        assert not other.flaws()
        assert other != case
        assert sorted(other.lengths_k) == sorted(case.lengths_k)


def test_right_numbers_pass() -> None:
    done = fuzz("--problems", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("6 problems, calls: {'passed': ")
    assert done.stdout.endswith("wrong: 0\n")


@pytest.mark.parametrize(
    "what", turns.cases(("numbers", "crash", "stuck"), night=("crash", "stuck"))
)
def test_a_fault_is_found(what: str, tmp_path: Path) -> None:
    done = fuzz("--problems", "3", "--plant", what, "--stuck", "8", "--seed", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cases = [\n    Case(" in done.stdout
    said = {"numbers": "max error", "crash": "ended with status 3", "stuck": "Timeout (0:00:08)!"}
    assert said[what] in done.stdout
    if what != "numbers":
        return
    # The call that is printed fails as well, and is the smallest that does: more than 40 keys.
    paste = done.stdout[done.stdout.index("from pyfa.backends") :].split("\n\n")[0]
    namespace: dict[str, Any] = {}
    exec(paste.rsplit("\n", 1)[0], namespace)
    (small,) = namespace["cases"]
    assert small.name == "dense-bf16-b1-q1-k41-h1x1-d64x64"


LEFT_OUT = """
import json
import fuzz
from pyfa.conformance.cases import Case

triton, found = fuzz.BACKENDS["triton"], {}
for dtype, cache_dtype, hostile in (
    ("float8_e4m3fn", "", "k=nan"),
    ("float8_e4m3fnuz", "", "v=nan"),
    ("bfloat16", "float8_e4m3fn", "v=nan"),
    ("bfloat16", "float8_e4m3fn", "q=nan"),
    ("float16", "", "v=nan"),
):
    kind = "kvcache" if cache_dtype else "dense"
    case = Case(kind=kind, dtype=dtype, cache_dtype=cache_dtype, lengths_q=(3,), lengths_k=(5,),
                heads_q=1, heads_k=1, head_dim=16, head_dim_v=16, hostile=hostile)
    assert not case.flaws(), case.flaws()
    reason, given = fuzz.left_out(case, triton), fuzz.wrong([case], triton)
    kept, fuzz.left_out = fuzz.left_out, lambda case, backend: ""
    found[case.name] = reason, given, fuzz.wrong([case], triton)
    fuzz.left_out = kept
print(json.dumps([*found.values()]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_what_the_interpreter_makes_wrong_is_left_out() -> None:
    """Exactly that: what is left out fails if it runs, and the rest runs and passes. If this fails
    because a case passes, Triton has mended its interpreter, and the exclusion can go."""
    path = f"{SCRIPT.parents[1]}{os.pathsep}{SCRIPT.parent}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT], capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for reason, given, run in found[:3]:
        assert reason == "Triton's interpreter reads a NaN of float8 as a number"
        assert given == ["", [f"left out: {reason}"]]
        assert run[1] == ["failed"]
        assert "NaN: 0 where none belongs" in run[0]
    for reason, given, run in found[3:]:
        assert not reason
        assert given == run == ["", ["passed"]]


def test_nothing_is_left_out_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import fuzz as script

    case = Case(dtype="float8_e4m3fn", hostile="k=nan")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert script.left_out(case, BACKENDS["triton"])
    assert not script.left_out(case, BACKENDS["torch"])
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not script.left_out(case, BACKENDS["triton"])


def test_what_was_wrong_runs_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part keeps its commit, and a wrong problem what came of it on which commit."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import fuzz as script

    monkeypatch.setattr(script.machine, "RESULTS", tmp_path)
    options = argparse.Namespace(backend="torch", seed="7", longest=70, families=0, save=True,
                                 first=0, commit="before")  # fmt: skip
    case = script.numbered(1, options)
    found = script.Found()
    found.problems = 2
    found.wrong = [{"problem": 1, "message": "failed", "paste": script.to_paste([case], "torch")}]
    script.save(found, options, 3)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["wrong"] == 1
    options.commit = "after"
    assert script.run_again(options) == 0
    saved = json.loads(path.read_text())
    assert (saved["tried"], saved["wrong"], saved["mended"]) == (2, 0, 1)
    (part,) = saved["parts"]
    assert part["commit"] == "before"
    assert part["wrong"][0]["again"]["commit"] == "after"
    # The next part stands beside it, and a problem that is wrong still is counted so.
    monkeypatch.setattr(script, "wrong", lambda *_: ("failed again", ["failed"]))
    options.first, found.wrong = 2, []
    script.save(found, options, 3)
    assert script.run_again(options) == 1
    saved = json.loads(path.read_text())
    assert (saved["tried"], saved["wrong"], saved["mended"]) == (4, 1, 0)
    assert [each["commit"] for each in saved["parts"]] == ["before", "after"]


def test_equal_rows_are_one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over one number is chance: a kernel that rounds P to float16 as eager attention does,
    but before the division, has twice its error in the first case. In the second case as many rows
    have as many roundings, and one ulp too much in each output is found."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import fuzz as script

    shape: dict[str, Any] = {
        "dtype": "float16",
        "heads_q": 1,
        "heads_k": 1,
        "head_dim": 1,
        "head_dim_v": 1,
    }
    one, many = (
        Case(lengths_q=(130,), lengths_k=(130,), recipe=recipe, **shape)
        for recipe in ("growing", "plain")
    )

    def judged(case: Case, out: Callable[[torch.Tensor], torch.Tensor]) -> CaseResult:
        expected = Expected(build(case))
        ref, naive = expected.ref["out"], expected.naive["out"]
        check = judge("out", out(ref), ref, naive)
        return CaseResult(case.name, case.dtype, (), "failed", (check,))

    def as_a_kernel(ref: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view().flatten().float() for x in build(one).placed.values())
        scores = q[0] * k
        p = torch.exp(scores - scores.max())
        return torch.full_like(ref, float((p.half() * v).sum() / p.sum())).half()

    def an_ulp_too_much(ref: torch.Tensor) -> torch.Tensor:
        return (ref.half().view(torch.int16) + 1).view(torch.float16)

    found = judged(one, as_a_kernel)
    assert found.checks[0].message.startswith("out: mean error 7.979e-05, allowed 6.342e-05")
    assert script.is_chance(one, found)
    found = judged(many, an_ulp_too_much)
    assert found.checks[0].message.startswith("out: mean error")
    assert not script.is_chance(many, found)
