"""Gradients of the tensors that a score_mod captured, against float64 autograd of the same."""

import math

import pytest
import torch

import pyfa
from pyfa import mods, scores
from pyfa.backends.torch import tiled
from pyfa.mods import derive

ROWS, KEYS, HEADS, BATCH, DIM = 37, 70, 2, 2, 8
FAR = 5


def _inputs():
    generator = torch.Generator().manual_seed(3)
    shapes = ((BATCH, ROWS, HEADS, DIM), *2 * ((BATCH, KEYS, HEADS, DIM),))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _table(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _gated(gain, shift, cap):
    """Two loads of one table, a 0-dim tensor, a load that another load multiplies, and a branch."""

    def score_mod(score, b, h, q_idx, kv_idx):
        bent = cap * torch.tanh((score + gain[q_idx % 7] * gain[kv_idx % 7]) / cap)
        moved = bent + shift[b, h, kv_idx - q_idx]
        return torch.where(kv_idx > q_idx + 40, -math.inf, moved)

    return score_mod


# name: (the tables, the score_mod of them).
CASES = {
    "relative": ([_table(HEADS, 2 * FAR + 1)], scores.relative),
    "t5": ([_table(HEADS, 16)], lambda x: scores.t5(x, farthest=30)),
    "gain": ([_table(HEADS)], scores.gain),
    "bias": ([_table(HEADS, ROWS, KEYS)], scores.bias),
    "alibi": ([_table(HEADS)], scores.alibi),
    "gated": ([_table(7), _table(BATCH, HEADS, 9), torch.tensor(1.5)], _gated),
}


def _seen(b, h, i, j):
    return (i + 33 >= j) & (j != 11) & (i != 5)  # row 5 sees nothing


def _expected(q, k, v, tables, make, weights, lse_weights):
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *tables)]
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    h, b = torch.arange(HEADS)[:, None, None], torch.arange(BATCH)[:, None, None, None]
    score = torch.einsum("bihd,bjhd->bhij", *wide[:2]) / math.sqrt(DIM)
    # Outside of a table its nearest element counts, which PyTorch refuses.
    score = make(*(x.as_subclass(_Clamped) if x.dim() else x for x in wide[3:]))(score, b, h, i, j)
    score = score.masked_fill(~_seen(b, h, i, j), -math.inf)
    lse = score.logsumexp(-1)
    p = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(score - lse[..., None]))
    out = torch.einsum("bhij,bjhd->bihd", p, wide[2])
    total = (out * weights).sum() + (lse * lse_weights)[lse > -math.inf].sum()
    return torch.autograd.grad(total, wide)


class _Clamped(torch.Tensor):
    """A table that is indexed as pyfa does."""

    def __getitem__(self, at):
        at = at if isinstance(at, tuple) else (at,)
        places = []
        for index, size in zip(at, self.shape, strict=True):
            places.append(torch.where(index < 0, index + size, index).clamp(0, size - 1))
        return self.as_subclass(torch.Tensor)[tuple(places)]


def _check(name, deterministic=False, **options):
    tables, make = CASES[name]
    q, k, v = (x.requires_grad_() for x in _inputs())
    tables = [x.clone().requires_grad_() for x in tables]
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(BATCH, ROWS, HEADS, DIM, generator=generator)
    lse_weights = torch.randn(BATCH, HEADS, ROWS, generator=generator)
    out, lse = pyfa.attention(
        q, k, v, score_mod=make(*tables), mask_mod=_seen, return_lse=True,
        deterministic=deterministic, **options,
    )  # fmt: skip
    total = (out * weights).sum() + (lse * lse_weights)[lse > -math.inf].sum()
    found = torch.autograd.grad(total, (q, k, v, *tables))
    expected = _expected(q, k, v, tables, make, weights, lse_weights)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    return found


@pytest.mark.parametrize("name", CASES)
def test_as_autograd_of_the_same(name, monkeypatch):
    monkeypatch.setitem(tiled._TILE_SCORES, "cpu", 1 << 12)  # several tiles
    _check(name)


def test_the_same_bits_every_time():
    first, second = _check("gated", deterministic=True), _check("gated")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("fault", ["another load", "not masked"])
def test_planted_faults_are_caught(fault, monkeypatch):
    monkeypatch.setattr(mods, "_mods", {})
    monkeypatch.setattr(mods, "_recent", mods.again.Recent())
    if fault == "another load":
        real = derive._slope
        monkeypatch.setattr(
            derive, "_slope", lambda make, f, numbers, source: real(
                make, f, numbers, source and min(n for n, x in enumerate(f.ops) if x.name == "load")
            )
        )  # fmt: skip
    else:
        real_add = tiled._add_captured

        def add(total, slot, derivative, given, captured, p, ds):
            real_add(total, slot, derivative, given, captured, p + 1.0, ds + (p == 0.0) * 1e-3)

        monkeypatch.setattr(tiled, "_add_captured", add)
    with pytest.raises(AssertionError):
        _check("gated")


def test_only_the_table_needs_a_gradient_and_who_can():
    q, k, v = _inputs()
    table = _table(HEADS, 2 * FAR + 1).requires_grad_()
    frozen = table.detach().clone()
    out = pyfa.attention(q, k, v, score_mod=scores.relative(table))
    (grad,) = torch.autograd.grad(out.square().sum(), table)
    assert grad.abs().max() > 0
    text = str(pyfa.explain(q, k, v, score_mod=scores.relative(table), device="MI300X"))
    assert text.count("gradient of tensors captured by a score_mod is not implemented") == 4
    assert "* torch" in text
    for score_mod in (scores.relative(frozen), scores.relative(table.detach())):
        assert "captured" not in str(pyfa.explain(q, k, v, score_mod=score_mod))
    with torch.no_grad():
        assert "captured" not in str(pyfa.explain(q, k, v, score_mod=scores.relative(table)))
        assert not pyfa.attention(q, k, v, score_mod=scores.relative(table)).requires_grad


def test_a_table_that_only_a_mask_reads_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in _inputs())
    levels = torch.linspace(-1, 1, KEYS).requires_grad_()
    out = pyfa.attention(q, k, v, mask_mod=lambda b, h, i, j: levels[j] < 0.5)
    out.sum().backward()
    assert levels.grad is None
    assert q.grad is not None


def test_packed_sixteen_bits_and_other_dtypes():
    q, k, v = (x.bfloat16() for x in _inputs())
    table = _table(HEADS, 2 * FAR + 1).requires_grad_()
    apart = torch.cat(
        [
            pyfa.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1],
                           score_mod=scores.relative(table))[0]
            for b in range(BATCH)
        ]
    )  # fmt: skip
    (expected,) = torch.autograd.grad(apart.float().square().sum(), table)
    offsets_q, offsets_k = (torch.arange(BATCH + 1, dtype=torch.int32) * n for n in (ROWS, KEYS))
    packed = pyfa.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)), offsets_q, offsets_k, ROWS, KEYS,
        score_mod=scores.relative(table),
    )  # fmt: skip
    (found,) = torch.autograd.grad(packed.float().square().sum(), table)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    half = table.detach().half().requires_grad_()
    out = pyfa.attention(q, k, v, score_mod=scores.relative(half))
    (of_half,) = torch.autograd.grad(out.float().square().sum(), half)
    assert of_half.dtype == torch.float16
    torch.testing.assert_close(of_half.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_cache_has_no_gradient():
    q, k, v = _inputs()
    table = _table(HEADS, 2 * FAR + 1).requires_grad_()
    with pytest.raises(ValueError, match=r"score_mod: expected captured tensors .*x\.detach\(\)"):
        pyfa.attention_kvcache(q, k, v, score_mod=scores.relative(table))
