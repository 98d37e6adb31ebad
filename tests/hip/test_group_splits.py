"""A backward that divides the query heads of a group over workgroups: how many parts, and the
gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import faults_found

import pyfa
from pyfa.backends.common import splits
from pyfa.backends.cuda import backward as cuda_backward
from pyfa.backends.cuda import target as cuda
from pyfa.backends.native import backward
from pyfa.backends.native.target import Block
from pyfa.conformance.cases import Case
from pyfa.device import DEVICES
from pyfa.traffic import Shape

# Groups of 4 query heads: dense, packed with unused rows, and with every score term.
CASES = {
    "causal": Case(lengths_q=(70,), lengths_k=(150,), heads_q=8, causal=True, backward=True),
    "varlen": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, heads_q=8, layout="strided", backward=True,
    ),
    "terms": Case(
        lengths_q=(40,), lengths_k=(70,), heads_q=8, alibi="batch", bias="heads", bias_grad=True,
        sinks=True, dropout_p=0.1, dlse="both", backward=True,
    ),
}  # fmt: skip


@pytest.fixture
def divide(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> Callable[[int], None]:
    """Divide every group into so many parts."""

    def divide(parts: int) -> None:
        monkeypatch.setattr(backward, "group_splits", lambda *_: parts)
        nothing_bound()

    return divide


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_gradients_of_the_group(
    name: str, parts: int, deterministic: bool, divide: Callable[[int], None]
) -> None:
    divide(parts)
    case = replace(CASES[name], deterministic=deterministic)
    assert case.heads_q // case.heads_k % parts == 0
    assert faults_found([case]) == []


def test_keys_of_another_head_are_found(
    divide: Callable[[int], None], plant: Callable[[str, str, str], None]
) -> None:
    divide(2)
    kernel = "hip/attn_bwd_onepass.hip"
    plant(kernel, "keys_of(p.v, s, head / p.num_splits,", "keys_of(p.v, s, head % 2,")
    assert faults_found([CASES["causal"]])


def test_a_lost_part_is_found(
    divide: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(4)
    original = torch.Tensor.sum

    def sum_of(x: torch.Tensor, *dim: int, **named: Any) -> torch.Tensor:
        assert dim != (-2,) or named == {"dtype": x.dtype}, "autocast would choose float32"
        return original(x.narrow(-2, 0, 3) if dim == (-2,) else x, *dim, **named)

    monkeypatch.setattr(torch.Tensor, "sum", sum_of)
    assert faults_found([CASES["causal"]])


def test_few_kv_heads_are_divided_and_results_have_their_shape(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    chosen = []
    original = splits.of_group
    monkeypatch.setattr(
        backward.splits, "of_group", lambda *args: chosen.append(original(*args)) or chosen[-1]
    )
    for batch_invariant, expected in ((False, [16]), (True, [])):
        q, k, v = (torch.randn(1, 160, h, 64).bfloat16().requires_grad_() for h in (16, 1, 1))
        out = pyfa.attention(
            q, k, v, causal=True, backend="emulator", batch_invariant=batch_invariant
        )
        out.sum().backward()
        assert k.grad is not None
        assert k.grad.shape == k.shape
        assert chosen == expected
        chosen.clear()


# Sequences, rows and keys, query and KV heads, causal or not; the parts with which the GPU took the
# least time, or at most 3 % more (backward_groups_h200.json, cuda_tuning_h200.json).
MEASURED = [
    ("H200", (2, 8192, 16, 1, True), {4, 8}), ("H200", (1, 8192, 32, 1, True), {8, 16}),
    ("H200", (1, 8192, 8, 1, True), {4, 8}), ("H200", (2, 8192, 32, 8, True), {1, 2}),
    ("H200", (2, 4096, 32, 8, True), {1}), ("H200", (8, 1024, 32, 8, True), {1}),
    ("H200", (1, 8192, 64, 8, True), {1, 2, 4}), ("H200", (2, 8192, 32, 4, False), {1, 2}),
    ("H200", (1, 4096, 8, 1, False), {4, 8}),
    ("H100", (8, 1024, 64, 8, True), {2, 4}), ("H100", (8, 1024, 32, 8, True), {1}),
    ("H100", (8, 1024, 32, 4, True), {4}), ("H100", (8, 1024, 32, 1, True), {8, 16}),
    ("H100", (1, 8192, 64, 8, True), {4, 8}), ("H100", (1, 1024, 32, 8, True), {4}),
    ("H100", (1, 2048, 64, 8, True), {4}), ("H100", (4, 4096, 16, 2, True), {2, 4}),
    ("H100", (8, 1024, 64, 8, False), {1}), ("H100", (16, 512, 32, 8, True), {1}),
]  # fmt: skip


def hopper_block(dim: int) -> Block:
    """The block of Hopper's plain backward."""
    plan = cuda_backward.sm90_plans_of((dim, dim), 1, False)[1]
    return cuda.TARGET.block_of(plan)


@pytest.mark.parametrize(("device", "problem", "best"), MEASURED)
def test_hopper_s_parts_are_those_that_were_fastest(
    device: str, problem: tuple[int, int, int, int, bool], best: set[int]
) -> None:
    batch, length, heads_q, heads_k, causal = problem
    right = 0 if causal else -1
    shape = Shape(batch, length, length, heads_q, heads_k, 128, 128, window_right=right)
    assert backward.group_splits(DEVICES[device], hopper_block(128), shape) in best


def test_rows_that_do_not_fit_the_l2_are_divided() -> None:
    shape = Shape(8, 1024, 1024, 64, 8, 128, 128, window_right=0)
    endless = replace(DEVICES["H100"], l2_bytes=1 << 40)
    assert backward.group_splits(DEVICES["H100"], hopper_block(128), shape) > 1
    assert backward.group_splits(endless, hopper_block(128), shape) == 1


def test_hopper_s_wide_heads_are_divided_sooner() -> None:
    shape = Shape(1, 4096, 4096, 32, 4, 256, 256, window_right=0)
    block = hopper_block(256)
    assert backward.group_splits(DEVICES["H200"], block, shape) in {2, 4, 8}
    without = block._replace(parts=block.parts._replace(tail=0.0))
    assert backward.group_splits(DEVICES["H200"], without, shape) == 1


def test_equal_heads_and_full_devices_are_not_divided() -> None:
    block = Block(256, keys=128)
    equal = Shape(1, 64, 64, 16, 16, 128, 128)
    full = Shape(64, 4096, 4096, 64, 8, 128, 128, window_right=0)
    for shape in (equal, full):
        assert backward.group_splits(DEVICES["MI300X"], block, shape) == 1
    few = Shape(1, 8192, 8192, 32, 1, 128, 128, window_right=0)
    assert backward.group_splits(DEVICES["MI300X"], block, few) == 32
