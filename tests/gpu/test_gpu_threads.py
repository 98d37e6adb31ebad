"""Threads, streams, devices, checkpointing: where a call runs and what it finds there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pyfa
from pyfa.backends import BACKENDS

HALF = {"device": "cuda", "dtype": torch.float16}


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> list[torch.Tensor]:
    """out and the gradients of q, k and v, the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = pyfa.attention(*leaves, deterministic=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def same(have: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(have, want, strict=True))


def test_threads_with_a_stream_each(backend: str) -> None:
    """Eight threads start together on kernels that none has compiled yet."""
    problems = [
        ([torch.randn(2, 130 + 40 * i, 4, dim, **HALF) for _ in range(3)], {"causal": i % 2 == 0})
        for i, dim in enumerate((32, 72, 64, 96, 32, 72, 64, 96))
    ]
    torch.cuda.synchronize()
    gate = threading.Barrier(len(problems))
    found: dict[int, list[list[torch.Tensor]]] = {}
    errors = []

    def work(i: int) -> None:
        try:
            tensors, options = problems[i]
            stream = torch.cuda.Stream()
            gate.wait()
            with torch.cuda.stream(stream):
                found[i] = [step(*tensors, backend=backend, **options) for _ in range(20)]
            stream.synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for i, (tensors, options) in enumerate(problems):
        expected = step(*tensors, backend=backend, **options)
        assert all(same(results, expected) for results in found[i])


def test_a_side_stream_is_the_one_that_works(backend: str) -> None:
    """What the side stream makes is ready in its order, with nothing waiting elsewhere."""
    q, k, v = (torch.randn(4, 1000, 8, 64, **HALF) for _ in range(3))
    expected = pyfa.attention(q * 2, k, v, backend=backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # 0.1 s, in which a launch elsewhere would overtake
        doubled = q * 2
        out = pyfa.attention(doubled, k, v, backend=backend)
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("two_gpus")
def test_tensors_on_a_device_that_is_not_current(backend: str) -> None:
    inputs = [torch.randn(2, 300, 4, 64, dtype=torch.float16) for _ in range(3)]
    results = {}
    for current, on in ((0, 0), (0, 1), (1, 0), (1, 1)):
        with torch.cuda.device(current):
            tensors = [x.to(f"cuda:{on}") for x in inputs]
            options = {"causal": True, "dropout_p": 0.2, "seed": 5, "backend": backend}
            found = step(*tensors, **options)
            # The second call takes the prepared launch.
            with torch.no_grad():
                plain = [pyfa.attention(*tensors, backend=backend) for _ in range(2)]
            assert torch.cuda.current_device() == current
        assert all(x.device.index == on for x in (*found, *plain))
        results[current, on] = [x.cpu() for x in (*found, *plain)]
    for have in results.values():
        assert same(have, results[0, 0])


def recorded(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> list[tuple[str, str]]:
    """(backend, "forward" or "backward") of every run from here on."""
    runs: list[tuple[str, str]] = []

    def watch(name: str, method: str, kind: str) -> None:
        original = getattr(BACKENDS[name], method)

        def bind(*args):
            bound = original(*args)

            def run(*tensors):
                runs.append((name, kind))
                return bound(*tensors)

            return run

        monkeypatch.setattr(BACKENDS[name], method, bind)

    for name in ("cuda", "triton", "torch"):
        watch(name, "bind", "forward")
        watch(name, "bind_backward", "backward")
    nothing_bound()
    return runs


@pytest.mark.parametrize("name", ["cuda", "triton", "torch"])
def test_backward_outside_use_backend(
    name: str, monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    runs = recorded(monkeypatch, nothing_bound)
    leaves = [torch.randn(2, 100, 4, 64, **HALF).requires_grad_() for _ in range(3)]
    with pyfa.use_backend(name):
        out = pyfa.attention(*leaves, causal=True)
    out.sum().backward()
    assert runs == [(name, "forward"), (name, "backward")]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["cuda", "triton", "torch"])
def test_checkpointing_recomputes_on_the_same_backend(
    name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    """Recomputed on autograd's own thread, with the dropout that the forward drew."""
    leaves = [torch.randn(2, 100, 4, 64, **HALF).requires_grad_() for _ in range(3)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return pyfa.attention(*tensors, causal=True, dropout_p=0.2)

    results = []
    with pyfa.use_backend(name):
        for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=reentrant)):
            torch.manual_seed(1)
            runs = recorded(monkeypatch, nothing_bound)
            out = run(*leaves)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)] if not reentrant
                           else [out, *backward(out, leaves)])  # fmt: skip
            assert {backend for backend, _ in runs} == {name}
    assert same(results[1], results[0])


def backward(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients by ``backward``, which is all that reentrant checkpointing knows."""
    for leaf in leaves:
        leaf.grad = None
    out.sum().backward()
    return [leaf.grad for leaf in leaves]
