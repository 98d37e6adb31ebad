"""Hopper's own kernels: what the compiler makes of them, and their tensor maps."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import ptxas
import pytest
import torch

from pyfa import _torch, abi
from pyfa.backends.common import libcuda
from pyfa.backends.common.calls import GENERAL
from pyfa.backends.cuda import (
    counters,
    forward_sm90,
    forward_sm90_fp8,
    latent_sm90,
    plans,
    runtime_compiler,
    tensor_maps,
)
from pyfa.plan import Plan


@pytest.mark.skipif(
    runtime_compiler.why_unavailable() is not None, reason=str(runtime_compiler.why_unavailable())
)
@pytest.mark.usefixtures("kept_reports")
@pytest.mark.parametrize(
    "plan",
    ptxas.by_turns(
        plan
        for plan in forward_sm90.all_plans()
        + forward_sm90_fp8.all_plans()
        + latent_sm90.all_plans()
        if dict(plan.constants)["DTYPE"] == 1
    ),
    ids=str,
)
def test_forward_keeps_to_its_registers(plan: Plan) -> None:
    """Nothing is spilled, products stay asynchronous (ptxas says so where it waits for each), and a
    block's registers are as its kinds of warps hand them to one another. Heads of 512 with several
    score terms spill 28 bytes, with 16 keys none: those have not run on a GPU. Over pages chunks of
    heads above 128 spill up to 24 bytes. Softcap alone spills up to 32, at 128 and 256; with
    batch_invariant two blocks of an SM over pages spill 16, and packed chunks at 128 spill 8."""
    kernel, report, data = ptxas.compiled(plan, "sm_90a")
    constants = dict(plan.constants)
    few = "HALVES" in constants and constants["SCORE"] == GENERAL
    chunks = {"CHUNK_TILES", "PAGE_ROWS"} <= constants.keys() and int(constants["HEAD_DIM"]) > 128
    alone = forward_sm90.ALONE["softcap"]
    softcap = constants["SCORE"] == alone and plan.kernel == forward_sm90.KERNEL
    invariant = "INVARIANT" in constants and ("BLOCKS" in constants or "PACKED" in constants)
    most = 32 if softcap else 28 if few else 24 if chunks else 16 if invariant else 0
    assert max(runtime_compiler.spills(report)) <= most
    assert "serialized" not in report
    assert "setmaxnreg" not in report  # that it is ignored
    assert ptxas.moves_of_registers(data) in ([], ["DEALLOC", "TRY_ALLOC"])
    blocks, shared = int(constants.get("BLOCKS", 1)), plans.shared_bytes(plan)
    threads = plans.threads_of(plan) * blocks
    if threads > 256:
        assert kernel.registers == {384: 168, 512: 128}[threads]
    assert kernel.shared_bytes == 0
    assert shared <= plans.limits_of("sm_90a").shared_bytes_per_block
    assert plans.blocks_per_sm(plan, "sm_90", kernel.registers, shared) >= blocks


class Driver:
    """Encodes what it is told, with the address in front or behind."""

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self.told: list[list[Any]] = []

    def cuDriverGetVersion(self, number: Any) -> int:
        return 1  # as without a driver, so that none is in the way of a compiler

    def cuTensorMapEncodeTiled(
        self, at: Any, dtype: Any, rank: Any, address: Any, *rest: Any
    ) -> int:
        sizes, strides, box = (list(x) for x in rest[:3])
        self.told.append([dtype.value, rank.value, sizes, strides, box])
        place, rows = address.value.to_bytes(8, "little"), (sizes[1] - 1).to_bytes(4, "little")
        rest_of_map = rows + bytes(abi.MAP_SIZE - 12)
        data = place + rest_of_map if self.leads else rest_of_map + place
        assert at.value % abi.MAP_ALIGNMENT == 0
        ctypes.memmove(at.value, data, len(data))
        return 0


PLAN = Plan("cuda", "one map", ())


@pytest.mark.parametrize("leads", [True, False])
def test_a_map_is_encoded_once_where_it_can_be_moved(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    driver = Driver(leads)
    monkeypatch.setattr(libcuda, "library", lambda: driver)
    monkeypatch.setitem(tensor_maps.BOXES, PLAN.kernel, (tensor_maps.Box("q", 64, 32),))
    monkeypatch.setattr(tensor_maps, "panel", lambda head, itemsize: head)
    tensor_maps.movable.cache_clear()
    tensor_maps._encoded_as_is.cache_clear()
    tensor_maps.rows_at.cache_clear()
    try:
        assert tensor_maps.movable() == leads
        tensor_maps.rows_at()
        driver.told.clear()
        for _ in range(3):
            x = torch.empty(2, 100, 3, 80, dtype=torch.float16)
            given = None if leads else {"x": x.data_ptr()}
            (made,) = tensor_maps.maps_of(PLAN, {"x": x}, {"q": "x"}, given)
            assert made.tensor == ("x" if leads else "")
            if not leads:
                assert int.from_bytes(made.data[-8:], "little") == x.data_ptr()
        assert len(driver.told) == (1 if leads else 3)
        strides = [3 * 80 * 2, 80 * 2, 100 * 3 * 80 * 2]
        # Where it can be moved, one is encoded for any number of rows, which is then written.
        rows = tensor_maps._ROWS if leads else 100
        assert driver.told[0] == [6, 4, [80, rows, 3, 2], strides, [32, 64, 1, 1]]
        assert int.from_bytes(made.data[8:12] if leads else made.data[:4], "little") == 99
    finally:
        tensor_maps.movable.cache_clear()
        tensor_maps._encoded_as_is.cache_clear()
        tensor_maps.rows_at.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "dim", "bytes_"),
    [
        ("fwd", 64, 128),
        ("fwd", 128, 128),
        ("fwd", 256, 256),
        ("latent", 576, 128),
        ("bwd", 128, 256),
    ],
)  # fmt: skip
def test_l2_fetches_128_bytes_of_short_rows(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dim: int, bytes_: int
) -> None:
    found = list[tensor_maps.Described]()
    monkeypatch.setattr(tensor_maps, "_encoded", lambda described: found.append(described) or b"")
    constants = {"BLOCK_K": 64, "BLOCK_Q": 64, "HEAD_DIM": dim, "HEAD_DIM_V": dim}
    plan = Plan("cuda", f"cuda/sm90/attn_{kernel}.cu", tuple(constants.items()))
    x = torch.empty(1, 64, 1, dim, dtype=torch.float16)
    names = [box.tensor for box in tensor_maps.BOXES[plan.kernel] if box.tensor != "bias"]
    tensor_maps.maps_of(plan, {"x": x}, dict.fromkeys(names, "x"))
    assert [each.promotion for each in found] == [bytes_] * len(names)


def test_a_packed_tensor_is_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(True)
    monkeypatch.setattr(libcuda, "library", lambda: driver)
    tensor_maps._encoded_as_is.cache_clear()
    tensor_maps.rows_at.cache_clear()
    try:
        x = torch.empty(100, 3, 64, dtype=torch.bfloat16)
        tensor_maps.describe(x, 128, 64).encode(x.data_ptr())
    finally:
        tensor_maps.movable.cache_clear()
        tensor_maps._encoded_as_is.cache_clear()
        tensor_maps.rows_at.cache_clear()
    assert driver.told[-1] == [9, 4, [64, 100, 3, 1], [3 * 64 * 2, 64 * 2, 16], [64, 128, 1, 1]]


@pytest.mark.parametrize(("heads_k", "box"), [(1, (64, 10, 6, 1)), (2, (64, 21, 3, 1))])
def test_a_packed_copy_has_rows_of_each_head_of_a_group(
    monkeypatch: pytest.MonkeyPatch, heads_k: int, box: tuple[int, ...]
) -> None:
    described: list[tensor_maps.Described] = []

    def encoded(one: tensor_maps.Described) -> bytes:
        described.append(one)
        return bytes(abi.MAP_SIZE)

    monkeypatch.setattr(tensor_maps, "_encoded", encoded)
    plan = next(x for x in forward_sm90.all_plans() if "PACKED" in dict(x.constants))
    tensors = {"q": torch.empty(2, 30, 6, 64, dtype=torch.bfloat16)}
    tensors |= {name: torch.empty(2, 9, heads_k, 64, dtype=torch.bfloat16) for name in "kv"}
    tensor_maps.maps_of(plan, tensors, {name: name for name in "qkv"})
    assert [one.box for one in described] == [box, *2 * [(64, 128, 1, 1)]]


@pytest.mark.parametrize(
    ("head", "width", "swizzle"), [(64, 64, 2), (128, 128, 3), (192, 64, 2), (96, 32, 1)]
)
def test_float8_is_bytes_to_the_copy_engine(head: int, width: int, swizzle: int) -> None:
    x = torch.empty(2, 100, 3, head, dtype=torch.float8_e4m3fn)
    assert tensor_maps.panel(head, x.itemsize) == width
    found = tensor_maps.describe(x, 128, width)
    strides = (3 * head, head, 100 * 3 * head)
    assert found == (0, (head, 100, 3, 2), strides, (width, 128, 1, 1), swizzle, 256)


def test_launches_that_may_run_together_have_counters_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []

    def zeros(count: int, index: int) -> torch.Tensor:
        made.append(torch.zeros(count, dtype=torch.int32))
        return made[-1]

    capturing = False
    monkeypatch.setattr(counters, "zeros", zeros)
    monkeypatch.setattr(_torch, "is_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    take = counters.source.__wrapped__(0)
    base = made[0].data_ptr()
    assert [take() - base for _ in range(3)] == [0, 4, 8]
    assert len({take() for _ in range(counters.MANY)}) == counters.MANY == made[0].numel()
    capturing = True
    assert take() == made[-1].data_ptr()
    assert made[-1].numel() == 1
