"""benchmarks/random_launches.py: what it draws, and that a fault does not get past it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pyfa.problem import FEATURES

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--backend", "torch", "--against", "reference", "--longest", "40", "--scores", "4000"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = importlib.import_module("random_launches")
    monkeypatch.setattr(found.machine, "RESULTS", tmp_path)
    yield found
    for name in ("random_launches", "random_cases", "disturbance", "machine"):
        del sys.modules[name]


@pytest.fixture
def kinds(script: Any) -> Any:
    return importlib.import_module("random_cases").KINDS


def options(**given: Any) -> argparse.Namespace:
    usual = {"backend": "torch", "against": "reference", "longest": 40, "scores": 4e3, "seed": "0",
             "each": 4, "plant": ""}  # fmt: skip
    return argparse.Namespace(**usual | given)


def test_cases_are_of_all_kinds_and_mean_something(script: Any, kinds: Any) -> None:
    full = options(longest=1500, scores=6e6)
    cases = [script.drawn(index, full) for index in range(400)]
    assert cases == [script.drawn(index, full) for index in range(400)]
    assert not [case.flaws() for _, case in cases if case.flaws()]
    assert [kind for kind, _ in cases[: len(kinds)]] == list(kinds)
    features = {name for _, case in cases for name in case.features}
    # What fuzz.py draws, or a suite of its own.
    others = {"batch_invariant", "chunk", "negative_edge", "score_mod", "mask_mod"}
    others |= {"latent", "topk", "wide", "tree", "captured_grad"}
    assert features == set(FEATURES) - {"bias", "bias_grad", "fp8"} - others
    # Triton compiles others for fewer rows, where there is no more to it than the heads' own sizes.
    for kind, case in cases:
        assert max(case.lengths_q) >= kind.least or kind.cached == "decode"
    pieces = [(-(-max(case.lengths_q) // 192)) * case.heads_q * case.batch
              for kind, case in cases if kind.own]  # fmt: skip
    assert sum(count > 132 for count in pieces) > 60  # more than an H200 has SMs


def test_launches_of_every_kind_pass(script: Any, kinds: Any) -> None:
    passed, bits = set(), 0
    for index in range(len(kinds)):
        found = script.examined(index, options(each=2))
        assert not found.failures
        assert found.launches == 2
        passed.add(found.kind)
        bits += found.bits
    assert passed == {kind.name for kind in kinds}
    assert bits > 4 * len(kinds)


@pytest.mark.parametrize("name", ["out", "dk", "dq", "inference_out", "lse"])
def test_a_difference_is_found(script: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right, launches = script.launch, []

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        results = right(*arguments)
        launches.append(results)
        if len(launches) > 2 and name in results:
            results[name] = results[name].clone()
            # A gradient of q may differ in its last bits, but not by that much.
            results[name].view(-1)[7] += 1.0 if name == "dq" else 0.01
        return results

    monkeypatch.setattr(script, "launch", wrong)
    failures = script.examined(1, options()).failures
    assert failures
    assert all(f": {name} " in failure for failure in failures)


def test_a_wrong_kernel_is_found_though_it_is_always_so(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = script.launch

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: x * 1.5 if name == "dv" else x for name, x in right(*arguments).items()}

    monkeypatch.setattr(script, "launch", wrong)
    failures = script.examined(1, options()).failures
    assert [failure.split(":")[0] for failure in failures] == ["torch", "at rest"]


def test_a_write_around_the_inputs_is_found(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = script.launch

    def wrong(inputs: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        inputs.placed["v"].buffer[-1] = 7
        return right(inputs, *arguments)

    monkeypatch.setattr(script, "launch", wrong)
    failures = script.examined(1, options()).failures
    assert failures == ("inputs or what lies around them changed: v",)


def test_other_kernels_than_expected_are_found(
    script: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.device, "of", lambda where: script.device.DEVICES["H200"])
    both, decode = kinds[0], kinds[-1]
    own, older = "cuda/sm90/attn_fwd.cu", "cuda/sm80/attn_bwd.cu"
    cpu = torch.device("cpu")
    assert not script.unexpected(both, [own, own], "cuda", cpu)
    assert older in script.unexpected(both, [own, older], "cuda", cpu)
    assert not script.unexpected(decode, [older], "cuda", cpu)
    assert "none" in script.unexpected(decode, [], "cuda", cpu)
    assert not script.unexpected(both, ["attention_forward"], "triton", cpu)


def test_a_stuck_process_is_reported(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ["--launches", "4", "--each", "4", "--jobs", "1", "--plant", "stuck", "--stuck", "2",
            "--save"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["random_launches.py", *TINY, *more])
    monkeypatch.setattr(script, "_TO_COMPILE", 20)
    assert script.main() == 1
    _, case = script.drawn(0, options())
    assert f"failed {case.name}\n    stuck: nothing for 2 s" in capsys.readouterr().out
    saved = json.loads((tmp_path / "random_launches_torch_cpu.json").read_text())
    assert saved["launches"] == 0
    assert list(saved["failed"]) == [case.name]
    assert saved["environment"]["torch"] == torch.__version__
