"""A document map that is new at each call, on a GPU: its block lists are never those of another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import pyfa

ROWS, HEADS, DIM = 1024, 2, 64


def document(number: int) -> torch.Tensor:
    """Documents of pieces of 128 places. Which pieces see each other depends on ``number``."""
    draw = torch.Generator().manual_seed(number)
    pieces = torch.randint(4, (ROWS // 128,), generator=draw, dtype=torch.int32)
    return pieces.repeat_interleave(128).cuda()


def inputs(grad: bool = False) -> list[torch.Tensor]:
    shape = 1, ROWS, HEADS, DIM
    found = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]
    return [x.requires_grad_(grad) for x in found]


def attend(tensors: list[torch.Tensor], at: torch.Tensor, backend: str) -> Any:
    return pyfa.attention(*tensors, mask_mod=lambda b, h, i, j: at[i] == at[j], backend=backend)


def expected(tensors: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    given = [x.float().transpose(1, 2) for x in tensors]
    return scaled_dot_product_attention(*given, attn_mask=at[:, None] == at).transpose(1, 2)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)


def test_maps_that_are_freed_at_once(backend: str) -> None:
    """No call waits for the device, so that lists are written while it is busy."""
    tensors = inputs()
    for _ in range(2):
        outs = [attend(tensors, document(n), backend) for n in range(60)]
        for n, out in enumerate(outs):
            assert close(out, expected(tensors, document(n))), n


def test_a_map_changed_in_place(backend: str) -> None:
    tensors, at, outs = inputs(), document(0), []
    maps = [document(n) for n in range(40)]
    for new in maps:
        at.copy_(new)
        outs.append(attend(tensors, at, backend))
    for out, new in zip(outs, maps, strict=True):
        assert close(out, expected(tensors, new))


def test_two_streams_take_turns(backend: str) -> None:
    tensors = inputs()
    attend(tensors, document(99), backend)
    streams = [torch.cuda.Stream() for _ in range(2)]
    maps = [document(n) for n in range(40)]
    torch.cuda.synchronize()
    outs = []
    for n, at in enumerate(maps):
        with torch.cuda.stream(streams[n % 2]):
            outs.append(attend(tensors, at.clone(), backend))
    torch.cuda.synchronize()
    for out, at in zip(outs, maps, strict=True):
        assert close(out, expected(tensors, at))


def test_backwards_after_the_forwards_of_other_maps(backend: str) -> None:
    tensors = inputs(grad=True)
    dout = torch.randn(1, ROWS, HEADS, DIM, device="cuda")
    maps = [document(n) for n in range(8)]
    wanted = [torch.autograd.grad(expected(tensors, at), tensors, dout) for at in maps]
    for _ in range(3):
        # Each map is kept alive by its graph alone.
        outs = [attend(tensors, at.clone(), backend) for at in maps]
        for n in range(5):
            attend(tensors, document(50 + n), backend)
        for out, want in (*zip(outs, wanted, strict=True), *zip(outs, wanted, strict=True)):
            grads = torch.autograd.grad(out, tensors, dout.half(), retain_graph=True)
            for x, y in zip(grads, want, strict=True):
                assert torch.allclose(x.float(), y.float(), atol=5e-2, rtol=5e-2)


def test_a_graph_reads_the_values_of_its_replay(backend: str) -> None:
    tensors, at = inputs(), document(0)
    for _ in range(2):
        attend(tensors, at, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(tensors, at, backend)
    for n in range(1, 12):
        at.copy_(document(n))
        eager = attend(tensors, at.clone(), backend)
        graph.replay()
        attend(tensors, document(n + 20), backend)
        assert close(out, expected(tensors, at))
        assert close(eager, expected(tensors, at))


def test_threads_on_one_stream(backend: str) -> None:
    tensors = inputs()
    attend(tensors, document(99), backend)
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(30):
            at = document(31 * number + step)
            if not close(attend(tensors, at, backend), expected(tensors, at)):
                wrong.append(f"{number}: {step}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("most", [0, 64], ids=["table", "own bounds"])
def test_both_kernels(backend: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyfa.backends.native.block_lists.MOST_OWN", most)
    for rows in (200, 1024, 3000):
        at = (torch.arange(rows, device="cuda") * 7 // 1000).int()
        q = torch.randn(1, rows, HEADS, DIM, device="cuda", dtype=torch.float16)
        out = attend([q, q, q], at, backend)
        assert close(out, expected([q, q, q], at))
