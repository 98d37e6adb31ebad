"""Cubins of the bundle: found before any compiler, refused where they cannot be loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyfa import bundle, dispatch
from pyfa.backends import BACKENDS
from pyfa.backends.common import libcuda
from pyfa.backends.cuda import code, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import catalog
from pyfa.cli import bundling, main
from pyfa.cli.compile import cuda_row
from pyfa.device import DEVICES
from pyfa.errors import CodeObjectError, CompileError, PerformanceWarning
from pyfa.plan import Plan
from pyfa.problem import Problem

MISSING = "the package cuda-core is not installed"


def problem(dim: int, *features: str, device: str = "H200", seqlen_q: int = 256) -> Problem:
    return Problem(
        1, seqlen_q, 256, 1, 1, dim, dim, "bfloat16", frozenset(features), DEVICES[device],
        seqlen_q == 256,
    )  # fmt: skip


def clear() -> None:
    bundle.manifest.cache_clear()
    code.load.cache_clear()
    code.why_no_compiler.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bundle's folder of this test's own."""
    monkeypatch.setattr(bundle, "FOLDER", tmp_path / "bundle")
    clear()
    yield tmp_path / "bundle"
    clear()


@pytest.fixture
def without_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle of all common plans for sm_90, of bytes that nobody runs, and no NVRTC."""
    write(folder, catalog.common_plans(TARGET, "sm_90"), "sm_90")
    monkeypatch.setattr(runtime_compiler, "why_unavailable", lambda: MISSING)
    monkeypatch.setattr(
        type(BACKENDS["cuda"]), "why_unavailable", lambda self: code.why_unavailable()
    )
    monkeypatch.setattr(type(BACKENDS["triton"]), "why_unavailable", lambda self: None)
    monkeypatch.setattr(dispatch, "_lost", set())
    return folder


def write(folder: Path, wanted: list[Plan], arch: str, compiler: str = "nvrtc 12.9.86") -> None:
    rows = []
    for plan in wanted:
        data, target = str(plan).encode(), plans.compiled_for(arch, plan)
        rows.append({
            "kernel": plan.kernel.split("/")[-1].split(".")[0],
            "plan": str(plan),
            "sha256": hashlib.sha256(data).hexdigest(),
            "key": code.key_of(plan, target),
            "data": data,
            "bundled": {"arch": target, "compiler": compiler},
        })  # fmt: skip
    assert bundling.bundle(rows, False, ()) == ([], [])


@pytest.mark.parametrize(
    "wanted",
    [problem(128, "causal"), problem(64, "causal", "backward"), problem(128, seqlen_q=1)],
    ids=["forward", "backward", "decode"],
)
def test_the_bundle_is_enough(wanted: Problem, without_compiler: Path) -> None:
    cuda: Any = BACKENDS["cuda"]
    assert cuda.why_unavailable() is None
    assert list(cuda.why_not(wanted)) == []
    assert dispatch._choose(wanted, "").backend.NAME == "cuda"
    for plan in cuda.kernels(wanted):
        found = code.load(plan, plans.compiled_for(wanted.arch, plan))
        assert found.origin == "bundle"
        assert found.data == str(plan).encode()


def test_what_is_not_bundled_runs_on_triton(without_compiler: Path) -> None:
    for wanted in (problem(96, "causal"), problem(128, device="L40S")):
        (reason,) = BACKENDS["cuda"].why_not(wanted)
        assert reason.startswith("no code for this problem is bundled (attn_fwd")
        with pytest.warns(PerformanceWarning, match="no code for this problem is bundled"):
            assert dispatch._choose(wanted, "").backend.NAME == "triton"
        dispatch._lost.clear()
        with pytest.raises(CompileError, match=MISSING):
            code.load(BACKENDS["cuda"].plan(wanted), "sm_90")


def test_a_driver_that_is_too_old_gets_none(
    without_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's binaries load on drivers of their own major version, and on newer ones."""
    for driver, fits in (((13, 0), True), ((12, 4), True), ((11, 8), False)):
        monkeypatch.setattr(libcuda, "version", lambda driver=driver: driver)
        clear()
        assert (list(BACKENDS["cuda"].why_not(problem(128))) == []) is fits


def test_without_a_bundle_the_compiler_is_what_is_missing(
    without_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "FOLDER", without_compiler / "none")
    clear()
    assert BACKENDS["cuda"].why_unavailable() == MISSING


def test_damaged_cubins_are_refused(without_compiler: Path) -> None:
    plan = BACKENDS["cuda"].plan(problem(128))
    target = plans.compiled_for("sm_90", plan)
    entry = bundle.entry(target, code.key_of(plan, target))
    assert entry is not None
    (without_compiler / entry["file"]).write_bytes(b"other")
    with pytest.raises(CodeObjectError, match="not the file that was verified"):
        code.load(plan, target)


@pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)
def test_compile_writes_what_load_finds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with the compiler; the bytes are those that the compiler makes again."""
    few = [
        plan
        for plan in catalog.common_plans(TARGET, "sm_90")
        if not dict(plan.constants).get("HEAD_DIM")
    ]
    assert len(few) == 7
    monkeypatch.setattr(catalog, "all_plans", lambda target, arch: few)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # a process takes 4 s to import PyTorch
    assert main(["compile", "--arch", "sm_80,sm_90", "--bundle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["failed"], report["left_out"], len(report["objects"])) == ([], [], 14)
    manifest = json.loads((folder / "manifest.json").read_text())
    objects = manifest["objects"].values()
    assert {entry["compiler"] for entry in objects} == {runtime_compiler.version()}
    assert {entry["arch"] for entry in objects} == {"sm_80", "sm_90"}
    for arch in ("sm_80", "sm_90"):
        found = code.load(few[0], arch)
        assert found.origin == "bundle"
        assert found.data == code.build(few[0], arch)
    # A report on code is on what the compiler makes now, and not on a bundle.
    assert cuda_row("sm_80", few[0])["sha256"] == code.load(few[0], "sm_80").digest
    (folder / "manifest.json").write_text("{}")
    bundle.manifest.cache_clear()
    assert code.compiled(few[0], "sm_80").origin in ("cache", "built")


def test_head_dims(capsys: pytest.CaptureFixture[str]) -> None:
    plain = catalog.chosen_plans(TARGET, "sm_80", False, (96,))
    every = catalog.chosen_plans(TARGET, "sm_80", True, (96,))
    for found in (plain, every):
        assert {dict(plan.constants).get("HEAD_DIM") or 96 for plan in found} == {96}
    assert set(plain) < set(every)
    assert catalog.chosen_plans(TARGET, "sm_80", True) == catalog.all_plans(TARGET, "sm_80")
    with pytest.raises(SystemExit):
        main(["compile", "--arch", "sm_80", "--head-dim", "wide"])
    assert "--head-dim: expected head dims such as 64,128, got wide" in capsys.readouterr().err


def test_a_bundle_of_another_schema_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, catalog.common_plans(TARGET, "sm_90")[:1], "sm_90")
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    clear()
    assert not bundle.archs()
    assert f"expected schema {bundle.SCHEMA}, got 1" in caplog.text
