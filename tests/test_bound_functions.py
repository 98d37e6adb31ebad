"""How many of pyfa's own functions a repeated call passes, on every backend with a driver."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGE = str(Path(pyfa.__file__).parent)
MOST = 30
BF16, INT = torch.bfloat16, torch.int32


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def functions_in(call: Callable[[], Any]) -> list[str]:
    """Those of pyfa that ``call`` passes on this thread, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.append(f"{code.co_filename.removeprefix(PACKAGE)[1:]}:{code.co_qualname}"
                         if hasattr(code, "co_qualname") else code.co_name)  # fmt: skip

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def dense(count: int = 128, **options: Any) -> Callable[[], Any]:
    q, k, v = rows(2, count, 4, 64), rows(2, 128, 4, 64), rows(2, 128, 4, 64)
    return lambda: pyfa.attention(q, k, v, **options)


def decode(**options: Any) -> Callable[[], Any]:
    q, k, v = rows(2, 1, 4, 64), rows(2, 512, 2, 64), rows(2, 512, 2, 64)
    return lambda: pyfa.attention_kvcache(q, k, v, **options)


def paged_rows() -> Callable[[], Any]:
    q, pages = rows(128, 4, 64), rows(8, 64, 4, 64)
    offsets = torch.tensor([0, 50, 128], dtype=INT)
    table = torch.arange(8, dtype=INT).view(2, 4)
    used = torch.tensor([100, 200], dtype=INT)
    return lambda: pyfa.attention_varlen(
        q, pages, pages, offsets, None, 78, 256, seqused_k=used, page_table=table, causal=True
    )


def paged_decode() -> Callable[[], Any]:
    q, pages = rows(2, 1, 4, 64), rows(8, 64, 2, 64)
    table = torch.arange(8, dtype=INT).view(2, 4)
    used = torch.tensor([100, 200], dtype=INT)
    return lambda: pyfa.attention_kvcache(q, pages, pages, cache_seqlens=used, page_table=table)


def packed(grad: bool = False) -> Callable[[], Any]:
    q, k, v = (rows(128, 4, 64).requires_grad_(grad) for _ in range(3))
    offsets = torch.tensor([0, 50, 128], dtype=INT)

    def attend() -> Any:
        return pyfa.attention_varlen(q, k, v, offsets, offsets, 78, 78, causal=True)

    dout = rows(128, 4, 64)
    return (lambda: torch.autograd.grad(attend(), (q, k, v), dout)) if grad else attend


def trained(**options: Any) -> Callable[[], Any]:
    q, k, v = (rows(2, 128, 4, 64).requires_grad_() for _ in range(3))
    dout = rows(2, 128, 4, 64)
    return lambda: torch.autograd.grad(pyfa.attention(q, k, v, **options), (q, k, v), dout)


def lengths() -> torch.Tensor:
    return torch.tensor([9, 60], dtype=INT)


CASES: dict[str, Callable[[], Callable[[], Any]]] = {
    "plain": dense,
    "return_lse": lambda: dense(return_lse=True),
    "sinks and window": lambda: dense(sinks=torch.randn(4), window=(20, 0)),
    "one row": lambda: dense(1),
    "cache": decode,
    "cache with lengths": lambda: decode(cache_seqlens=lengths()),
    "cache in pages": paged_decode,
    "append": lambda: decode(cache_seqlens=lengths(), k=rows(2, 1, 2, 64), v=rows(2, 1, 2, 64)),
    "packed": packed,
    "packed over pages": paged_rows,
    "backward": trained,
    "causal backward": lambda: trained(causal=True),
    "packed backward": lambda: packed(grad=True),
}


@pytest.fixture(params=["nvidia", "amd"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with getattr(importlib.import_module("no_gpu"), request.param)():
        yield {"nvidia": "cuda", "amd": "hip"}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_passes_few_functions(backend: str, name: str) -> None:
    call = CASES[name]()
    first = functions_in(call)
    assert len(first) > MOST
    assert any(f"backends/{backend}/" in each for each in first)
    call()  # guards are made at the second call
    for _ in range(2):
        found = functions_in(call)
        assert len(found) <= MOST, f"{len(found)}: {found}"
        assert found
