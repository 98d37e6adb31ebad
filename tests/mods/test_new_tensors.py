"""A call with new captured tensors: on the host hardly more than a repeated one, and never stale.

The driver is a fake that notes its launches: which kernels, and with which addresses.
"""

from __future__ import annotations

import gc
import importlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bound_functions import functions_in

import pyfa
from pyfa.blocks import kept

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = 512
# Functions of a call with a new tensor, beyond those of a repeated call: where memory of older
# lists can be written again, where values changed in place, and where all others are alive.
MOST_MORE, MOST_IN_PLACE, MOST_ALIVE = 6, 4, 14
MOST_REPEATED = 13


def document(length: int = 64, dtype: torch.dtype = torch.int32, rows: int = ROWS) -> torch.Tensor:
    return (torch.arange(rows) // length).to(dtype)


def attention() -> Callable[[torch.Tensor], Any]:
    """Attention of one function's code, made anew around the document map of each call."""
    q, k, v = (torch.randn(2, ROWS, 4, 64, dtype=torch.bfloat16) for _ in range(3))

    def attend(at: torch.Tensor) -> Any:
        return pyfa.attention(q, k, v, mask_mod=lambda b, h, i, j: (at[i] == at[j]) & (i >= j))

    return attend


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    kept.clear()
    with importlib.import_module("no_gpu").nvidia(notes=True) as noted:
        yield noted
    kept.clear()


def launches(driver: Any, call: Callable[[], Any]) -> list[str]:
    driver.launched.clear()
    call()
    return [name.split()[0].rpartition("/")[2].partition(".")[0] for name, *_ in driver.launched]


def addresses_hold(driver: Any, x: torch.Tensor) -> bool:
    """Return whether every kernel of the last call that runs a mod has the address of ``x`` as an
    argument."""
    given = [given for name, _, given in driver.launched if "MOD_CAPTURED" in name]
    assert given
    return all(struct.pack("Q", x.data_ptr()) in each for each in given)


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_new_tensor_passes_few_functions_more(
    vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    kept.clear()
    with getattr(importlib.import_module("no_gpu"), vendor)():
        attend = attention()
        own = document()
        for _ in range(3):
            attend(own)
        repeated = functions_in(lambda: attend(own))
        assert len(repeated) <= MOST_REPEATED, f"{len(repeated)}: {repeated}"
        alive = []
        for turn in range(12):
            alive.append(document(100 + turn))
            found = functions_in(lambda: attend(alive[-1]))
            assert len(found) - len(repeated) <= MOST_ALIVE, f"{len(found)}: {found}"
        alive.clear()
        for turn in range(12):
            new = document(100 + turn)
            found = functions_in(lambda new=new: attend(new))
            assert len(found) - len(repeated) <= MOST_MORE, f"{len(found)}: {found}"
            new.add_(1)
            found = functions_in(lambda new=new: attend(new))
            assert len(found) - len(repeated) <= MOST_IN_PLACE, f"{len(found)}: {found}"
    kept.clear()


@pytest.mark.parametrize("kernels", [["block_lists"], ["tile_bounds", "block_lists"]])
def test_a_new_tensor_has_lists_of_its_own(
    driver: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by one launch, or by two where lists are long."""
    if len(kernels) > 1:
        monkeypatch.setattr("pyfa.backends.native.block_lists.MOST_OWN", 0)
    attend = attention()
    own, other = document(), document(100)
    first = launches(driver, lambda: attend(own))
    assert first == [*kernels, "attn_fwd"]
    assert addresses_hold(driver, own)
    assert launches(driver, lambda: attend(own)) == ["attn_fwd"]
    assert addresses_hold(driver, own)
    for _ in range(2):  # the second time from a bound call
        new = other.clone()
        assert launches(driver, lambda new=new: attend(new)) == [*kernels, "attn_fwd"]
        assert addresses_hold(driver, new)
        assert not addresses_hold(driver, own)
    # What was made before is still there, and still of its own tensor.
    assert launches(driver, lambda: attend(own)) == ["attn_fwd"]
    assert addresses_hold(driver, own)


def test_lists_of_freed_memory_are_made_again(driver: Any) -> None:
    attend = attention()
    attend(document())
    addresses = set()
    for turn in range(40):
        new = document(65 + turn)
        addresses.add(new.data_ptr())
        assert "block_lists" in launches(driver, lambda new=new: attend(new))
        assert addresses_hold(driver, new)
        del new
        gc.collect()
    assert len(addresses) < 40  # or this would show nothing


def test_values_changed_in_place_make_lists_again(driver: Any) -> None:
    attend, own = attention(), document()
    for _ in range(2):
        attend(own)
    own[100:].add_(1)
    assert "block_lists" in launches(driver, lambda: attend(own))
    assert launches(driver, lambda: attend(own)) == ["attn_fwd"]


@pytest.mark.parametrize(
    "other",
    [
        lambda: document(dtype=torch.int64),
        lambda: document(rows=2 * ROWS),
        lambda: document(rows=2 * ROWS)[::2],
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_tensor_of_another_kind_is_bound_again(
    driver: Any, other: Callable[[], torch.Tensor]
) -> None:
    attend = attention()
    for _ in range(3):
        attend(document())
    new = other()
    driver.launched.clear()
    passed = functions_in(lambda: attend(new))
    assert "backends/native/attend.py:_bind" in passed
    assert addresses_hold(driver, new)


def test_the_backward_makes_lists_of_a_new_tensor(driver: Any) -> None:
    q, k, v = (torch.randn(2, ROWS, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn(2, ROWS, 4, 64, dtype=torch.bfloat16)

    def train(at: torch.Tensor) -> Any:
        out = pyfa.attention(q, k, v, mask_mod=lambda b, h, i, j: (at[i] == at[j]) & (i >= j))
        return torch.autograd.grad(out, (q, k, v), dout)

    own = document()
    launches(driver, lambda: train(own))
    repeated = launches(driver, lambda: train(own))
    assert "block_lists" not in repeated
    for turn in range(2):
        new = document(99 + turn)
        found = launches(driver, lambda new=new: train(new))
        assert [name for name in found if name not in ("block_lists", "tile_bounds")] == repeated
        assert found.count("block_lists") > 1
        assert addresses_hold(driver, new)
