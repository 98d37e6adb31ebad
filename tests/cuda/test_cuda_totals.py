"""Packed calls with another total of rows: what a bound one launches is what a first one would."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from totals_cases import CASES, TOTALS, packed, placed, without_sizes

import pyfa
from pyfa import _torch, abi, binding, bound, sizes
from pyfa.backends.common import program
from pyfa.backends.cuda import tensor_maps

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
    for table in (binding.calls, bound.calls):
        table.clear()


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
        # Behind the address strides and rows: see ``no_gpu``.
        found.append((name, config, values, [x[8:] for x in maps]))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_total_is_launched_as_by_a_first_call(
    driver: Any, made: list[torch.Tensor], case: Callable[..., Any]
) -> None:
    wanted = []
    with pytest.MonkeyPatch.context() as patch:
        without_sizes(patch)
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


def test_no_launch_has_a_grid_of_0_blocks(driver: Any) -> None:
    """CUDA refuses these. The rows belong to no sequence."""
    offsets = torch.zeros(1, dtype=torch.int32)
    q, k, v = (packed(3, 2).requires_grad_() for _ in range(3))
    out = pyfa.attention_varlen(q, k, v, offsets, offsets, 5, 5, backend="cuda")
    out.backward(torch.ones_like(out))
    assert driver.launched
    assert all(config[0] > 0 for _name, config, _data in driver.launched)


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


@pytest.mark.usefixtures("driver")
def test_without_rows_the_counter_of_work_tiles_is_inside_the_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The LSE of a packed batch that has no rows has no elements, but strides of 1, by which
    kernels count what lies in front of the counter and the table (kernels/cuda/bwd_work.h)."""
    made: list[dict[str, Any]] = []
    make = program.Program.make_workspace

    def note(self: program.Program, parts: dict[str, Any], apart: bool) -> None:
        made.append(parts)
        make(self, parts, apart)

    monkeypatch.setattr(program.Program, "make_workspace", note)
    heads, heads_k, total = 64, 8, 64
    q = torch.randn(0, heads, 64).half().requires_grad_()
    k, v = (torch.randn(total, heads_k, 64).half().requires_grad_() for _ in range(2))
    rows, keys = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 32, total], dtype=torch.int32)
    out: Any = pyfa.attention_varlen(q, k, v, rows, keys, 4, 40)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    (size,) = made[-1]["delta"][0]
    work_tiles = (total // 128 + 2) * heads_k
    assert sizes.value_at(size, (0, total)) >= 2 * heads + 4 + 4 * work_tiles
