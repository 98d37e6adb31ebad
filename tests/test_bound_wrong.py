"""What is wrong, or other than before, is in a repeated call what it is in a first one.

Each variant of a call is made where nothing was bound, and then after right calls and all variants
before it: the same error with the same message, or the same results, launches and appended rows.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyfa
from pyfa import _torch, dispatch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HEADS, DIM = 2, 64
Arguments = dict[str, Any]
Note = Callable[[], list[Any]]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense() -> Arguments:
    q, k, v = (rows(2, 12, HEADS, DIM, seed=seed) for seed in range(3))
    slopes = rows(HEADS, seed=3).float().abs()
    return {"q": q, "k": k, "v": v, "alibi_slopes": slopes, "sinks": slopes + 1.0}


def packed() -> Arguments:
    q, k, v = (rows(30, HEADS, DIM, seed=seed) for seed in range(3))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 12, 30),
            "cu_seqlens_k": ints(0, 12, 30), "max_seqlen_q": 20, "max_seqlen_k": 20,
            "seqused_q": ints(9, 12), "seqused_k": ints(10, 5)}  # fmt: skip


def paged() -> Arguments:
    k, v = (rows(4, 16, HEADS, DIM, seed=seed) for seed in (1, 2))
    return {"q": rows(30, HEADS, DIM), "k": k, "v": v, "cu_seqlens_q": ints(0, 12, 30),
            "cu_seqlens_k": None, "max_seqlen_q": 20, "max_seqlen_k": 32,
            "page_table": ints([0, 1], [2, 3]), "seqused_k": ints(9, 12)}  # fmt: skip


def cached() -> Arguments:
    caches = (rows(3, 16, HEADS, DIM, seed=seed) for seed in (1, 2))
    new = (rows(2, 1, HEADS, DIM, seed=seed) for seed in (3, 4, 5))
    return {**dict(zip(("k_cache", "v_cache", "q", "k", "v"), (*caches, *new), strict=True)),
            "cache_seqlens": ints(9, 12), "cache_batch_idx": ints(2, 0),
            "rotary_cos": rows(40, 4), "rotary_sin": rows(40, 4, seed=6)}  # fmt: skip


FUNCTIONS: dict[Callable[[], Arguments], Callable[..., Any]] = {
    dense: pyfa.attention, packed: pyfa.attention_varlen, paged: pyfa.attention_varlen,
    cached: pyfa.attention_kvcache,
}  # fmt: skip


class Other(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "on another device": lambda x: x.to("meta"),
    "float32": lambda x: x.float(),
    "int64": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "without the last": lambda x: x[:-1],
    "with a dimension more": lambda x: x[None],
    "of no dimension": lambda x: x.flatten()[0],
    "with other strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "of one memory": lambda x: x[:1].expand_as(x),
    "a subclass": lambda x: x.as_subclass(Other),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a list": lambda x: x.tolist(),
    "sparse": lambda x: x.to_sparse(),
    "None": lambda x: None,
    "True": lambda x: True,
}
OF_INTEGERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "negative": lambda x: -x - 1, "too large": lambda x: x + 1000, "in another order":
    lambda x: x.flip(0), "a number": lambda x: -1,
}  # fmt: skip
LENGTHS = (-1, -20, 0, 5, True, 20.0, "20", np.int32(20), torch.tensor(20), 1 << 40)
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "autocast": partial(torch.autocast, "cpu", torch.float16),
    "a mode": Mode,
    "another backend": partial(pyfa.use_backend, "torch"),
}
OPTIONS: dict[str, Any] = {
    "out": torch.ones(1), "num_splits": True, "window": (True, 0), "scale": True, "softcap": -1.0,
    "causal": 1, "batch_invariant": 0.0, "attention_chunk": True, "cache_seqlens": True,
}  # fmt: skip


def variants(made: Callable[[], Arguments], few: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, a function of the arguments that changes them, and a context."""
    nothing = contextlib.nullcontext
    for name, value in made().items():
        if isinstance(value, torch.Tensor):
            changes = CHANGES if value.is_floating_point() else {**CHANGES, **OF_INTEGERS}
            if few and value.is_floating_point():
                changes = {n: changes[n] for n in ("float32", "a subclass", "with other strides")}
            for what, change in changes.items():
                yield f"{name} {what}", lambda x, n=name, c=change: {n: c(x[n])}, nothing
        elif name.startswith("max"):
            for length in LENGTHS:
                yield f"{name} {length!r}", lambda x, n=name, v=length: {n: v}, nothing
    for option, value in OPTIONS.items():
        yield f"{option} {value!r}", lambda x, n=option, v=value: {n: v}, nothing
    for mode, context in MODES.items():
        yield mode, lambda x: {}, context
        yield f"{mode}, with gradients", lambda x: {"q": x["q"].requires_grad_()}, context


def outcome(
    made: Callable[[], Arguments], change: Any, context: Any, backend: str, note: Note
) -> Any:
    note()
    given = made()
    given |= change(given)
    try:
        with context():
            options = {} if context is MODES["another backend"] else {"backend": backend}
            found = FUNCTIONS[made](**given, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        message = re.sub(r"0x[0-9a-f]+", "", str(error))
        return type(error), message, note()
    caches = [given[name] for name in ("k_cache", "v_cache") if name in given]
    return [found.detach(), found.requires_grad, found.is_inference(), *caches], note()


def same(a: Any, b: Any, with_values: bool) -> bool:
    if len(a) == 3 or len(b) == 3:
        return bool(a == b)
    for x, y in zip(a[0], b[0], strict=True):
        if not isinstance(x, torch.Tensor):
            alike = x == y
        else:
            alike = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            alike = alike and (x.is_meta or not with_values or torch.equal(x, y))
        if not alike:
            return False
    return bool(a[1] == b[1])


def check(
    made: Callable[[], Arguments],
    backend: str,
    nothing_bound: Callable[[], None],
    note: Note = list,
    few: bool = False,
) -> None:
    listed, first = list(variants(made, few)), []
    for _, change, context in listed:
        nothing_bound()
        first.append(outcome(made, change, context, backend, note))
    nothing_bound()
    right = [outcome(made, lambda x: {}, contextlib.nullcontext, backend, note) for _ in range(3)]
    assert [len(each) for each in right] == [2, 2, 2], right
    again = [outcome(made, change, context, backend, note) for _, change, context in listed]
    wrong = [
        (name, before, after)
        for (name, *_), before, after in zip(listed, first, again, strict=True)
        if not same(before, after, backend != "cuda")
    ]
    assert not wrong
    last = outcome(made, lambda x: {}, contextlib.nullcontext, backend, note)
    assert same(right[0], last, backend != "cuda")


@pytest.mark.parametrize("made", FUNCTIONS)
def test_torch(made: Callable[[], Arguments], nothing_bound: Any) -> None:
    check(made, "torch", nothing_bound, few=made in (dense, paged))


@pytest.mark.long
@pytest.mark.parametrize("made", FUNCTIONS)
def test_emulator(made: Callable[[], Arguments], nothing_bound: Any) -> None:
    check(made, "emulator", nothing_bound, few=True)


@pytest.mark.parametrize("made", FUNCTIONS)
def test_cuda(
    made: Callable[[], Arguments], monkeypatch: pytest.MonkeyPatch, nothing_bound: Any
) -> None:
    """Which kernels are launched, with which grids; PYFA_CHECK reads lengths in each call."""
    if made in (packed, cached):  # as with a PyTorch that has no such guards
        monkeypatch.setattr(_torch, "TensorGuards", None)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(dispatch, "_check_on_device", True)
    with importlib.import_module("no_gpu").nvidia(notes=True) as driver:

        def note() -> list[Any]:
            found = [(name, grid[:7]) for name, grid, _ in driver.launched]
            driver.launched.clear()
            return found

        check(made, "cuda", nothing_bound, note)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_new_keys_of_no_shape_are_named(dims: int) -> None:
    given = cached()
    given["k"] = given["k"].flatten(0, 3 - dims)[0] if dims else given["k"].flatten()[0]
    with pytest.raises(ValueError, match=r"^k: expected shape \(2, new, 2, 64\)"):
        pyfa.attention_kvcache(**given)
