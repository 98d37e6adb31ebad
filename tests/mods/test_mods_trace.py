"""What is traced computes what the function computes, and its derivative is that of autograd."""

import pytest
import torch

from pyfa import mods
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import MASKS, SCORES, _Tables
from pyfa.mods import emit
from pyfa.mods.evaluate import evaluate

CPU = torch.device("cpu")
CASE = Case(lengths_q=(37, 37), lengths_k=(37, 37))
SPOTS = {
    "b": torch.arange(2, dtype=torch.int32)[:, None, None, None],
    "h": torch.arange(2, dtype=torch.int32)[:, None, None],
    "q": torch.arange(37, dtype=torch.int32)[:, None],
    "kv": torch.arange(37, dtype=torch.int32),
}


def _scores() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 2, 37, 37, dtype=torch.float64) * 3


@pytest.fixture(autouse=True)
def _float64():
    """The quotient of integers is of the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _same(score_mod, scores=None):
    """Value and slope of a score_mod, as it is and as traced."""
    scores = _scores() if scores is None else scores
    leaf = scores.clone().requires_grad_()
    expected = score_mod(leaf, *SPOTS.values()).expand(scores.shape)
    slope = torch.zeros_like(leaf)
    if expected.requires_grad:
        (slope,) = torch.autograd.grad(expected.sum(), leaf)
    digest, captured = mods.resolve(score_mod, None, CPU)
    found, found_slope = evaluate(mods.of(digest).slope, {"score": scores, **SPOTS}, captured)
    finite = expected.isfinite()
    torch.testing.assert_close(found.expand(scores.shape), expected.detach().double())
    torch.testing.assert_close(found_slope.expand(scores.shape)[finite], slope[finite])


@pytest.mark.parametrize("name", MASKS)
def test_masks_compute_what_they_say(name):
    mask = MASKS[name](_Tables(CASE, CPU))
    digest, captured = mods.resolve(None, mask, CPU)
    (found,) = evaluate(mods.of(digest).mask, {"score": _scores(), **SPOTS}, captured)
    expected = mask(*SPOTS.values())
    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal(found.expand(expected.shape), expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_their_slopes(name):
    _same(SCORES[name](_Tables(CASE, CPU)))


LAMBDAS = {
    "arithmetic": lambda s, b, h, i, j: (s * 2 - 1) / (j + 1) + (3 - s) * 0.5 + -s,
    "integers": lambda s, b, h, i, j: s * ((i * 7 - j) // 5 % 3) + (i - j) % -4 + (i - j) // 3,
    "truncated": lambda s, b, h, i, j: s + torch.div(i - j, 5, rounding_mode="trunc"),
    "fmod": lambda s, b, h, i, j: s + torch.fmod(i - 2 * j, 5) + torch.fmod(s, 1.5),
    "remainder": lambda s, b, h, i, j: torch.remainder(s, 1.5) + s % 2.0,
    "bits": lambda s, b, h, i, j: s + ((i & 5) | (j << 1)) + ((i ^ j) >> 1) + ~i,
    "exponentials": lambda s, b, h, i, j: torch.exp(s) + torch.exp2(s) - torch.log(s.abs() + 1),
    "logarithms": lambda s, b, h, i, j: torch.log2(s * s + 1) + torch.log1p(s.abs()),
    "roots": lambda s, b, h, i, j: torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 2),
    "powers": lambda s, b, h, i, j: s**3 + (s.abs() + 1) ** 0.5 + 2.0**s + (s * s + 1) ** -1.5,
    "waves": lambda s, b, h, i, j: torch.sin(s) * torch.cos(j * 0.1) + torch.cos(s),
    "tangents": lambda s, b, h, i, j: torch.tan(s * 0.1) + torch.tan(b),
    "logistic": lambda s, b, h, i, j: torch.sigmoid(s) + torch.nn.functional.silu(s) + s.tanh(),
    "steps": lambda s, b, h, i, j: s.floor() + s.ceil() + s.round() + s.trunc() + s.sign() * s,
    "limits": lambda s, b, h, i, j: s.clamp(-1, 1) + s.clamp(min=0) + torch.relu(s - 1) + s.abs(),
    "extremes": lambda s, b, h, i, j: torch.minimum(s, j * 0.1) * torch.maximum(s, -s),
    "logic": lambda s, b, h, i, j: torch.where(
        torch.logical_and(i > j, torch.logical_not(s > 0)) ^ ((j == 3) | (i != 5)), s, 2 * s
    ),
    "casts": lambda s, b, h, i, j: s + (i > j) * 2 + (s > 0).float() + s.int() + (i == j).int() / 3,
    "quotients": lambda s, b, h, i, j: s / (s * s + 1) + (i / (j + 1)),
    "floored": lambda s, b, h, i, j: s + torch.div(s, 1.5, rounding_mode="floor"),
    "constants": lambda s, b, h, i, j: s * torch.tensor(2.0) + torch.full((), 0.5) + s.new_ones(()),
    "likes": lambda s, b, h, i, j: torch.where(i > j, torch.zeros_like(s), torch.ones_like(s) * s),
    "infinite": lambda s, b, h, i, j: torch.where(j > i, -float("inf"), s),
    "filled": lambda s, b, h, i, j: s.masked_fill(j > i, -1e4).masked_fill(i == 3, s.new_ones(())),
    "nan": lambda s, b, h, i, j: torch.where(torch.isnan(s) | torch.isinf(s), 0.0, s),
    "without the score": lambda s, b, h, i, j: (i - j) * 0.5,
    "a number": lambda s, b, h, i, j: 1.5 + 0 * s,
}  # fmt: skip


@pytest.mark.parametrize("name", LAMBDAS)
def test_operators(name):
    _same(LAMBDAS[name])


def test_slopes_at_ties_are_pytorchs():
    ties = torch.tensor([-1.0, 0.0, 1.0, 0.5]).double().repeat(2, 2, 37, 10)[..., :37]
    _same(LAMBDAS["limits"], ties)
    _same(lambda s, b, h, i, j: torch.minimum(s, 0.5 * s) + torch.maximum(s, -s), ties)


def test_indices_from_the_end_and_beyond_it():
    table = torch.arange(10.0)

    def score(s, b, h, i, j):
        return s + table[i - j]

    digest, captured = mods.resolve(score, None, CPU)
    (found,) = evaluate(mods.of(digest).score, {"score": torch.zeros(()), **SPOTS}, captured)
    distance = SPOTS["q"] - SPOTS["kv"]
    expected = torch.where(distance < 0, distance + 10, distance).clamp(0, 9).float()
    assert torch.equal(found, expected)


def test_constants_are_folded_and_equal_operations_are_one():
    def score(s, b, h, i, j):
        return (s + (i - j) * (2 * 3 - 5)) * 1.0 + (i - j).float() * 0.5

    function = mods.of(mods.resolve(score, None, CPU)[0]).score
    names = [op.name for op in function.ops]
    assert names.count("sub") == 1
    assert names.count("cast") == 1
    assert names.count("mul") == 1  # by 0.5


def test_a_new_tensor_is_not_traced_again(monkeypatch):
    traced = []
    real = mods.trace
    monkeypatch.setattr(mods, "trace", lambda *given: traced.append(1) or real(*given))

    def make(length, window):
        document = torch.arange(length) // 7
        return lambda b, h, i, j: (document[i] == document[j]) & (i - j < window)

    first = mods.resolve(None, make(40, 1234), CPU)
    second = mods.resolve(None, make(70, 1234), CPU)
    assert len(traced) == 1
    assert first[0] == second[0]
    assert second[1][0].shape == (70,)  # the new one, and not that of the trace
    # Another number is another function.
    assert mods.resolve(None, make(40, 1235), CPU)[0] != first[0]
    assert len(traced) == 2


def test_a_size_that_is_read_is_part_of_the_key():
    def make(table):
        return lambda s, b, h, i, j: s + table[(i - j) + table.shape[0] // 2]

    small, large = (mods.resolve(make(torch.zeros(n)), None, CPU)[0] for n in (10, 20))
    assert small != large
    assert mods.resolve(make(torch.ones(10)), None, CPU)[0] == small


def test_one_tensor_twice_and_two_tensors_are_told_apart():
    def make(x, y):
        return lambda b, h, i, j: x[i] == y[j]

    one, two = torch.arange(5), torch.arange(5)
    same, captured = mods.resolve(None, make(one, one), CPU)
    different, both = mods.resolve(None, make(one, two), CPU)
    assert len(captured) == 1
    assert both[0] is one
    assert both[1] is two
    assert same != different


def test_which_function_comes_twice_is_told_apart():
    """Functions made by one function share their code."""

    def scaled(factor):
        return lambda s: s * factor

    def make(*parts):
        first, second, third = parts
        return lambda s, b, h, i, j: first(s) + second(s) * third(s)

    two, three = scaled(2.0), scaled(3.0)
    for parts in ((two, three, two), (two, three, three), (two, three, two)):
        _same(make(*parts))


def test_what_an_object_holds_is_looked_up_at_every_call():
    class Settings:
        window = 3

    def mask(b, h, i, j):
        return i - j < Settings.window

    first = mods.resolve(None, mask, CPU)[0]
    Settings.window = 4
    assert mods.resolve(None, mask, CPU)[0] != first


def test_a_tensor_that_is_made_of_a_captured_one():
    table = torch.arange(6.0)

    def score(s, b, h, i, j):
        return s + (table * 2)[i]

    (found,) = mods.resolve(score, None, CPU)[1]
    assert torch.equal(found, table * 2)
    table += 1
    (found,) = mods.resolve(score, None, CPU)[1]
    assert torch.equal(found, table * 2)


@pytest.mark.parametrize(
    ("divisor", "divides"), [(30.0, False), (-0.7, False), (1e-45, True), (0.0, True)]
)
def test_a_score_is_multiplied_where_a_mask_divides(divisor, divides):
    """Of a number whose reciprocal is no float32 the quotient stays."""
    score = lambda s, b, h, i, j: torch.tanh(s / divisor)  # noqa: E731
    source = emit.source(mods.of(mods.resolve(score, None, CPU)[0]))
    assert (" / " in source) is divides
    mask = lambda b, h, i, j: i / divisor < j  # noqa: E731
    assert " / " in emit.source(mods.of(mods.resolve(None, mask, CPU)[0]))
