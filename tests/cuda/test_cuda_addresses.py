"""Each call's kernels are given that call's tensors, in every place that has one."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyfa
from pyfa import abi

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
POINTERS = [field.name for field in abi.FIELDS if field.type == "void *"]
BF16, INT = torch.bfloat16, torch.int32
Given = dict[str, torch.Tensor]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with importlib.import_module("no_gpu").nvidia(notes=True) as found:
        yield found


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def qkv(grad: bool = False) -> Given:
    return {name: rows(2, 128, 4, 64).requires_grad_(grad) for name in ("q", "k", "v")}


def dense(x: Given, **options: Any) -> Any:
    return pyfa.attention(x["q"], x["k"], x["v"], **options)


def packed(grad: bool = False) -> Given:
    made = {name: rows(128, 4, 64).requires_grad_(grad) for name in ("q", "k", "v")}
    offsets = {f"cu_seqlens_{x}": torch.tensor([0, 50, 128], dtype=INT) for x in "qk"}
    return made | offsets


def attend_packed(x: Given) -> Any:
    used = {name: x[name] for name in ("seqused_q", "seqused_k") if name in x}
    return pyfa.attention_varlen(*list(x.values())[:5], 78, 78, **used)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


def cached() -> Given:
    return {"q": rows(2, 1, 4, 64), "k": rows(2, 64, 2, 64), "v": rows(2, 64, 2, 64)}


def attend_cached(x: Given) -> Any:
    of = {"seqused_k": "cache_seqlens", "new_k": "k", "new_v": "v"}
    more = {of.get(name, name): value for name, value in list(x.items())[3:]}
    return pyfa.attention_kvcache(x["q"], x["k"], x["v"], **more)


def new_rows() -> Given:
    return {"new_k": rows(2, 1, 2, 64), "new_v": rows(2, 1, 2, 64)}


def tables() -> Given:
    return {"rotary_cos": torch.randn(64, 16), "rotary_sin": torch.randn(64, 16)}


def float8() -> Given:
    made = {name: x.to(torch.float8_e4m3fn) for name, x in qkv().items()}
    return made | {f"{name}_descale": torch.rand(2, 4) + 0.5 for name in "qkv"}


def attend_float8(x: Given) -> Any:
    return dense(x, descale=tuple(x[f"{name}_descale"] for name in "qkv"))


Case = tuple[Callable[[], Given], Callable[[Given], Any]]
CASES: dict[str, Case] = {
    "dense": (qkv, dense),
    "sinks": (
        lambda: qkv() | {"sinks": torch.randn(4)},
        lambda x: dense(x, sinks=x["sinks"], window=(9, 0)),
    ),
    "slopes": (
        lambda: qkv() | {"alibi_slopes": torch.rand(4)},
        lambda x: dense(x, alibi_slopes=x["alibi_slopes"]),
    ),
    "bias": (
        lambda: qkv() | {"bias": torch.randn(1, 4, 128, 128)},
        lambda x: dense(x, bias=x["bias"]),
    ),
    "seed": (
        lambda: qkv() | {"seed": torch.tensor([5])},
        lambda x: dense(x, dropout_p=0.25, seed=x["seed"]),
    ),
    "float8": (float8, attend_float8),
    "offsets": (packed, attend_packed),
    "used": (
        lambda: packed() | {"seqused_q": numbers(40, 60), "seqused_k": numbers(50, 7)},
        attend_packed,
    ),
    "lengths": (lambda: cached() | {"seqused_k": numbers(9, 60)}, attend_cached),
    "lines": (
        lambda: cached() | {"seqused_k": numbers(9, 60), "cache_batch_idx": numbers(1, 0)},
        attend_cached,
    ),
    "leftpad": (
        lambda: cached() | {"seqused_k": numbers(9, 60), "cache_leftpad": numbers(3, 0)},
        attend_cached,
    ),
    "pages": (
        lambda: (
            cached()
            | {"seqused_k": numbers(9, 60), "page_table": torch.tensor([[1], [0]], dtype=INT)}
        ),
        attend_cached,
    ),
    "append": (lambda: cached() | {"seqused_k": numbers(9, 60)} | new_rows(), attend_cached),
    "rotary": (
        lambda: cached() | {"seqused_k": numbers(9, 60)} | new_rows() | tables(),
        attend_cached,
    ),
    "rotary from": (
        lambda: (
            cached()
            | {"seqused_k": numbers(9, 60)}
            | new_rows()
            | tables()
            | {"rotary_seqlens": numbers(1, 2)}
        ),
        attend_cached,
    ),
}


def pointers(driver: Any) -> list[dict[str, int]]:
    """What each launch since the last time points to, also by its tensor maps."""
    found = []
    for _, _, data in driver.launched:
        values = abi.unpack(data)
        of_maps = range(abi.MAPS_AT, len(data), abi.MAP_SIZE)
        maps = {f"map {at}": int.from_bytes(data[at : at + 8], "little") for at in of_maps}
        found.append({name: int(values[name]) for name in POINTERS} | maps)
    driver.launched.clear()
    return found


def check(found: list[dict[str, int]], given: Given, earlier: list[Given]) -> None:
    assert found
    everything = {address for each in found for address in each.values()}
    for name, x in given.items():
        # The append kernel has the lengths before it in another place.
        places = ("seqused_k", "seqused_q") if name == "seqused_k" else (name,)
        assert x.data_ptr() in {each[place] for each in found for place in places}, name
    for others in earlier:
        for name, x in others.items():
            assert x.data_ptr() not in everything, f"an earlier call's {name}"


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_points_to_its_own_tensors(driver: Any, name: str) -> None:
    make, attend = CASES[name]
    earlier: list[Given] = []
    for _ in range(4):
        given = make()
        attend(given)
        check(pointers(driver), given, earlier)
        earlier.append(given)


@pytest.mark.parametrize("name", CASES)
def test_also_in_memory_that_is_used_again(driver: Any, name: str) -> None:
    """Freed, and given out in another order: what lay at an address may lie elsewhere."""
    make, attend = CASES[name]
    for turn in range(6):
        given = make()
        if turn % 2:
            copies = {each: given[each].clone() for each in reversed(given)}
            given = {each: copies[each] for each in given}
        attend(given)
        check(pointers(driver), given, [])
        del given
        gc.collect()


@pytest.mark.parametrize("name", CASES)
def test_bound_calls_keep_no_tensor(driver: Any, name: str) -> None:
    make, attend = CASES[name]
    for _ in range(3):
        given = make()
        attend(given)
        gone = [weakref.ref(x) for x in given.values()]
        del given
        gc.collect()
        assert [each() for each in gone] == [None] * len(gone)


TRAINED: dict[str, Case] = {
    "dense": (lambda: qkv(True), dense),
    "offsets": (lambda: packed(True), attend_packed),
    "sinks": (
        lambda: qkv(True) | {"sinks": torch.randn(4).requires_grad_()},
        lambda x: dense(x, sinks=x["sinks"]),
    ),
    "bias": (
        lambda: qkv(True) | {"bias": torch.randn(1, 4, 128, 128)},
        lambda x: dense(x, bias=x["bias"]),
    ),
    "seed": (
        lambda: qkv(True) | {"seed": torch.tensor([5])},
        lambda x: dense(x, dropout_p=0.25, seed=x["seed"]),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_so_does_a_backward(driver: Any, name: str) -> None:
    make, attend = TRAINED[name]
    earlier: list[Given] = []
    for _ in range(4):
        given = make()
        out = attend(given)
        driver.launched.clear()
        dout = torch.randn(out.shape).to(out.dtype)
        out.backward(dout)
        own = given | {"dout": dout, "out": out.detach()}
        check(pointers(driver), own, earlier)
        earlier.append(own)
    gone = [weakref.ref(x) for each in earlier for x in each.values()]
    earlier.clear()
    del given, own, out, dout
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def on_8(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape).copy_(x)
    assert found.data_ptr() % 16 == 8
    return found


ALIGNED: dict[str, Case] = {
    "forward": (qkv, dense),
    "packed": (packed, attend_packed),
    "decode": (lambda: {**qkv(), "q": rows(2, 1, 4, 64)}, dense),
    "cache": CASES["lengths"],
    "append": CASES["append"],
    "rotary": CASES["rotary"],
}


@pytest.mark.parametrize("turns", [(0, 1), (1, 0), (0, 0, 1, 1), (1, 1, 0, 0)])
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("name", ALIGNED)
def test_alignments_take_turns(driver: Any, name: str, which: str, turns: tuple[int, ...]) -> None:
    """A call ends, whatever was bound before, and reads its own tensors, or copies of them."""
    make, attend = ALIGNED[name]
    for turn in turns * 2:
        given = make()
        if turn:
            given[which] = on_8(given[which])
        attend(given)
        appends = ["append.cu" in name for name, *_ in driver.launched]
        found = pointers(driver)
        for each, is_append in zip(found, appends, strict=True):
            if is_append:  # The cache itself, wherever it begins: a copy's new rows would be lost.
                assert (each["k"], each["v"]) == (given["k"].data_ptr(), given["v"].data_ptr())
            else:
                assert not any(each[x] % 16 for x in ("q", "k", "v", "out"))
        assert any(appends) is ("new_k" in given)
        check(found, {x: y for x, y in given.items() if not (turn and x == which)}, [])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("which", ["q", "dout"])
def test_alignments_take_turns_in_a_backward(driver: Any, which: str, first: int) -> None:
    for turn in range(8):
        given = qkv(True)
        if which == "q" and turn % 2 == first:
            given["q"] = on_8(given["q"].detach()).requires_grad_()
        out = dense(given)
        driver.launched.clear()
        dout = torch.randn(out.shape).to(BF16)
        if which == "dout" and turn % 2 == first:
            dout = on_8(dout)
        out.backward(dout)
        found = pointers(driver)
        assert len(found) == 3
        assert not any(each[x] % 16 for each in found for x in ("q", "k", "v", "dout", "dq"))
        own = given | {"dout": dout}
        check(found, {x: y for x, y in own.items() if y.data_ptr() % 16 == 0}, [])
