"""Packed calls with another total of rows: what a bound one launches is what a first one would."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa
from pyfa import _torch, abi, binding, ops, sizes
from pyfa.backends.common import program
from pyfa.backends.cuda import tensor_maps

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LONGEST = 512
# The first is bound for. 0 has programs of its own, and one row has a stride that means nothing.
TOTALS = ((128, 128), (1, 1), (500, 500), (333, 777), (0, 64), (16, 0), (512, 1), (129, 128))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with importlib.import_module("no_gpu").nvidia(notes=True) as found:
        yield found


@pytest.fixture
def made(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is allocated by calls that are bound from now on."""
    found: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        found.append(_torch.empty_cpu(shape, strides, dtype))
        return found[-1]

    monkeypatch.setattr(_torch, "empty_cuda", empty)
    return found


def forget() -> None:
    for table in (binding.calls, ops.calls):
        table.known.clear()
        table.recent.clear()


def packed(total: int, heads: int, dim: int = 64, **options: Any) -> torch.Tensor:
    return torch.randn(total, heads, dim).bfloat16().requires_grad_(options.get("grad", True))


def offsets() -> torch.Tensor:
    return torch.tensor([0, 40, 100], dtype=torch.int32)


def train(
    q: int, k: int, heads: int = 4, heads_k: int = 4, shared: bool = False, **options: Any
) -> list[torch.Tensor]:
    tensors = [packed(q, heads), packed(k, heads_k), packed(k, heads_k)]
    of_q = offsets()
    given = [*tensors, of_q, of_q if shared else offsets()]
    found = pyfa.attention_varlen(*given, LONGEST, LONGEST, **options)
    outs = list(found) if isinstance(found, tuple) else [found]
    douts = [torch.randn(x.shape).to(x.dtype) for x in outs]
    return [*given, *options.values(), *douts, *torch.autograd.grad(outs, tensors, douts)]


def serve(q: int, k: int, append: bool = False, **options: Any) -> list[torch.Tensor]:
    """Packed rows over pages, of which there are as many in each call."""
    rows, pages = packed(q, 8, grad=False), [packed(1, 1, grad=False).expand(9, 64, 2, 64).clone()]
    pages *= 2
    table, used = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    if append:
        new, turned = packed(2 * 3, 2, grad=False).view(2, 3, 2, 64), torch.randn(LONGEST, 16)
        found = pyfa.attention_kvcache(
            rows, *pages, k=new, v=new, cu_seqlens_q=offsets(), max_seqlen_q=LONGEST,
            cache_seqlens=used, page_table=table, rotary_cos=turned, rotary_sin=turned, causal=True,
        )  # fmt: skip
        return [found]
    found = pyfa.attention_varlen(
        rows, *pages, offsets(), None, LONGEST, LONGEST, seqused_k=used, page_table=table, **options
    )
    return [found]


CASES: dict[str, Callable[[int, int], list[torch.Tensor]]] = {
    "plain": lambda q, k: train(q, k, causal=True),
    "shared offsets": lambda q, k: train(q, q, shared=True, causal=True),
    "deterministic": lambda q, k: train(q, k, deterministic=True),
    "gradient of the LSE": lambda q, k: train(q, k, return_lse=True),
    "sinks": lambda q, k: train(q, k, sinks=torch.randn(4)),
    "general": lambda q, k: train(q, k, softcap=9.0, window=(30, 5)),
    "parts of groups": lambda q, k: train(q, 8 * k, heads=16, heads_k=1, causal=True),
    "splits": lambda q, k: [pyfa.attention_varlen(
        *(packed(n, 4, grad=False) for n in (q, k, k)), offsets(), offsets(), LONGEST, LONGEST,
        num_splits=3)],
    "pages": lambda q, k: serve(q, k, causal=True),
    "pages in splits": lambda q, k: serve(q, k, num_splits=2),
    "append": lambda q, k: serve(q, k, append=True),
}  # fmt: skip


def placed(address: int, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    """An address as the place in a tensor, which the next call has elsewhere."""
    for kind, tensors in (("made", made), ("given", given)):
        for number, x in enumerate(tensors):
            if isinstance(x, torch.Tensor) and 0 <= address - x.data_ptr() < max(x.nbytes, 1):
                return kind, number, address - x.data_ptr()
    return "elsewhere" if address else 0


def seen(
    driver: Any, made: list[torch.Tensor], call: Callable[[int, int], list[torch.Tensor]],
    totals: tuple[int, int],
) -> list[Any]:  # fmt: skip
    """What a call allocates, and all that it gives the driver."""
    made.clear()
    driver.launched.clear()
    given = call(*totals)
    found: list[Any] = [(tuple(x.shape), x.stride(), x.dtype) for x in made]
    pointers = [field.name for field in abi.FIELDS if field.type == "void *"]
    for name, config, data in driver.launched:
        values = abi.unpack(data)
        for pointer in pointers:
            values[pointer] = placed(int(values[pointer]), given, made)
        maps = [data[at : at + 128] for at in range(abi.MAPS_AT, len(data), 128)]
        rows = [struct.unpack_from("<I", x, 124)[0] for x in maps]
        found.append((name, config, values, rows))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_total_is_launched_as_by_a_first_call(
    driver: Any, made: list[torch.Tensor], case: Callable[..., Any]
) -> None:
    wanted = []
    for totals in TOTALS:
        forget()
        wanted.append(seen(driver, made, case, totals))
    forget()
    for _ in range(2):
        for totals, want in zip(TOTALS, wanted, strict=True):
            assert seen(driver, made, case, totals) == want, totals


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_total_is_not_bound_again(
    driver: Any, case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    laid = program.Program.__init__

    def noted(self: Any, *given: Any) -> None:
        bound.append(self)
        laid(self, *given)

    monkeypatch.setattr(program.Program, "__init__", noted)
    case(300, 300)
    count = len(bound)
    for total in range(301, 340):
        case(total, total)
    assert len(bound) == count > 0


def test_what_would_not_follow_is_seen(
    driver: Any, made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a size that stays as it was for the first total."""
    wanted = []
    for totals in TOTALS[:3]:
        forget()
        wanted.append(seen(driver, made, CASES["plain"], totals))
    monkeypatch.setattr(sizes, "lse_shape", lambda call: call.lse_shape())
    forget()
    found = [seen(driver, made, CASES["plain"], totals) for totals in TOTALS[:3]]
    assert found[0] == wanted[0]
    assert found[1:] != wanted[1:]


def test_a_size_is_no_number() -> None:
    """So that no decision depends on the total for which it was made."""
    size = sizes.Size("q")
    for wrong in (
        lambda: size < 3, lambda: max(size, 1), lambda: int(size),  # type: ignore[call-overload]
        lambda: abi.pack({"lse_head": size}), lambda: torch.empty((size, 3)),  # type: ignore[dict-item,list-item]
    ):  # fmt: skip
        with pytest.raises((TypeError, struct.error)):
            wrong()
    shape = (size * 3 + 1, -(-size // 64) * 64, sizes.Size("k") + size)
    assert sizes.function_of(shape)(65, 7) == (196, 128, 72)


def test_maps_that_cannot_be_moved_are_made_for_each_launch(
    driver: Any, made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    for totals in TOTALS[:4]:
        forget()
        wanted.append(seen(driver, made, CASES["plain"], totals))
    monkeypatch.setattr(tensor_maps, "movable", lambda: False)
    forget()
    for totals, want in zip(TOTALS[:4], wanted, strict=True):
        assert seen(driver, made, CASES["plain"], totals) == want
