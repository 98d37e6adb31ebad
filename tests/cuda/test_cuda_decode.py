"""Decode in parts: which launches it makes, and how what combines the parts follows the parts."""

from __future__ import annotations

import ctypes
import importlib
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import ptxas
import pytest
import torch

import pyfa
from pyfa import abi
from pyfa.backends.common import libcuda
from pyfa.backends.cuda import code, decode, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import catalog, combine
from pyfa.backends.native import decode as native_decode
from pyfa.plan import Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMBINE = plans.plan_of("combine", 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("no_gpu")


def launches_of(device: str, no_gpu: ModuleType, batch: int, parts: int) -> list[Any]:
    q = torch.randn(batch, 1, 32, 128).bfloat16()
    k, v = (torch.randn(batch, 512, 8, 128).bfloat16() for _ in range(2))
    with no_gpu.nvidia(device, notes=True) as driver:
        pyfa.attention_kvcache(q, k, v, causal=True, num_splits=parts, backend="cuda")
        return list(driver.launched)


@pytest.mark.parametrize(
    ("batch", "parts", "blocks"),
    [(3, 2, 12), (3, 5, 24), (1, 32, 32), (1, 8, 8)],  # 8 lines a block, 4, 1, 4
)
def test_a_block_combines_as_many_lines_as_it_has_room_for(
    no_gpu: ModuleType, batch: int, parts: int, blocks: int
) -> None:
    decoded, combined = launches_of("H200", no_gpu, batch, parts)
    assert decoded[1][0] == 8 * batch * parts
    assert (combined[1][0], combined[1][3]) == (blocks, combine.THREADS)
    values = abi.unpack(combined[2])
    assert values["batch"] * values["seqlen_q"] * values["heads_q"] == batch * 32


def test_half_the_bytes_of_a_key_are_half_of_its_time(no_gpu: ModuleType) -> None:
    """Float8 keys are cut into parts by their own bytes; float8 queries come in out's format."""
    q = torch.randn(1, 1, 32, 128).bfloat16()
    cache = [torch.randn(1, 2048, 8, 128) for _ in range(2)]
    parts = {}
    for of_q, of_k in (("bfloat16",) * 2, ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn",) * 2):
        k, v = (x.to(getattr(torch, of_k)) for x in cache)
        with no_gpu.nvidia("H200", notes=True) as driver:
            given = q.to(getattr(torch, of_q))
            out = pyfa.attention_kvcache(given, k, v, backend="cuda")
            values = abi.unpack(driver.launched[0][2])
        assert out.dtype == torch.bfloat16
        assert (values["q"] == given.data_ptr()) == (of_q == "bfloat16")
        parts[of_q, of_k] = values["num_splits"]
    plan = Plan("cuda", decode.KERNEL)
    wanted = [decode.splits_for(plan, 8, 2048, 132, 256 * size) for size in (2, 1, 1)]
    assert list(parts.values()) == wanted
    assert wanted[0] > wanted[1]


ON_FLOAT8 = [
    plan
    for plan in native_decode.all_plans(TARGET, "cuda", "sm_90")
    if {"KEY_DTYPE": 2, "DTYPE": 1}.items() <= dict(plan.constants).items()
]


@pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)
@pytest.mark.usefixtures("kept_reports")
@pytest.mark.parametrize("plan", ptxas.by_turns(ON_FLOAT8), ids=str)
def test_a_float8_cache_spills_nothing_on_hopper(plan: Plan) -> None:
    """Those of sm_89 are among what ``test_cuda_code`` compiles."""
    assert len(ON_FLOAT8) == 15
    report = ptxas.compiled(plan, "sm_90").report
    assert runtime_compiler.spills(report) == (0, 0)


@pytest.mark.parametrize(("device", "ahead"), [("H200", True), ("A100-80GB", False)])
def test_decode_and_what_combines_are_launched_ahead_from_hopper_on(
    no_gpu: ModuleType, device: str, ahead: bool
) -> None:
    for _, config, _ in launches_of(device, no_gpu, 1, 4):
        assert config[-1] == ahead
        if ahead:
            # CUlaunchAttribute: programmatic stream serialization, 1.
            attribute = struct.unpack("II16i", ctypes.string_at(config[-2], 72))
            assert attribute == (6, 0, 1, *[0] * 15)


def test_a_kernel_that_starts_ahead_waits_before_it_reads_what_the_one_before_left() -> None:
    every = {plan for tiles in plans.TILED for plan in catalog.all_plans(TARGET, tiles)}
    ahead = {plan for plan in every if plans.starts_ahead(plan, "sm_90")}
    assert {plan.kernel for plan in ahead} == plans.AHEAD
    assert not any(plans.starts_ahead(plan, "sm_89") for plan in every)
    for plan in ahead:
        source = code.source_of(plan)
        if plan.kernel == "cuda/sm90/attn_bwd.cu":
            assert_backward_waits(source)
            continue
        assert first_of(source.split('extern "C"')[1]) == "griddepcontrol_wait();"


def first_of(function: str) -> str:
    """The first statement of a function, but for its shared memory."""
    lines = (line.strip() for line in function.split("{", 1)[1].splitlines())
    return next(line for line in lines if line and not line.startswith("__shared__"))


def assert_backward_waits(source: str) -> None:
    """Hopper's backward waits before it reads the table of work, the counter of work tiles, row
    states and counters of turns. All else that row_sums leaves comes after the states. A block
    whose keys no row sees waits with its states."""
    wait = "griddepcontrol_wait();"
    kernel = source.split('extern "C"')[1].split("void attn_bwd(")[1]
    assert kernel.index(f"if (has_work_table(p)) {wait}") < kernel.index("begin(mapped, shared)")
    of_tiles = source.split("DEVICE void produce_tiles(")[1]
    assert of_tiles.index(wait) < of_tiles.index("next_work_tile(")
    of_states = source.split("DEVICE void produce_states(")[1]
    steps = of_states.index("step < end")
    assert of_states.index(wait) < steps < of_states.index("row_states(p)")
    for name, reads in (("send_tiles", "claim("), ("take_turns", "semaphore_of(")):
        sender = source.split(f"DEVICE void {name}(")[1]
        assert sender.index(wait) < min(sender.index(reads), sender.index("semaphore_of("))


def test_the_attribute_is_as_the_driver_reads_it() -> None:
    assert ctypes.sizeof(libcuda._Attribute) == 72


@pytest.mark.parametrize("dim", [1, 8, 40, 64, 111, 128, 192, 256, 512])
def test_lines_of_a_workgroup(dim: int) -> None:
    """A slot a part's width, one for every four parts, and never more than a workgroup has."""
    for parts in range(1, 600):
        of_part = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if 4 * n >= dim)
        slots = next(n for n in (2**i for i in range(12)) if 4 * n >= parts)
        lines = combine.rows_of(parts, dim)
        assert lines == max(1, combine.THREADS // (of_part * slots))
