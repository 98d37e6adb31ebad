"""score_mod and mask_mod in the public functions, against PyTorch's FlexAttention and by hand."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import pyfa
from pyfa import dispatch, mods
from pyfa.backends import BACKENDS
from pyfa.backends.common.calls import GENERAL
from pyfa.backends.hip import code, forward
from pyfa.conformance import runner
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import MASKS, SCORES, _Tables
from pyfa.errors import CodeObjectError
from pyfa.mods import derive


def _inputs(rows, keys, heads=2, batch=2, dim=16):
    torch.manual_seed(1)
    shapes = ((batch, rows, heads, dim), (batch, keys, heads, dim), (batch, keys, heads, dim))
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize(("rows", "keys"), [(24, 24), (24, 40)])
@pytest.mark.parametrize("names", [("relative", "documents"), ("softcap", "natten"), ("gated", "")])
@pytest.mark.filterwarnings("ignore")
def test_as_flex_attention(rows, keys, names):
    q, k, v = _inputs(rows, keys)
    tables = _Tables(Case(lengths_q=(rows,) * 2, lengths_k=(keys,) * 2), torch.device("cpu"))
    score_mod = SCORES[names[0]](tables)
    mask_mod = MASKS[names[1]](tables) if names[1] else None
    out, lse = pyfa.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, return_lse=True)
    blocks = mask_mod and create_block_mask(mask_mod, 2, 2, rows, keys, device="cpu")
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected, expected_lse = flex_attention(
        *turned, score_mod=score_mod, block_mask=blocks, return_lse=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)


def test_indices_count_from_the_top_left_and_causal_from_the_bottom_right():
    q, k, v = _inputs(8, 20)

    def top_left(b, h, i, j):
        return i >= j

    def bottom_right(b, h, i, j):
        return i + 12 >= j

    causal = pyfa.attention(q, k, v, causal=True)
    assert torch.equal(
        pyfa.attention(q, k, v, mask_mod=bottom_right, backend="torch"),
        pyfa.attention(q, k, v, causal=True, softcap=0.0, mask_mod=bottom_right),
    )
    torch.testing.assert_close(pyfa.attention(q, k, v, mask_mod=bottom_right), causal)
    first = pyfa.attention(q, k[:, :8], v[:, :8], causal=True)
    torch.testing.assert_close(pyfa.attention(q, k, v, mask_mod=top_left), first)


def test_every_mod_is_its_own_in_every_cache():
    # Closures over numbers and over tensors, taken in turn: a key that did not know the mod would
    # give one the result of another.
    q, k, v = (x.requires_grad_() for x in _inputs(12, 12))
    tables = [torch.randn(12) for _ in range(2)]

    def scaled(factor):
        return lambda s, b, h, i, j: s * factor

    def shifted(table):
        return lambda s, b, h, i, j: s + table[j]

    def below(n):
        return lambda b, h, i, j: j < n

    options = [
        {}, {"score_mod": scaled(0.5)}, {"score_mod": scaled(2.0)}, {"mask_mod": below(5)},
        {"mask_mod": below(6)}, {"score_mod": shifted(tables[0])},
        {"score_mod": shifted(tables[1])}, {"score_mod": scaled(0.5), "mask_mod": below(5)},
    ]  # fmt: skip
    expected = []
    for given in options:
        leaves = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        score = leaves[0] @ leaves[1].mT / 4.0
        i, j = torch.arange(12)[:, None], torch.arange(12)
        if "score_mod" in given:
            score = given["score_mod"](score, 0, 0, i, j)
        if "mask_mod" in given:
            score = score.masked_fill(~given["mask_mod"](0, 0, i, j), -torch.inf)
        out = (score.softmax(-1) @ leaves[2]).transpose(1, 2)
        expected.append((out, *(g.transpose(1, 2) for g in torch.autograd.grad(out.sum(), leaves))))
    for _ in range(3):
        for given, want in zip(options, expected, strict=True):
            out = pyfa.attention(q, k, v, **given)
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            for x, y in zip((out, *grads), want, strict=True):
                torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-4)


def _forget(monkeypatch):
    """Resolve every mod anew."""
    monkeypatch.setattr(mods, "_mods", {})
    monkeypatch.setattr(mods, "_recent", mods.again.Recent())


def test_a_digest_of_all_is_caught(monkeypatch):
    _forget(monkeypatch)
    monkeypatch.setattr(mods.Mods, "digest", "the same for all")
    with pytest.raises(AssertionError):
        test_every_mod_is_its_own_in_every_cache()


def test_zero_is_not_minus_zero():
    """Functions that are equal but for the sign of a zero: the second would compute the first."""
    q, k, v = _inputs(6, 6)

    def hiding(zero):
        return lambda s, b, h, i, j: torch.where(i == j, s, (s.abs() + 1) / zero)

    assert pyfa.attention(q, k, v, score_mod=hiding(0.0), backend="torch").isnan().all()
    torch.testing.assert_close(pyfa.attention(q, k, v, score_mod=hiding(-0.0), backend="torch"), v)


def test_a_slope_of_the_other_sign_is_caught(monkeypatch):
    _forget(monkeypatch)
    monkeypatch.setitem(derive._RULES, "tanh", lambda make, y, x, d: make.make("neg", d[0]))
    case = Case(dtype="float32", lengths_q=(9,), lengths_k=(9,), backward=True, score_mod="softcap")
    result = runner.run_case(BACKENDS["torch"], case, torch.device("cpu"))
    assert result.status == "failed"
    assert "dq" in result.messages[0]


def test_indices_count_inside_a_packed_sequence():
    q, k, v = _inputs(30, 30, batch=1)
    starts = torch.tensor([0, 11, 30], dtype=torch.int32)
    table = torch.randn(2, 30)

    def score_mod(s, b, h, i, j):
        return s + table[b, j] * (i - j)

    def of(begin, end, b):
        mine = [x[:, begin:end] for x in (q, k, v)]
        return pyfa.attention(
            *mine, score_mod=lambda s, b0, h, i, j: s + table[b, j] * (i - j), backend="torch"
        )

    found = pyfa.attention_varlen(
        *(x[0] for x in (q, k, v)), starts, starts, 19, 19, score_mod=score_mod
    )
    torch.testing.assert_close(found, torch.cat((of(0, 11, 0), of(11, 30, 1)), 1)[0])


def test_in_a_cache_keys_count_from_the_first_valid_one():
    q, k, v = _inputs(1, 30)
    pad, used = torch.tensor([4, 0], dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)

    def mask_mod(b, h, i, j):
        return j < 7

    found = pyfa.attention_kvcache(
        q, k, v, cache_seqlens=used, cache_leftpad=pad, mask_mod=mask_mod
    )
    first = pyfa.attention(q[:1], k[:1, 4:11], v[:1, 4:11])
    second = pyfa.attention(q[1:], k[1:, :7], v[1:, :7])
    torch.testing.assert_close(found, torch.cat((first, second)))


def test_a_mask_hides_nan():
    q, k, v = _inputs(8, 8)
    k[:, 3] = torch.nan
    out, lse = pyfa.attention(q, k, v, mask_mod=lambda b, h, i, j: j != 3, return_lse=True)
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_explain_says_who_has_them():
    q, k, v = _inputs(8, 8)
    text = str(pyfa.explain(q, k, v, mask_mod=lambda b, h, i, j: i >= j))
    assert "mask_mod" in text
    assert "* torch" in text


@pytest.mark.parametrize("name", ["documents", "tree"])
def test_a_wrong_mod_fails_conformance(name, monkeypatch):
    # The other tables' rows: as if the captured tensor of another call had been taken.
    case = Case(
        dtype="float32", lengths_q=(40, 40), lengths_k=(40, 40), backward=True, mask_mod=name
    )
    backend = BACKENDS["torch"]
    where = torch.device("cpu")
    assert runner.run_case(backend, case, where).status == "passed"
    from pyfa.backends.torch import tiled

    real = tiled.evaluate

    def wrong(function, inputs, captured):
        return real(function, inputs, [x.roll(1, -1) for x in captured])

    monkeypatch.setattr(tiled, "evaluate", wrong)
    assert runner.run_case(backend, case, where).status == "failed"


def test_a_mod_whose_hip_code_spills_is_a_reason(monkeypatch):
    # That the compiler says so after 30 s, for eight tables of four dimensions at head_dim 64, was
    # seen; here it is said at once.
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(code, "_refused", {})
    tried = []

    def load(plan, arch):
        tried.append((plan.kernel, dict(plan.constants)["SCORE"]))
        raise CodeObjectError(f"{plan} on {arch} spills 48 registers, 0 B of scratch")

    monkeypatch.setattr(code, "load", load)
    q, k, v = _inputs(8, 8)
    half = [x.half() for x in (q, k, v)]
    mods_of = {"score_mod": lambda s, b, h, i, j: s * 1.25 - j}
    plain = pyfa.attention(*half, **mods_of, backend="torch")
    assert torch.equal(pyfa.attention(*half, **mods_of, backend=("emulator", "torch")), plain)
    text = str(pyfa.explain(*half, **mods_of))
    with pytest.raises(pyfa.UnsupportedProblem, match=r"score_mod or mask_mod .*attn_fwd.* spills"):
        pyfa.attention(*half, **mods_of, backend="emulator")
    # Its own plan and the general one, each once, and known from then on.
    assert tried == [(forward.KERNEL, forward.SCORE_MOD), (forward.KERNEL, GENERAL)]
    assert "spills 48 registers" in text
    assert "capture fewer tensors" in text


def test_a_score_whose_derivative_is_too_large():
    table = torch.randn(8)
    q, k, v = _inputs(8, 8)

    def many(s, b, h, i, j):
        for n in range(80):
            s = torch.tanh(s * table[(i + n) % 8])
        return s

    with pytest.raises(ValueError, match=r"many, .*:\d+: more than 512 operations with its deriv"):
        pyfa.attention(q, k, v, score_mod=many)


def test_mods_that_change_nothing_are_none():
    q, k, v = _inputs(8, 8)
    same = {"score_mod": lambda s, b, h, i, j: s, "mask_mod": lambda b, h, i, j: i.new_ones(()) > 0}
    assert mods.resolve(*same.values(), q.device) == ("", ())
    assert "score_mod" not in str(pyfa.explain(q, k, v, **same))
    assert torch.equal(pyfa.attention(q, k, v, **same), pyfa.attention(q, k, v))
