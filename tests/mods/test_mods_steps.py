"""Rewriting for a lane's scores (``steps``), how exactly a tanh is needed (``accuracy``), and mods
that come again (``again``)."""

import gc
import math
import weakref

import pytest
import torch

from pyfa import mods
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import SCORES, _Tables
from pyfa.mods import accuracy, again, emit, steps
from pyfa.mods.evaluate import evaluate

CPU = torch.device("cpu")
SLOPES = torch.tensor([0.25, 0.5, 2.0])
TABLE = torch.linspace(-1, 1, 64)
MODS = {
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "distance": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "places": lambda s, b, h, i, j: s * (3 * i + 5 - (2 * j - h) * 2) / 64,
    "softcap": lambda s, b, h, i, j: 30 * torch.tanh((s + 0.5 * (i - j)) / 30),
    "where": lambda s, b, h, i, j: torch.where(i >= j, s + (i - j), float("-inf")),
    "squared": lambda s, b, h, i, j: s + ((i - j) * (i - j)),
    "loaded": lambda s, b, h, i, j: s + TABLE[(i - j) % 64] * (i + j),
    "wrapping": lambda s, b, h, i, j: s + (i * 1_000_000_000 + j),
}


def of(score):
    digest, captured = mods.resolve(score, None, CPU)
    return mods.of(digest), captured


def ops_of(function):
    return [op.name for op in function.ops]


def inputs(base, step):
    """A tile of scores that begins at ``base``, in float64."""
    i, j = torch.arange(6, dtype=torch.int32)[:, None], torch.arange(9, dtype=torch.int32)
    (q, kv), (dq, dk) = base, step
    return {
        "score": torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        "b": torch.tensor(1, dtype=torch.int32), "h": torch.tensor(2, dtype=torch.int32),
        "q": q + dq * i, "kv": kv + dk * j,
        "q_base": torch.tensor(q, dtype=torch.int32),
        "kv_base": torch.tensor(kv, dtype=torch.int32),
        "q_step": (dq * i).double(), "kv_step": (dk * j).double(),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_the_same_scores_and_slopes(name):
    pair, captured = of(MODS[name])
    for function in (pair.score, pair.slope):
        for given in (inputs((7, 40), (1, 1)), inputs((1000, 3), (8, 2)), inputs((5, 5), (0, 8))):
            found = evaluate(steps.with_steps(function), given, captured)
            for x, y in zip(found, evaluate(function, given, captured), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("name", SCORES)
def test_all_scores_of_the_suite(name):
    tables = _Tables(Case(lengths_q=(60,), lengths_k=(60,)), CPU)
    pair, captured = of(SCORES[name](tables))
    given = inputs((7, 20), (1, 2))
    (found,) = evaluate(steps.with_steps(pair.score), given, captured)
    (expected,) = evaluate(pair.score, given, captured)
    torch.testing.assert_close(found.expand(6, 9), expected.expand(6, 9), rtol=1e-11, atol=1e-9)


INF, NAN = math.inf, math.nan
HOSTILE = [-INF, INF, NAN, -0.0, 3e38, -1e30, 1e-40, 0.1]
LINEAR = {
    "slope": lambda t, u: lambda s, b, h, i, j: s + t[h] * (j - i),
    "beside": lambda t, u: lambda s, b, h, i, j: s + t[h] * (j - i - 1),
    "distance": lambda t, u: lambda s, b, h, i, j: s - t[h] * (i - j).abs(),
    "start": lambda t, u: lambda s, b, h, i, j: s + (t[h] + 0.25 * (j - i)),
    "both": lambda t, u: lambda s, b, h, i, j: s + (t[h] + u[h] * (j - i)),
    "two products": lambda t, u: lambda s, b, h, i, j: s + t[h] * j - t[h] * i,
    "a product of a product": lambda t, u: lambda s, b, h, i, j: s + t[h] * (u[h] * (j - i)),
    "quotient": lambda t, u: lambda s, b, h, i, j: s + (j - i) / t[h],
    "floats": lambda t, u: lambda s, b, h, i, j: s + t[h] * (j.float() - i.float()),
    "fast": lambda t, u: lambda s, b, h, i, j: s + t[h] * (40000 * j - 50000 * i),
}


@pytest.mark.parametrize("name", LINEAR)
def test_hostile_captured_values_give_the_same_bits(name):
    """In float32, where ∞ · 0 and sums that cancel show."""
    for values in (HOSTILE, HOSTILE[::-1]):
        for other in (values, [0.5] * 8):
            pair, captured = of(LINEAR[name](torch.tensor(values), torch.tensor(other)))
            for base, step in (((7, 40), (1, 1)), ((100, 3), (8, 2)), ((5, 5), (0, 8))):
                given = inputs(base, step)
                given = {k: x.float() if x.is_floating_point() else x for k, x in given.items()}
                for h in range(8):
                    given["h"] = torch.tensor(h, dtype=torch.int32)
                    for function in (pair.score, pair.slope):
                        found = evaluate(steps.with_steps(function), given, captured)
                        for x, y in zip(found, evaluate(function, given, captured), strict=True):
                            assert torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))
                            assert torch.equal(x.isnan(), y.isnan())


def test_a_linear_distance_is_converted_once():
    """At the base: what a lane's other scores take is an addition."""
    for name in ("alibi", "distance"):
        function = steps.with_steps(of(MODS[name])[0].score)
        casts = [op for op in function.ops if op.name == "cast"]
        assert len(casts) == 1
        (source,) = casts[0].args
        assert {function.ops[x].value for x in function.ops[source].args} == {"q_base", "kv_base"}
    # A product of two indices is not linear, and one that may wrap around is not either.
    for name in ("squared", "wrapping"):
        function = steps.with_steps(of(MODS[name])[0].score)
        assert not {"q_step", "kv_step"} & {op.value for op in function.ops}


def test_a_tanh_beside_one_where_it_is_exact_enough():
    near = "mod_tanh_near("
    assert near in emit.source(of(lambda s, b, h, i, j: 30 * torch.tanh(s / 30))[0])
    for exact in (
        lambda s, b, h, i, j: 600 * torch.tanh(s / 600),
        lambda s, b, h, i, j: SLOPES[h] * torch.tanh(s),
        lambda s, b, h, i, j: torch.log(torch.tanh(s.abs())),
        lambda s, b, h, i, j: s / torch.tanh(s),
    ):
        assert near not in emit.source(of(exact)[0])
    assert near not in emit.source(
        mods.of(mods.resolve(None, lambda b, h, i, j: torch.tanh(i / 9.0) < 0.5, CPU)[0])
    )


def test_what_an_error_becomes():
    function = of(lambda s, b, h, i, j: 3 * torch.tanh(s) - 2 * torch.tanh(s))[0].score
    weights = accuracy.weights_of(function, (1.0,))
    assert weights[ops_of(function).index("tanh")] == 5.0


def test_a_mod_that_comes_again_is_recognized(monkeypatch):
    table = torch.arange(8)

    def mask(b, h, i, j):
        return table[i] < j + LIMIT

    first = mods.resolve(None, mask, CPU)
    mods.resolve(None, mask, CPU)
    calls = []
    real = mods._resolved
    monkeypatch.setattr(mods, "_resolved", lambda *given: calls.append(given) or real(*given))
    found = mods.resolve(None, mask, CPU)
    assert found[0] == first[0]
    assert found[1][0] is table
    assert not calls
    # Another tensor of its kind is taken in its place.
    table = torch.arange(8) + 1
    assert mods.resolve(None, mask, CPU)[1][0] is table
    assert not calls
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert mods.resolve(None, mask, CPU)[0] != first[0]
    assert len(calls) == 1


def test_functions_of_one_code_are_told_apart():
    class Doubling:
        def __call__(self, s, b, h, i, j):
            return 2 * s

    def make(x, y, n):
        return lambda b, h, i, j: x[i] + n < y[j]

    def added(n, x):
        return lambda s, b, h, i, j: torch.maximum(s, s - s + n) + x[j - x.shape[0]]

    one, two = torch.arange(5), torch.arange(5)
    given = [
        (added(0.0, one), None),
        (added(0.0, one[:4]), None),
        (None, make(one, one, 1)),
        (Doubling(), make(one, one, 1)),
        (None, make(one, two, 1)),
        (None, make(two, one, 1)),
        (None, make(one, one, 2)),
        (None, make(one, one.float(), 1)),
        (None, make(one, two[:4], 1)),
        (lambda s, b, h, i, j: 2 * s, make(one, one, 1)),
    ]
    expected = [mods._resolved(*pair, CPU) for pair in given]
    for _ in range(3):
        for pair, (digest, captured) in zip(given, expected, strict=True):
            found = mods.resolve(*pair, CPU)
            assert found[0] == digest
            assert list(map(id, found[1])) == list(map(id, captured))


def test_a_function_that_is_kept_keeps_no_tensor():
    def make(table):
        return weakref.ref(table), lambda b, h, i, j: table[i] < j

    gone, mask = make(torch.arange(8))
    mods.resolve(None, mask, CPU)
    assert gone() is not None
    del mask
    gc.collect()
    assert gone() is None


LIMIT = 3


def test_what_may_change_unseen_is_not_kept():
    values = [1, 2]
    for mod in (
        lambda b, h, i, j: i < j + values[0],
        lambda b, h, i, j, n=2: i < j + n,
        lambda b, h, i, j: _helper(i) < j,
    ):
        with pytest.raises(again.Unsure):
            again.Snapshot(mod)
    table = torch.rand(8)
    snapshot = again.Snapshot(mod := lambda s, b, h, i, j: s + table[j])
    found = []
    assert snapshot.add_tensors(mod, found)
    assert [id(x) for x in found] == [id(table)]
    table.requires_grad_()
    assert not snapshot.add_tensors(mod, [])


def test_a_parameter_of_another_dtype_is_traced_again():
    """``Module.half()`` keeps the object. Kernels load by the dtype."""
    model = torch.nn.Module()
    model.table = torch.nn.Parameter(torch.rand(8), requires_grad=False)
    table = model.table

    def score(s, b, h, i, j):
        return s + table[j]

    first = [mods.resolve(score, None, CPU)[0] for _ in range(3)]
    model.half()
    assert model.table is table
    digest, captured = mods.resolve(score, None, CPU)
    assert captured[0].dtype == torch.float16
    assert mods.of(digest).kinds == ((torch.float16, 1),)
    assert digest not in first


def _helper(x):
    return x
