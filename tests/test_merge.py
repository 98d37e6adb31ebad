"""``pyfa.merge`` against one call over all keys."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import pyfa

Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def qkv(seed: int, keys: int, packed: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    lead = () if packed else (2,)
    return [rows(*lead, n, h, 16) for n, h in ((5, 4), (keys, 2), (keys, 2))]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> Parts:
    if q.dim() == 4:
        return pyfa.attention(q, k, v, return_lse=True, **options)
    of_q, of_k = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
    return pyfa.attention_varlen(
        q, k, v, of_q, of_k, len(q), len(k), return_lse=True, **options
    )  # fmt: skip


def cut(q, k, v, places, sinks=None) -> Parts:
    """Attention over the keys between two places each; the sinks in the first part alone."""
    found = []
    for number, (low, high) in enumerate(itertools.pairwise(places)):
        keys = [x.narrow(-3, low, high - low) for x in (k, v)]
        found.append(attend(q, *keys, sinks=sinks if number == 0 else None))
    return tuple(map(list, zip(*found, strict=True)))


@pytest.mark.parametrize("packed", [False, True], ids=("dense", "packed"))
@pytest.mark.parametrize("with_sinks", [False, True], ids=("", "sinks"))
def test_random_cuts_are_one_call(packed: bool, with_sinks: bool) -> None:
    """Out, LSE and all gradients of 50 cuts each; some parts have no key at all."""
    draw = random.Random(7)
    for seed in range(50):
        keys = draw.randint(1, 40)
        q, k, v = given = qkv(seed, keys, packed)
        sinks = rows(4) if with_sinks else None
        inputs = [*given, sinks] if with_sinks else given
        inner = sorted(draw.choices(range(keys + 1), k=draw.randint(0, 4)))
        have = pyfa.merge(*cut(q, k, v, [0, *inner, keys], sinks), return_lse=True)
        want = attend(q, k, v, sinks=sinks)
        douts = [torch.randn_like(x) for x in want]
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b)
        grads = (torch.autograd.grad(each, inputs, douts) for each in (have, want))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def parts_of(*shape: int, count: int = 3) -> Parts:
    *lead, n, h, _ = shape
    return [rows(*shape) for _ in range(count)], [rows(*lead, h, n) for _ in range(count)]


def test_a_part_that_saw_nothing_is_not_read() -> None:
    outs, lses = parts_of(2, 5, 4, 8)
    want = pyfa.merge(outs[:2], lses[:2], return_lse=True)
    nothing = torch.full_like(lses[2], -torch.inf).requires_grad_()
    nan = torch.full_like(outs[2], torch.nan).requires_grad_()
    have = pyfa.merge([*outs[:2], nan], [*lses[:2], nothing], return_lse=True)
    assert all(map(torch.equal, have, want))
    total = sum(x.sum() for x in have)
    grads = torch.autograd.grad(total, [*outs[:2], nan, *lses[:2], nothing])
    assert not any(x.isnan().any() for x in grads)
    assert not grads[2].any()
    assert not grads[5].any()


def test_a_row_without_any_part() -> None:
    outs, lses = parts_of(2, 5, 4, 8)
    with torch.no_grad():
        for x in lses:
            x[1, 2, 3] = -torch.inf
    out, lse = pyfa.merge(outs, lses, return_lse=True)
    assert not out[1, 3, 2].any()
    assert lse[1, 2, 3] == -torch.inf
    assert lse.isfinite().sum() == lse.numel() - 1
    grads = torch.autograd.grad(out.sum() + lse[0].sum(), [*outs, *lses])
    assert not any(x.isnan().any() for x in grads)


def test_a_nan_reaches_its_row_alone() -> None:
    outs, lses = parts_of(2, 5, 4, 8)
    with torch.no_grad():
        lses[1][1, 2, 3] = torch.nan
    out, lse = pyfa.merge(outs, lses, return_lse=True)
    assert out[1, 3, 2].isnan().all()
    assert lse[1, 2, 3].isnan()
    assert out.isnan().sum() == out.shape[-1]
    assert lse.isnan().sum() == 1


def test_dtypes() -> None:
    outs, lses = parts_of(2, 5, 4, 8)
    half = [x.half() for x in outs]
    exact = pyfa.merge([x.float() for x in half], lses)
    assert torch.equal(pyfa.merge(half, lses), exact.half())
    mixed = pyfa.merge([half[0], outs[1].bfloat16(), half[2]], lses)
    assert mixed.dtype == torch.float32
    with torch.no_grad():
        out = torch.empty(2, 5, 8, 4, dtype=torch.bfloat16).mT
        assert pyfa.merge(half, lses, out) is out
    assert torch.equal(out, exact.bfloat16())
    stacked = pyfa.merge(torch.stack(half), torch.stack(lses))
    assert torch.equal(stacked, exact.half())


def test_large_and_small_lses() -> None:
    outs, lses = parts_of(1, 2, 1, 4, count=2)
    out, lse = pyfa.merge(
        outs, [x * 0 + s for x, s in zip(lses, (3e4, -3e4), strict=True)], None, True
    )
    assert torch.equal(out, outs[0])
    assert (lse == 3e4).all()


def test_compiled_without_a_break() -> None:
    outs, lses = parts_of(2, 5, 4, 8)
    compiled = torch.compile(pyfa.merge, fullgraph=True, backend="eager")
    assert torch.equal(compiled(outs, lses), pyfa.merge(outs, lses))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o, s: ([], []), ValueError, "as many lses as outs"),
        (lambda o, s: (o, s[:2]), ValueError, "3 outs and 2 lses"),
        (lambda o, s: ([o[0], o[1][:1], o[2]], s), ValueError, r"outs\[1\]: expected shape"),
        (lambda o, s: (o, [x.mT for x in s]), ValueError, r"lses\[0\]: expected shape \(2, 4, 5\)"),
        (lambda o, s: (o, [x.half() for x in s]), ValueError, r"lses\[0\]: expected float32"),
        (lambda o, s: ([x.double() for x in o], s), ValueError, r"outs\[0\]: expected float16"),
        (lambda o, s: (o, [*s[:2], None]), TypeError, r"lses\[2\]: expected a tensor"),
        (lambda o, s: (o, s, o[0][:1]), ValueError, "out: expected shape"),
        (lambda o, s: (o, s, torch.empty(2, 5, 4, 8)), ValueError, "out: no gradient flows"),
        (lambda o, s: ([x.to("meta") for x in o], s), ValueError, r"lses\[0\]: expected device"),
        (lambda o, s: (3, s), TypeError, "^outs: expected a list of tensors"),
        (lambda o, s: (o, s[0][0, 0, 0]), TypeError, "^lses: expected a list of tensors"),
        (lambda o, s: (torch.nested.nested_tensor(o), s), ValueError, "^outs: expected a dense"),
        (lambda o, s: (o, s, None, 2), TypeError, "^return_lse: expected True or False; got 2"),
        (
            lambda o, s: (o, s, torch.empty(5, 4, 8).expand(2, 5, 4, 8)),
            ValueError,
            "^out: expected elements that do not share memory",
        ),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(change, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pyfa.merge(*change(*parts_of(2, 5, 4, 8)))


def test_the_negative_bit() -> None:
    """A kernel goes by the address. What it is bound by says nothing of the bit."""
    outs, lses = ([x.detach() for x in part] for part in parts_of(2, 5, 4, 8, count=2))
    outs = [x.half() for x in outs]
    negative = torch._neg_view(outs[0])
    with pyfa.use_backend("emulator"):
        pyfa.merge(outs, lses)  # bound
        out = pyfa.merge([negative, outs[1]], lses)
        want = pyfa.merge([-outs[0], outs[1]], lses)
    torch.testing.assert_close(out, want)
    with pytest.raises(ValueError, match=r"^out: expected a tensor without the negative bit"):
        pyfa.merge(outs, lses, negative)


def test_an_out_that_requires_a_gradient() -> None:
    outs, lses = ([x.detach() for x in part] for part in parts_of(2, 5, 4, 8))
    out = torch.empty(2, 5, 4, 8, requires_grad=True)
    for given in (out, out * 1):
        with pytest.raises(ValueError, match=r"^out: no gradient flows"):
            pyfa.merge(outs, lses, given)
    with torch.no_grad():
        pyfa.merge(outs, lses, out)
    assert torch.equal(out, pyfa.merge(outs, lses))
