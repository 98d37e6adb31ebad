"""A wrong argument is found in a repeated call as it is in the first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import pyfa
from pyfa import api

pytestmark = pytest.mark.usefixtures("fresh_calls")

Call = Callable[..., Any]
OFFSETS = torch.tensor([0, 12, 30], dtype=torch.int32)
LENGTHS = torch.tensor([9, 12], dtype=torch.int32)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def dense(**options: Any) -> Any:
    return pyfa.attention(rows(2, 12, 2, 8), rows(2, 12, 2, 8), rows(2, 12, 2, 8), **options)


def packed(longest: Any = 20, longest_k: Any = 20, **options: Any) -> Any:
    x = rows(30, 2, 8)
    return pyfa.attention_varlen(x, x + 1, x + 2, OFFSETS, OFFSETS, longest, longest_k, **options)


def cached(**options: Any) -> Any:
    q, k, v = rows(2, 1, 2, 8), rows(2, 12, 2, 8), rows(2, 12, 2, 8)
    return pyfa.attention_kvcache(q, k, v, **options)


def paged(cu_seqlens_k: Any = None) -> Any:
    x, pages = rows(30, 2, 8), rows(4, 16, 2, 8)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    return pyfa.attention_varlen(
        x, pages, pages + 1, OFFSETS, cu_seqlens_k, 20, 32, page_table=table, seqused_k=LENGTHS,
    )  # fmt: skip


class Bounds(NamedTuple):
    left: Any
    right: Any


# What all three take, first right and then wrong; Python holds the two to be equal.
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {"causal": 1.0}),
    "window": ({"window": (5, 0)}, {"window": (5.0, 0)}),
    "window's other side": ({"window": (5, 0)}, {"window": (5, 0.0)}),
    "window's edge": ({"window": (pyfa.Edge(5), 0)}, {"window": (pyfa.Edge(5.0), 0)}),
    "window's tuple": ({"window": Bounds(5, 0)}, {"window": Bounds(5.0, 0)}),
    "return_lse": ({"return_lse": True}, {"return_lse": 1.0}),
}
OWN: list[tuple[str, Call, dict[str, Any], dict[str, Any]]] = [
    ("deterministic", dense, {"deterministic": True}, {"deterministic": 2}),
    ("deterministic", dense, {"deterministic": True}, {"deterministic": 1.0}),
    ("deterministic", packed, {"deterministic": True}, {"deterministic": 1.0}),
    ("num_splits", cached, {"num_splits": 1}, {"num_splits": True}),
    ("num_splits", cached, {"num_splits": 1}, {"num_splits": 1.0}),
    ("max_seqlen_q", packed, {"longest": 20}, {"longest": 20.0}),
    ("max_seqlen_k", packed, {"longest_k": 20}, {"longest_k": 20.0}),
    ("max_seqlen_q", packed, {"longest": 20}, {"longest": True}),
    # Of a pair, the one that is too much.
    ("k", cached, {"cache_seqlens": LENGTHS}, {"cache_seqlens": LENGTHS, "v": rows(2, 1, 2, 8)}),
    ("rotary", cached, {}, {"rotary_sin": rows(64, 4)}),
    ("cu_seqlens_k", paged, {}, {"cu_seqlens_k": OFFSETS.long()}),
]
CASES = [
    *((name, call, *both) for call in (dense, packed, cached) for name, both in SHARED.items()),
    *OWN,
]


def error_of(call: Callable[[], Any]) -> tuple[type, str] | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("name", "call", "right", "wrong"),
    CASES,
    ids=[f"{n}-{call.__name__}-{name}" for n, (name, call, _, _) in enumerate(CASES)],
)
def test_a_wrong_argument_is_found_again(
    name: str,
    call: Call,
    right: dict[str, Any],
    wrong: dict[str, Any],
    nothing_bound: Callable[[], None],
) -> None:
    first = error_of(lambda: call(**wrong))
    assert first is not None
    assert name.split("'")[0] in first[1]
    nothing_bound()
    for _ in range(3):
        call(**right)
        assert error_of(lambda: call(**wrong)) == first


@pytest.mark.parametrize("call", [dense, packed, cached])
@pytest.mark.parametrize("name", ["return_lse", "deterministic"])
@pytest.mark.parametrize("value", [2, 1.0, "yes", None])
def test_a_flag_is_a_bool(call: Call, name: str, value: object) -> None:
    if call is cached and name == "deterministic":
        pytest.skip("attention_kvcache has no gradient, and no such argument")
    with pytest.raises(TypeError, match=name):
        call(**{name: value})


FLOAT8 = torch.float8_e4m3fn


def test_scales_of_other_tensors_are_not_taken_for_each_other() -> None:
    """Queries of 16 bits have none; each tensor's have a place of their own."""
    q = rows(2, 1, 2, 16).bfloat16()
    k, v = rows(2, 12, 2, 16).to(FLOAT8), rows(2, 12, 2, 16).to(FLOAT8)
    of_k, of_v = torch.ones(2, 2), torch.ones(2, 2)

    def attend(descale: Any) -> Any:
        return pyfa.attention_kvcache(q, k, v, descale=descale)

    wrong = [(of_k, None, of_v), (of_k, of_v, None), (of_k, of_v), [None, of_k, of_v]]
    first = [error_of(lambda each=each: attend(each)) for each in wrong]
    assert None not in first[:3]
    for _ in range(2):
        attend((None, of_k, of_v))
        assert [error_of(lambda each=each: attend(each)) for each in wrong] == first


# The optional tensors of each function. A key says which of them are given, not what they are.
OPTIONAL = {
    "attention": ("bias", "alibi_slopes", "sinks", "seed"),
    "attention_varlen": (
        "bias", "alibi_slopes", "sinks", "seed", "seqused_q", "seqused_k", "page_table",
    ),
    "attention_kvcache": (
        "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cache_seqlens", "page_table",
        "cache_batch_idx", "cache_leftpad", "k", "v", "cu_seqlens_new", "tree_mask",
    ),
}  # fmt: skip


def test_keys_tell_apart_which_tensors_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """All subsets, with and without scales, of all three functions."""
    x, starts = torch.ones(2), torch.ones(2)
    keys: list[tuple[Any, ...]] = []
    monkeypatch.setattr(api, "again", lambda key, tensors: keys.append(key) or x)
    scales = [None, *itertools.product((None, x), repeat=3)]
    for name, optional in OPTIONAL.items():
        needed = (x, x, x) + (starts, None, 2, 2) * (name == "attention_varlen")
        for descale, *given in itertools.product(scales, *[(None, x)] * len(optional)):
            options = dict(zip(optional, given, strict=True))
            if "seed" in options:
                options["dropout_p"] = 0.0 if options["seed"] is None else 0.5
            getattr(api, name)(*needed, descale=descale, **options)
    api.attention_varlen(x, x, x, starts, starts, 2, 2)
    api.attention_varlen(x, x, x, starts, x, 2, 2)
    assert len(keys) == 9 * (2**4 + 2**7 + 2**12) + 2
    assert len(set(keys)) == len(keys)
