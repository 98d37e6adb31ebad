"""Calls that come again run what was bound for them, on the HIP kernels' machine code.

A call is made once, then again with the values of one argument changed, for each of its arguments,
and at last with all of them changed: each time on other tensors, the last ones overwritten. What
kept a value or an address of an earlier call would give that one's result, or touch memory that
the emulator has not mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa import binding, bound, dispatch, ops, reference
from pyfa import request as requests
from pyfa.conformance.tolerances import judge, judge_lse
from pyfa.problem import Call

pytestmark = pytest.mark.usefixtures("nothing_bound")

BF16 = torch.bfloat16
FNUZ = torch.float8_e4m3fnuz
PUBLIC: dict[str, Callable[..., Any]] = {
    "dense": pyfa.attention, "varlen": pyfa.attention_varlen, "kvcache": pyfa.attention_kvcache,
}  # fmt: skip
BUILDERS: dict[str, Callable[..., requests.Request]] = {
    "dense": requests.dense, "varlen": requests.varlen, "kvcache": requests.kvcache,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def floats(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> list[torch.Tensor]:
    """Two tensors."""
    made = torch.Generator().manual_seed(seed + sum(shape))
    return [torch.randn(shape, generator=made).to(dtype) for _ in range(2)]


def integers(*pair: Any, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=dtype) for each in pair]


def cache(dtype: torch.dtype, *shape: int) -> dict[str, list[torch.Tensor]]:
    return {
        name: floats(*shape, dtype=dtype, seed=seed)
        for seed, name in enumerate(("k_cache", "v_cache"))
    }


def tables() -> dict[str, list[torch.Tensor]]:
    angles = floats(64, 16, dtype=torch.float32)
    return {"rotary_cos": [x.cos() for x in angles], "rotary_sin": [x.sin() for x in angles]}


# Of each call its function, both values of each argument that is a tensor, and the rest. Values
# may be mixed: no length is too long for any offsets.
CASES: dict[str, tuple[str, dict[str, list[torch.Tensor]], dict[str, Any]]] = {
    "append": (
        "kvcache",
        {
            "q": floats(2, 2, 4, 64),
            **cache(BF16, 4, 40, 2, 64),
            "k": floats(2, 2, 2, 64, seed=1),
            "v": floats(2, 2, 2, 64, seed=2),
            "cache_seqlens": integers([30, 7], [3, 38]),
            "cache_batch_idx": integers([3, 1], [0, 2]),
            **tables(),
            "rotary_seqlens": integers([5, 20], [40, 0]),
            "sinks": floats(4, dtype=torch.float32),
        },
        {"causal": True},
    ),
    "pages": (
        "kvcache",
        {
            "q": floats(2, 1, 4, 64),
            **cache(BF16, 9, 8, 2, 64),
            "cache_seqlens": integers([31, 17], [12, 32]),
            "page_table": integers(
                [[0, 5, 2, 7], [8, 1, 3, 4]], [[4, 3, 8, 0], [2, 6, 7, 1]]
            ),
            "cache_leftpad": integers([0, 11], [9, 3]),
            "alibi_slopes": floats(2, 4, dtype=torch.float32),
        },
        {"num_splits": 2},
    ),
    "float8": (
        "kvcache",
        {
            "q": floats(2, 1, 4, 64),
            **cache(FNUZ, 2, 40, 2, 64),
            "cache_seqlens": integers([31, 17], [12, 40]),
            "k_descale": [x.abs() + 0.5 for x in floats(2, 2, dtype=torch.float32)],
            "v_descale": [x.abs() + 0.5 for x in floats(2, 2, dtype=torch.float32, seed=9)],
        },
        {},
    ),
    "packed": (
        "varlen",
        {
            "q": floats(60, 2, 64),
            "k": floats(70, 2, 64),
            "v": floats(70, 2, 64, seed=1),
            "cu_seqlens_q": integers([0, 20, 55], [0, 40, 57]),
            "cu_seqlens_k": integers([0, 30, 66], [0, 28, 70]),
            "seqused_q": integers([20, 9], [3, 17]),
            "seqused_k": integers([28, 11], [2, 36]),
        },
        {"max_seqlen_q": 40, "max_seqlen_k": 42, "causal": True},
    ),
    "packed alike": (
        "varlen",
        {
            "q": floats(60, 2, 64),
            "k": floats(60, 2, 64, seed=1),
            "v": floats(60, 2, 64, seed=2),
            "cu_seqlens_q": integers([0, 20, 55], [0, 40, 57]),
        },
        {"max_seqlen_q": 40, "max_seqlen_k": 40},
    ),
    "dropout": (
        "dense",
        {
            "q": floats(1, 40, 2, 64),
            "k": floats(1, 50, 2, 64),
            "v": floats(1, 50, 2, 64, seed=1),
            "seed": integers([3], [2**40 + 5], dtype=torch.int64),
            "bias": floats(1, 2, 40, 50),
        },
        {"dropout_p": 0.3},
    ),
    "rows that are copied": (
        "dense",
        {
            "q": floats(1, 40, 2, 37),
            "k": floats(1, 50, 2, 37),
            "v": floats(1, 50, 2, 37, seed=1),
        },
        {},
    ),
}  # fmt: skip


def arguments(kind: str, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
    """Of the public function."""
    given: dict[str, Any] = {**tensors, **options}
    if "k_descale" in given:
        given["descale"] = (None, given.pop("k_descale"), given.pop("v_descale"))
    if kind == "varlen" and "cu_seqlens_k" not in given:
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
    return given


def fresh(tensors: Tensors) -> Tensors:
    return {name: x.clone() for name, x in tensors.items()}


def called(kind: str, tensors: Tensors, options: dict[str, Any]) -> Call:
    """The call that kernels see, once the cache is ready, by the operators."""
    given = arguments(kind, tensors, options)
    shared = {name: given.pop(name) for name in requests.Shared._fields if name in given}
    positional = [given.pop(name) for name in tuple(given)[:3]]
    request = BUILDERS[kind](*positional, requests.Shared(**shared), **given)
    if request.append is None:
        return request.call
    return requests.appended(request.call, request.append)


def by_torch(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by the torch backend in float32, which has no float8 of this kind."""
    exact = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
    if call.k_descale is not None and call.v_descale is not None:
        exact = exact._replace(
            k=exact.k * call.k_descale[:, None, :, None],
            v=exact.v * call.v_descale[:, None, :, None],
            k_descale=None, v_descale=None, out_dtype=None,
        )  # fmt: skip
    return dispatch.prepare(exact, "torch", False, False).forward(exact)


def wrong(out: torch.Tensor, lse: torch.Tensor, call: Call) -> list[str]:
    ref, ref_lse = by_torch(call)
    naive, _ = reference.attention(call, BF16)
    checks = (
        judge("out", out, ref.double(), naive),
        # No more than the rule allows for scores of 0.
        judge_lse(lse, ref_lse.double(), call.q, 0.0, 0.0),
    )
    return [check.message for check in checks if not check.passed]


@pytest.mark.parametrize("name", CASES)
def test_every_argument_is_that_of_the_call(
    name: str, calls_of: Callable[[Any, str], list[Any]], kernels_run: list[str]
) -> None:
    kind, pairs, options = CASES[name]
    long_ways, bindings = calls_of(requests, kind), calls_of(binding, "bound_of")
    first = {each: pair[0] for each, pair in pairs.items()}
    changes = [first, *({**first, each: pair[1]} for each, pair in pairs.items())]
    changes.append({each: pair[1] for each, pair in pairs.items()})
    outs, kernels, last = [], [], fresh(first)
    for values in changes:
        call = called(kind, fresh(values), options)
        given = fresh(values)
        assert not {x.data_ptr() for x in given.values()} & {x.data_ptr() for x in last.values()}
        kernels_run.clear()
        out, lse = PUBLIC[kind](
            **arguments(kind, given, options), return_lse=True, backend="emulator"
        )
        assert not wrong(out, lse, call)
        # What was appended, bit by bit; the rest of the cache as it was, and nothing else written.
        for each, x in given.items():
            want = {"k_cache": call.k, "v_cache": call.v}.get(each, values[each])
            assert torch.equal(x.view(torch.uint8), want.view(torch.uint8)), each
        outs.append(out.clone())
        kernels.append(tuple(kernels_run))
        # What is kept has other values and addresses than the next call's. Behind that its memory
        # is free for the one after.
        for x in given.values():
            x.view(torch.uint8).fill_(0xFF)
        last = given
    assert len(long_ways) == len(bindings) == 1
    assert len(set(kernels)) == 1
    # Each value made a difference, or its change would have shown nothing.
    for each, out in zip((*pairs, "all"), outs[1:], strict=True):
        assert not torch.equal(out, outs[0]), each


def test_gradients_are_those_of_the_call(
    calls_of: Callable[[Any, str], list[Any]],
    kernels_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    nothing_bound: Callable[[], None],
) -> None:
    """Bit by bit what a call gives that was bound for it alone."""
    shapes = ((1, 40, 4, 64), (1, 50, 2, 64), (1, 50, 2, 64), (1, 40, 4, 64))
    pairs = [floats(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    sinks = floats(4, dtype=torch.float32)
    seeds = integers([3], [2**40 + 5], dtype=torch.int64)

    def step(which: int) -> list[torch.Tensor]:
        *leaves, dout = (pair[which].clone() for pair in pairs)
        leaves = [x.requires_grad_() for x in (*leaves, sinks[which].clone())]
        out, lse = pyfa.attention(
            *leaves[:3], sinks=leaves[3], dropout_p=0.2, seed=seeds[which].clone(),
            return_lse=True, backend="emulator",
        )  # fmt: skip
        outs, grads = (out, lse), (dout, lse.detach().sin())
        return [x.detach() for x in (*outs, *torch.autograd.grad(outs, leaves, grads))]

    alone = []
    for which in (0, 1):
        nothing_bound()
        alone.append(step(which))
    assert not any(map(torch.equal, *alone))
    nothing_bound()
    long_ways = calls_of(requests, "dense")
    forwards, backwards = calls_of(bound, "prepare"), calls_of(ops, "prepare")
    kernels_run.clear()
    for which in (0, 1, 1, 0):
        assert all(map(torch.equal, step(which), alone[which]))
    assert len(long_ways) == len(forwards) == len(backwards) == 1
    assert len(kernels_run) == 4 * len(set(kernels_run))


def test_a_packed_gradient_of_the_lse_may_come_with_other_strides() -> None:
    """The head stride of a packed LSE depends on the number of rows, so it is not compared as a
    number. That of a sum over heads is 0."""
    rows, heads = 16, 2
    q, k, v = (pair[0] for pair in (floats(rows, heads, 64, seed=seed) for seed in range(3)))
    offsets = torch.tensor([0, 5, rows], dtype=torch.int32)
    by_row = torch.linspace(-1.0, 1.0, rows)

    def gradient(dlse: torch.Tensor, backend: str) -> torch.Tensor:
        leaf = q.clone().requires_grad_()
        _, lse = pyfa.attention_varlen(
            leaf, k, v, offsets, offsets, 11, 11, return_lse=True, backend=backend
        )
        return torch.autograd.grad(lse, leaf, dlse)[0]

    expanded = by_row.expand(heads, rows)
    want = gradient(expanded, "torch")
    for dlse in (expanded.contiguous(), expanded, expanded.contiguous(), expanded):
        torch.testing.assert_close(gradient(dlse, "emulator"), want, atol=2e-2, rtol=2e-2)


def test_alignments_of_queries_and_of_a_bias_are_told_apart() -> None:
    """Aligned queries with a misaligned bias need another program than the reverse."""
    shapes = ((1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64), (1, 2, 8, 8))
    values = [pair[0] for pair in (floats(*shape, seed=i) for i, shape in enumerate(shapes))]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    want = pyfa.attention(*values[:3], bias=values[3], backend="torch")
    for on_q, on_bias in ((False, True), (True, False), (False, False), (True, True)) * 2:
        q, bias = (shifted(x) if on else x for x, on in ((values[0], on_q), (values[3], on_bias)))
        assert (q.data_ptr() % 16 != 0, bias.data_ptr() % 16 != 0) == (on_q, on_bias)
        out = pyfa.attention(q, *values[1:3], bias=bias, backend="emulator")
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "values"),
    [("cache_seqlens", [-1, 4]), ("rotary_seqlens", [3, 39]), ("rotary_seqlens", [3, -2])],
)
def test_positions_of_a_repeated_append_are_checked(name: str, values: list[int]) -> None:
    """The first call checks them as arguments, later ones with the other values of tensors. A
    length of −1 and two new rows are one key, written where no row is."""
    q, k, v = (pair[0] for pair in (floats(2, 2, 2, 64, seed=seed) for seed in range(3)))
    caches = [torch.zeros(2, 32, 2, 64, dtype=BF16) for _ in range(2)]
    angles = torch.rand(40, 16)
    given = {each: torch.tensor([3, 4], dtype=torch.int32) for each in CHECKED}

    def attend() -> torch.Tensor:
        return pyfa.attention_kvcache(
            q, *caches, k=k, v=v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True,
            backend="emulator", **given,
        )  # fmt: skip

    for _ in range(2):
        attend()
    before = [x.clone() for x in caches]
    given[name] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        attend()
    assert all(map(torch.equal, caches, before))


CHECKED = ("cache_seqlens", "rotary_seqlens")
