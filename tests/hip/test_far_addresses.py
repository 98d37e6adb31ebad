"""Offsets of more than 4 GiB inside one tensor: the HIP kernels, run in the emulator.

A tensor has few elements, which lie far apart in memory of which only the touched pages are real.
Bit for bit, the result must be that of the same elements side by side. A kernel that computes an
offset in 32 bits reads other elements, zeros, or memory that is not the tensor's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa.backends import BACKENDS
from pyfa.backends.common.calls import MAX_ROW_STRIDE
from pyfa.backends.hip import backward, decode, forward
from pyfa.emulator import EmulatorError

Tensors = list[torch.Tensor]
Plant = Callable[[str, str, str], None]
Move = Callable[[torch.Tensor], torch.Tensor]  # a tensor to where its elements shall lie

DIM = 64
ROW = MAX_ROW_STRIDE - 8  # elements, nearly 16 MiB
STEP = (1 << 32) + 8  # elements: too many for 32 bits, as their bytes are
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# Shapes (batch or pages, rows, heads, elements) and strides. Rows of MAX_ROW_STRIDE and more are
# copied, because offsets inside a tile have 32 bits.
PLACES = {
    "rows": ((1, 600, 1, DIM), (600 * ROW, ROW, DIM, 1)),
    "copied rows": ((1, 60, 1, DIM), (60 << 27, 1 << 27, DIM, 1)),
    "heads": ((1, 40, 2, DIM), (1 << 20, DIM, STEP, 1)),
    "sequences": ((2, 40, 1, DIM), (STEP, DIM, DIM, 1)),
    "pages": ((3, 16, 1, DIM), (STEP, DIM, DIM, 1)),
}


def values(shape: tuple[int, ...], count: int) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).bfloat16() for _ in range(count)]


def apart(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``x`` with these strides, in memory that ends with it."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    nbytes = (last + 1) * x.element_size()
    assert nbytes > 1 << 32
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise 2 MiB of each row could be real
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def run_forward(place: str, move: Move) -> Tensors:
    shape = PLACES[place][0]
    q, k, v = values(shape, 3)
    if place == "pages":
        lengths = torch.tensor([0, 40], dtype=torch.int32)
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
        used = torch.tensor([40], dtype=torch.int32)
        return [
            pyfa.attention_varlen(
                torch.cat([*q])[:40], move(k), move(v), lengths, None, 40, 40, seqused_k=used,
                page_table=table, backend="emulator",
            )
        ]  # fmt: skip
    # With a window the first tile is far away, too.
    q, k, v = move(q), move(k), move(v)
    windows: list[dict[str, Any]] = [{}, {"window": (9, 0)}]
    return [pyfa.attention(q, k, v, causal=True, backend="emulator", **x) for x in windows]


def run_decode(place: str, move: Move) -> Tensors:
    """And an append before it: the caches' last row."""
    shape = PLACES[place][0]
    k, v = values(shape, 2)
    k, v = move(k), move(v)
    batch, rows, heads = (1, 40, 1) if place == "pages" else shape[:3]
    q, new_k, new_v = (x.contiguous() for x in values((batch, 1, heads, DIM), 3))
    options: dict[str, Any] = {"num_splits": 1, "backend": "emulator"}
    if place == "pages":
        options["page_table"] = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    held = torch.full((batch,), rows - 1, dtype=torch.int32)
    out = pyfa.attention_kvcache(q, k, v, k=new_k, v=new_v, cache_seqlens=held, **options)
    return [out, k.contiguous(), v.contiguous()]


def run_backward(place: str, move: Move, deterministic: bool = False) -> Tensors:
    shape = PLACES[place][0]
    q, k, v, dout = map(move, values(shape, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {
        "causal": True,
        "deterministic": deterministic,
        "backend": "emulator",
    }
    out = pyfa.attention(*inputs, **options)
    return [*torch.autograd.grad(out, inputs, dout)]


def run_backward_in_order(place: str, move: Move) -> Tensors:
    return run_backward(place, move, True)


RUNS = {
    "forward": run_forward,
    "decode": run_decode,
    "backward": run_backward,
    "backward, deterministic": run_backward_in_order,
}


def differing(run: str, place: str) -> str:
    """What is wrong where the elements lie far apart; "" if nothing is."""
    results = []
    for move in (lambda x: x, lambda x: apart(x, PLACES[place][1])):
        # Atomics in one order for both, and no seed that later tests would run with.
        BACKENDS["emulator"].runtime.orders.choose(None)  # type: ignore[attr-defined]
        try:
            results.append(RUNS[run](place, move))
        except EmulatorError as error:
            assert results, "the elements side by side are right"
            return str(error)
    for index, (near, far) in enumerate(zip(*results, strict=True)):
        assert near.any()
        assert near.isfinite().all()
        if not torch.equal(near, far):
            return f"result {index}: {int((near != far).sum())} of {near.numel()} elements differ"
    return ""


SOUND = [(run, place) for run in RUNS for place in PLACES if "back" not in run or place != "pages"]


@pytest.mark.parametrize(("run", "place"), SOUND)
def test_far_elements_give_the_same_bits(run: str, place: str) -> None:
    assert differing(run, place) == ""


# Each: the run and place that find it, the kernel, the exact snippet, what it becomes.
FAULTS = {
    "forward, a query's row": (
        "forward", "rows", forward.KERNEL, "(c.s.row0 + c.row[n]) * c.p.q_row",
        "(unsigned)((c.s.row0 + c.row[n]) * c.p.q_row)",
    ),
    "forward, the next tile": (
        "forward", "rows", forward.KERNEL, "tile += kTurn * keys * (long long)row_bytes;",
        "tile = (const char *)((unsigned long long)tile >> 32 << 32 |"
        " (unsigned)((unsigned long long)tile + kTurn * keys * row_bytes));",
    ),
    "forward, a head": (
        "forward", "heads", forward.KERNEL, "(const char *)p.k + head * p.k_head * kSize",
        "(const char *)p.k + (unsigned)(head * p.k_head * kSize)",
    ),
    "decode, a row": (
        "decode", "rows", decode.KERNEL, "multiply_add(row, k.row_stride, 0)",
        "(unsigned)multiply_add(row, k.row_stride, 0)",
    ),
    "append, a row": (
        "decode", "rows", "hip/append.hip", "(s.key0 + key) * row_stride",
        "(unsigned)((s.key0 + key) * row_stride)",
    ),
    "append, a page": (
        "decode", "pages", "hip/append.hip", "pages[place / p.page_size] * batch_stride",
        "(unsigned)(pages[place / p.page_size] * batch_stride)",
    ),
    "append, a head": (
        "decode", "heads", "hip/append.hip", "row.to + head * row.to_head",
        "row.to + (unsigned)(head * row.to_head)",
    ),
    "backward, a row": (
        "backward, deterministic", "rows", backward.KERNEL, "base + (long long)index * row_bytes",
        "base + (unsigned)(index * row_bytes)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_offset_of_32_bits_is_found(fault: str, plant: Plant) -> None:
    run, place, *change = FAULTS[fault]
    plant(*change)
    assert differing(run, place)
