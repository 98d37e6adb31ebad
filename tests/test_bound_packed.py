"""Packed calls that come again, with other offsets of the same shape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa import binding, bound
from pyfa import request as requests

pytestmark = pytest.mark.usefixtures("fresh_calls")

ROWS, LONGEST = 30, 20


@pytest.fixture
def long_ways(calls_of: Callable[[Any, str], list[Any]]) -> list[Any]:
    """The calls that were checked and normalized, which repeated ones are not."""
    return calls_of(requests, "varlen")


def inputs(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, 2, 8, requires_grad=requires_grad) for _ in range(3)]


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor((0, *ends), dtype=torch.int32)


def attend(tensors: list[torch.Tensor], *ends: int, shared: bool = True, **options: Any) -> Any:
    of_q = offsets(*ends)
    of_k = of_q if shared else of_q.clone()
    return pyfa.attention_varlen(*tensors, of_q, of_k, LONGEST, LONGEST, **options)


def results(*ends: int, **options: Any) -> list[torch.Tensor]:
    """Output, LSE where asked for, and the gradients through both."""
    tensors = inputs()
    found = attend(tensors, *ends, **options)
    outputs = list(found) if isinstance(found, tuple) else [found]
    # The LSE of rows of no sequence is -inf.
    loss = sum((x.nan_to_num(neginf=0.0).square().sum() for x in outputs), torch.zeros(()))
    return [*outputs, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window": (9, 9)}])
def test_offsets_are_those_of_the_call(
    options: dict[str, Any], shared: bool, long_ways: list[Any]
) -> None:
    """Each sequence is attended to by itself, and what belongs to none is 0."""
    for of_q, of_k in (
        ((0, 20, 30), (0, 18, 30)),
        ((0, 10, 25), (0, 20, 29)),
        ((0, 1, 7), (0, 12, 14)),
    ):
        of_k = of_q if shared else of_k
        tensors = q, k, v = inputs()
        found = [torch.tensor(x, dtype=torch.int32) for x in (of_q, of_k)]
        out = pyfa.attention_varlen(
            *tensors, found[0], found[not shared], LONGEST, LONGEST, **options
        )
        out = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(out.square().sum(), tensors)
        for i, i_end, j, j_end in zip(of_q, of_q[1:], of_k, of_k[1:], strict=False):
            alone = pyfa.attention(q[None, i:i_end], k[None, j:j_end], v[None, j:j_end], **options)
            alone = alone[0] if isinstance(alone, tuple) else alone
            torch.testing.assert_close(out[i:i_end], alone[0])
        for x, ends in zip((out, *grads), (of_q, of_q, of_k, of_k), strict=True):
            assert x[: ends[-1]].any()
            assert not x[ends[-1] :].any()
    assert len(long_ways) == 1


def test_the_second_call_gives_what_the_first_gave(long_ways: list[Any]) -> None:
    first = results(12, 30, return_lse=True)
    for _ in range(2):
        for again, before in zip(results(12, 30, return_lse=True), first, strict=True):
            assert torch.equal(again, before)
    assert len(long_ways) == 1


def test_offsets_outside_their_tensors_are_refused_again() -> None:
    tensors = inputs(requires_grad=False)
    for _ in range(2):
        attend(tensors, 15, 30)
        for ends in ((15, 31), (25, 30), (20, 10)):
            with pytest.raises(ValueError, match="cu_seqlens"):
                attend(tensors, *ends)


def of_dtype(tensors: list[torch.Tensor], dtype: torch.dtype) -> Any:
    of = offsets(15, 30).to(dtype)
    return pyfa.attention_varlen(*tensors, of, of, LONGEST, LONGEST)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([x, x], 1)[:, 0]


OTHERS: dict[str, Callable[[list[torch.Tensor], torch.Tensor], Any]] = {
    "more sequences": lambda x, of: attend(x, 10, 20, 30),
    "other offsets for keys": lambda x, of: attend(x, 15, 30, shared=False),
    "int64": lambda x, of: of_dtype(x, torch.int64),
    "not contiguous": lambda x, of: pyfa.attention_varlen(*x, apart(of), apart(of), 20, 20),
    "longer": lambda x, of: pyfa.attention_varlen(*x, of, of, 21, 20),
    "longer keys": lambda x, of: pyfa.attention_varlen(*x, of, of, 20, 21),
    "a length that is no int": lambda x, of: pyfa.attention_varlen(*x, of, of, 20.0, 20),  # type: ignore[arg-type]
    "no offsets": lambda x, of: pyfa.attention_varlen(*x, of, None, 20, 20),
    "a list": lambda x, of: pyfa.attention_varlen(*x, [0, 15, 30], of, 20, 20),  # type: ignore[arg-type]
    "queries used": lambda x, of: attend(x, 15, 30, seqused_q=offsets(9)),
    "keys used": lambda x, of: attend(x, 15, 30, seqused_k=offsets(9)),
    "slopes": lambda x, of: attend(x, 15, 30, alibi_slopes=torch.ones(2)),
    "unhashable": lambda x, of: attend(x, 15, 30, window=[2, 1]),
    "unknown": lambda x, of: attend(x, 15, 30, sofcap=2.0),
    "dense": lambda x, of: pyfa.attention(*(y[None] for y in x)),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_differs_is_another_call(
    other: Callable[..., Any], nothing_bound: Callable[[], None]
) -> None:
    """Twice, with the entry of the first in place, and with what it would run poisoned."""
    tensors, of = inputs(requires_grad=False), offsets(15, 30)
    expected = outcome(lambda: other(tensors, of))
    nothing_bound()
    attend(tensors, 15, 30)
    ((entry,),) = binding.calls.known.values()

    def poison(*given: Any) -> Any:
        raise AssertionError("another call ran this one's")

    entry.run = poison
    bound.calls.clear()  # where some of the others are this very call, once they are checked
    for _ in range(2):
        found = outcome(lambda: other(tensors, of))
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected)
        else:
            assert found == expected
    with pytest.raises(AssertionError, match="ran this one's"):
        attend(tensors, 10, 30)


def test_numbers_of_sequences_that_take_turns_are_all_found_again(long_ways: list[Any]) -> None:
    """More of them than calls that are alike may be."""
    tensors = inputs(requires_grad=False)
    numbers = range(1, 2 * bound._MOST_ALIKE)
    for _ in range(3):
        for number in numbers:
            attend(tensors, *(min(20 * (n + 1), ROWS) for n in range(number)))
    assert len(long_ways) == len(numbers)


def test_tensors_are_not_kept() -> None:
    for shared in (False, True):
        tensors, of_q = inputs(), offsets(15, 30)
        of_k = of_q if shared else of_q.clone()
        for _ in range(2):
            out = pyfa.attention_varlen(*tensors, of_q, of_k, LONGEST, LONGEST)
            torch.autograd.grad(out.sum(), tensors)
        gone = [weakref.ref(x) for x in (*tensors, of_q, of_k)]
        del tensors, of_q, of_k, out
        gc.collect()
        assert [each() for each in gone] == [None] * 5


def test_offsets_changed_before_backward_are_noticed() -> None:
    """As after a first call: they are the backward's too."""
    for _ in range(2):
        tensors, of = inputs(), offsets(15, 30)
        out = pyfa.attention_varlen(*tensors, of, of, LONGEST, LONGEST)
        of[1] = 10
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_options_that_are_no_keys_are_taken_too() -> None:
    tensors = inputs(requires_grad=False)
    expected = attend(tensors, 15, 30, window=(2, 1))
    for _ in range(2):
        assert torch.equal(attend(tensors, 15, 30, window=[2, 1]), expected)
