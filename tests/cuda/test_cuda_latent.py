"""Latent attention on Hopper: which kernel takes a call, why, and with how many blocks."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pyfa
from pyfa import abi
from pyfa.backends.cuda import decode, latent_sm90
from pyfa.device import DEVICES
from pyfa.dispatch import ask
from pyfa.plan import Plan
from pyfa.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LATENT = frozenset({"latent", "gqa", "dv"})
EXAMPLE = Problem(2, 1, 1024, 128, 1, 576, 512, "bfloat16", LATENT, DEVICES["H200"], False)


def plan_of(**changes: Any) -> Plan:
    changes["features"] = LATENT | changes.get("features", frozenset())
    found = ask("cuda", replace(EXAMPLE, **changes), hypothetical=True).plan
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("heads", "rows", "own"),
    [(128, 1, True), (64, 1, True), (16, 2, True), (17, 1, True), (16, 1, False), (4, 4, False)],
)
def test_many_rows_have_a_kernel_of_their_own(heads: int, rows: int, own: bool) -> None:
    plan = plan_of(heads_q=heads, seqlen_q=rows)
    assert plan.kernel == (latent_sm90.KERNEL if own else decode.KERNEL)
    assert any("less than 17 query rows" in note for note in plan.notes) is not own


@pytest.mark.parametrize(("heads", "batch", "keys", "own"), [
    (16, 16, 65536, True), (16, 128, 8192, True), (16, 16, 32768, False), (9, 16, 65536, True),
    (8, 16, 65536, False),
])  # fmt: skip
def test_a_million_keys_are_enough_for_16_rows(
    heads: int, batch: int, keys: int, own: bool
) -> None:
    plan = plan_of(seqlen_q=1, heads_q=heads, batch=batch, seqlen_k=keys)
    assert plan.kernel == (latent_sm90.KERNEL if own else decode.KERNEL)


@pytest.mark.parametrize(
    "changes",
    [
        {"features": frozenset({"causal", "sinks", "seqused"}), "seqlen_q": 4},
        {"features": frozenset({"paged", "seqused"}), "page_size": 64},
        {"features": frozenset({"paged"}), "page_size": 256, "dtype": "float16"},
        {"features": frozenset({"paged"}), "page_size": 16},
        {"head_dim": 320, "head_dim_v": 256},
    ],
)
def test_what_it_takes(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    assert plan.kernel == latent_sm90.KERNEL
    rows = dict(plan.constants).get("PAGE_ROWS", 0)
    assert rows == min(changes.get("page_size", 0), 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"features": frozenset({"paged"}), "page_size": 7}, "multiple of 8 keys"),
        ({"features": frozenset({"paged", "topk"}), "page_size": 1}, "a list of keys"),
        ({"features": frozenset({"fp8"}), "dtype_k": "float8_e4m3fn"}, "float8"),
        ({"features": frozenset({"softcap"})}, "softcap"),
        ({"features": frozenset({"tree"})}, "tree_mask"),
        ({"positive": False}, "a scale of 0 or less"),
    ],
)
def test_what_it_leaves_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    plan = plan_of(**changes)
    assert plan.kernel == decode.KERNEL
    assert any(note.startswith("sm80's kernel") and reason in note for note in plan.notes)


@pytest.mark.parametrize("device", ["A100-80GB", "RTX4090"])
def test_other_archs_say_nothing_of_it(device: str) -> None:
    plan = plan_of(device=DEVICES[device])
    assert plan.kernel == decode.KERNEL
    assert not any("sm90" in note for note in plan.notes)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("no_gpu")


@pytest.mark.parametrize(("rows", "heads", "parts"), [(1, 64, 1), (1, 128, 3), (3, 48, 2)])
def test_a_block_has_64_rows_of_all_heads(
    no_gpu: ModuleType, rows: int, heads: int, parts: int
) -> None:
    q = torch.randn(3, rows, heads, 576).bfloat16()
    cache = torch.randn(3, 512, 1, 576).bfloat16()
    with no_gpu.nvidia("H200", notes=True) as driver:
        pyfa.attention_latent(q, cache, scale=0.1, num_splits=parts, backend="cuda")
        main, *combined = driver.launched
    assert main[1][0] == -(-rows * heads // 64) * 3 * parts
    assert main[1][3] == 384
    assert abi.unpack(main[2][: abi.SIZE])["num_splits"] == parts
    assert len(combined) == (parts > 1)


def test_splits_are_of_whole_tiles_and_fill_the_device() -> None:
    key_bytes = 2 * 576

    def splits(blocks: int, keys: int) -> int:
        return decode.splits_for(plan_of(), blocks, keys, 132, key_bytes)

    assert splits(256, 8192) == 1
    assert splits(128, 8192) == 1
    assert splits(32, 65536) in range(4, 9)
    assert splits(2, 65536) >= 33
    assert splits(1, 64) == 1
