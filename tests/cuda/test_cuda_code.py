"""What every plan's cubin takes, read without a GPU, and what the compiler says of bad source."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ptxas
import pytest
import turns

from pyfa import cubin, sources
from pyfa.backends.cuda import code, forward_sm90, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import catalog
from pyfa.cli.compile import build, cuda_row
from pyfa.errors import CodeObjectError, CompileError
from pyfa.plan import Plan

pytestmark = pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)

INDEXED = """
extern "C" __global__ void indexed(float *x, int n) {
  __shared__ float shared[100];
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = x[i];
  shared[threadIdx.x] = a[n % 64];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i] = a[i * n % 64] + shared[n];
}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "arch",
    turns.cases(
        ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
        night=("sm_86", "sm_89", "sm_100", "sm_120"),
    ),
)
def test_resources(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No local memory in forward and decode, none in backward up to heads of 128; shared memory
    and occupancy as planned. The last three archs: the common plans, but for those of Hopper that
    other tests compile and hold to more."""
    if arch == "sm_120":
        monkeypatch.setattr(os, "cpu_count", lambda: 1)  # as the other core has tests to run
        chosen = catalog.chosen_plans
        monkeypatch.setattr(catalog, "chosen_plans", lambda *of: ptxas.by_turns(chosen(*of)))
        rows, failed = build(arch, False, ())
        assert not failed
    else:  # as ``build``, without its processes: tests run on every core already
        every = arch in ("sm_80", "sm_86", "sm_89")
        wanted = (catalog.all_plans if every else catalog.common_plans)(TARGET, arch)
        left = [plan for plan in wanted if not ptxas.of_hopper(plan)]
        rows = [cuda_row(arch, plan) for plan in ptxas.by_turns(left)]
    assert {row["kernel"] for row in rows} >= {"attn_fwd", "attn_bwd", "attn_decode", "combine"}
    limit = plans.limits_of(arch).shared_bytes_per_block
    found = []
    for row in rows:
        constants = row["constants"]
        wide = row["kernel"] == "attn_bwd" and constants["HEAD_DIM"] > 128
        # Up to 64 bytes of stack in the backward with score terms of Hopper's own kernel, 8 in its
        # forward with softcap alone (``test_forward_keeps_to_its_registers`` holds every plan).
        softcap = constants.get("SCORE") == forward_sm90.ALONE["softcap"]
        most = 64 if constants.get("TERMS") else 8 if softcap else 0
        if row["stack_bytes"] > most and not wide:
            found.append(f"{row['plan']}: {row['stack_bytes']} bytes of local memory")
        if row["shared_bytes"] > limit:
            found.append(f"{row['plan']}: {row['shared_bytes']} bytes of shared memory")
        wanted = constants.get("BLOCKS") or constants.get("BLOCKS_PER_SM", 1)
        if row["blocks_per_sm"] < wanted:
            found.append(f"{row['plan']}: {row['blocks_per_sm']} blocks on an SM")
    assert found == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_a_cubin_tells_local_and_shared_memory(arch: str) -> None:
    data, report = runtime_compiler.compile_cuda(INDEXED, arch=arch)
    kernel = cubin.parse(data)
    assert (kernel.name, kernel.stack_bytes, kernel.shared_bytes) == ("indexed", 256, 400)
    assert runtime_compiler.spills(report) == (256, 0)
    assert f"Used {kernel.registers} registers" in report


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF" + bytes(200)], ids=len)
def test_what_is_no_cubin(data: bytes) -> None:
    with pytest.raises(CodeObjectError):
        cubin.parse(data)


def test_a_cut_cubin_is_refused_or_read_as_it_is() -> None:
    data, _ = runtime_compiler.compile_cuda(INDEXED, arch="sm_80")
    whole, refused = cubin.parse(data), 0
    for end in range(0, len(data), 97):
        try:
            assert cubin.parse(data[:end]) == whole
        except CodeObjectError:
            refused += 1
    assert refused * 97 > len(data) // 2


def test_an_error_carries_the_log_and_the_source() -> None:
    with pytest.raises(CompileError, match="NVRTC failed for sm_86") as caught:
        runtime_compiler.compile_cuda("__global__ void k() { nonsense; }", arch="sm_86")
    assert "nonsense" in caught.value.log
    kept = Path(caught.value.source_path)
    assert kept.read_text() == "__global__ void k() { nonsense; }"
    kept.unlink()


def test_shared_memory_that_a_block_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("cuda", "cuda/combine.cu", (("DTYPE", 0), ("SHARED_BYTES", 99 * 1024 + 16)))
    assert code.build(Plan("cuda", "cuda/combine.cu", (("DTYPE", 0),)), "sm_86")
    with pytest.raises(
        CodeObjectError, match="needs 101392 B of shared memory; the limit is 101376 B"
    ):
        code.build(plan, "sm_86")


def test_the_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = runtime_compiler.importlib.util.find_spec

    def without(name: str) -> Any:
        return None if name == "cuda.core" else find(name)

    monkeypatch.setattr(runtime_compiler.importlib.util, "find_spec", without)
    runtime_compiler.why_unavailable.cache_clear()
    try:
        why = runtime_compiler.why_unavailable()
        assert why == (
            "the package cuda-core is not installed (pip install 'pyfa-attention[cuda]' brings it)"
        )
        with pytest.raises(CompileError, match="cuda-core is not installed"):
            runtime_compiler.compile_cuda("", arch="sm_80")
    finally:
        runtime_compiler.why_unavailable.cache_clear()


@pytest.fixture
def asked() -> Iterator[Callable[[], str]]:
    """The compiler's version, asked anew."""

    def again() -> str:
        runtime_compiler.version.cache_clear()
        return runtime_compiler.version()

    yield again
    runtime_compiler.version.cache_clear()


@pytest.mark.parametrize("which", ["another file", "another size"])
def test_the_version_is_that_of_the_loaded_library(
    asked: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Found first is a package that lists another library, or this one as it was before."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
    release, whole = ".".join(map(str, nvrtc.nvrtcVersion()[1:])), asked()
    assert whole.startswith(f"nvrtc {release}")
    (tmp_path / path.name).touch()
    listed, size = (path.name, path.stat().st_size) if which == "another file" else (path, 1)
    told = tmp_path / f"nvidia_cuda_nvrtc-{release}.999.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Name: nvidia-cuda-nvrtc\nVersion: {release}.999\n")
    (told / "RECORD").write_text(f"{listed},,{size}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("nvidia-cuda-nvrtc") == f"{release}.999"
    assert asked() == whole


def test_a_library_of_no_package_is_named_by_its_build(
    asked: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_compiler, "_packages", lambda: iter(()))
    assert re.fullmatch(r"nvrtc \d+\.\d+ [0-9a-f]{40}", asked())


def test_the_same_source_gives_the_same_bytes() -> None:
    plan = plans.plan_of("append", 1)
    assert code.build(plan, "sm_80") == code.build(plan, "sm_80")


def parameters_of_lambdas(text: str) -> Iterator[str]:
    for match in re.finditer(r"\[[&=]?\]\s*\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield text[match.end() : end]


def test_no_lambda_has_a_parameter_of_type_auto() -> None:
    """NVRTC 13.0 takes such a lambda for a host function and refuses it; 13.5 compiles it."""
    (found,) = parameters_of_lambdas("auto f = [&](float (&x)[4], const auto &y) { auto z = y; };")
    assert "auto" in found
    for path in sorted((sources.directory() / "cuda").rglob("*")):
        if path.suffix in (".h", ".cu"):
            for parameters in parameters_of_lambdas(path.read_text()):
                assert not re.search(r"\bauto\b", parameters), path
