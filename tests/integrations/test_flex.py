"""FlexAttention on pyfa, against PyTorch's own, and a transformers model on it."""

import functools
import math
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    _create_empty_block_mask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

import pyfa
from pyfa import api
from pyfa.integrations import flex

own = flex._own
held = functools.partial(flex_attention, enable_gqa=True)  # before anybody activates pyfa
S = 200
DOCUMENT = torch.arange(S) // 70


def _documents(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def _by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() % (h + 2) < b + 1


def _late(b, h, q_idx, kv_idx):
    return kv_idx >= q_idx + 40  # the last 40 rows see nothing


def _bent(score, b, h, q_idx, kv_idx):
    return torch.tanh(score) * 1.5 + (q_idx - kv_idx) * 0.01 * (h + 1)


def _identity(score, b, h, q_idx, kv_idx):
    return score


def _inputs(heads=4, heads_k=4, batch=2, batch_k=2, rows=S, dim=16):
    generator = torch.Generator().manual_seed(2)
    shapes = ((batch, heads, rows, dim), *2 * ((batch_k, heads_k, S, dim),))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """How often pyfa was called."""
    found = []
    real = api.attention

    def attention(*args, **options):
        result = real(*args, **options)
        found.append(options)
        return result

    monkeypatch.setattr(api, "attention", attention)
    monkeypatch.setattr(flex, "_warned", set())
    return found


def _blocks(mask, batch=2, heads=None, rows=S, size=32):
    return create_block_mask(mask, batch, heads, rows, S, device="cpu", BLOCK_SIZE=size)


MASKS = {
    "none": lambda: None,
    "no-op": lambda: _blocks(noop_mask),
    "documents": lambda: _blocks(_documents),
    "by head": lambda: _blocks(_by_head, heads=4, size=(64, 32)),
    "empty rows": lambda: _blocks(_late, batch=1),
    "one block": lambda: _create_empty_block_mask(*_inputs()[:2]),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("score_mod", [None, _bent], ids=["plain", "bent"])
@pytest.mark.parametrize("name", MASKS)
def test_as_pytorchs_own(name, score_mod, calls):
    q, k, v = _inputs()
    block_mask = MASKS[name]()
    expected, of_own = own(q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True))
    with flex.activated():
        out, aux = flex_attention(q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True))
    assert len(calls) == 1
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, of_own.lse)
    assert aux.max_scores is None
    assert out.stride() == expected.stride()
    assert (aux.lse == -math.inf).any() == (name == "empty rows")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_groups_one_batch_of_keys_scale_and_layout(calls):
    q, k, v = _inputs(heads=6, heads_k=2, batch=3, batch_k=1, rows=60)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as models have it
    block_mask = _blocks(_documents, batch=3, rows=60)
    given = (q, k, v, _bent, block_mask)
    expected = own(*given, scale=0.3, enable_gqa=True)
    with flex.activated():
        out, lse = flex_attention(*given, scale=0.3, enable_gqa=True, return_lse=True)
    assert len(calls) == 1
    torch.testing.assert_close(out, expected)
    assert out.stride() == q.stride() == expected.stride()
    assert lse.shape == (3, 6, 60)


def test_blocks_that_are_not_listed_stay_hidden():
    # Lists that say something else than the mask_mod, as from_kv_blocks may have them.
    q, k, v = _inputs()
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    i, j = torch.arange(S)[:, None], torch.arange(S)
    listed = (i >= 128) | (j >= 128)
    causal = lambda b, h, i, j: i >= j - 150  # noqa: E731
    for mask_mod, of_full, seen in (
        (None, (None, None), listed),
        (causal, (None, None), listed & causal(0, 0, i, j)),
        (causal, full, (listed & causal(0, 0, i, j)) | ((i < 128) & (j < 128))),
        (None, full, torch.ones(S, S, dtype=torch.bool)),
    ):
        block_mask = BlockMask.from_kv_blocks(
            counts, indices, *of_full, mask_mod=mask_mod, seq_lengths=(S, S)
        )
        found = flex.flex_attention(q, k, v, block_mask=block_mask)
        expected = pyfa.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias=seen[None, None])
        torch.testing.assert_close(found, expected.transpose(1, 2))


def test_gradients_which_pytorch_has_on_gpus_alone(calls):
    q, k, v = (x.requires_grad_() for x in _inputs())
    block_mask = _blocks(_documents)
    with flex.activated():
        out, lse = flex_attention(q, k, v, _bent, block_mask, return_lse=True)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * weights).sum() + lse.sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    b, h, i, j = (torch.arange(n) for n in (2, 4, S, S))
    b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]
    score = _bent(wide[0] @ wide[1].mT / 4.0, b, h, i, j)
    score = score.masked_fill(~_documents(b, h, i, j), -math.inf)
    result = (score.softmax(-1) @ wide[2] * weights).sum() + score.logsumexp(-1).sum()
    for x, y in zip(found, torch.autograd.grad(result, wide), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_reference_is_replaced_until_restored(calls):
    q, k, v = _inputs(heads_k=2)
    compiled = torch.compile(held, backend="eager")
    for count, call in enumerate((held, compiled)):
        flex.activate()
        try:
            out = call(q, k, v)
        finally:
            flex.restore()
        assert len(calls) == count + 1
        torch.testing.assert_close(out, held(q, k, v))
        assert len(calls) == count + 1
    with flex.activated(), flex.activated():
        pass
    assert flex_attention.__code__ is own.__code__


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_pyfa_cannot_take_is_pytorchs_and_said_once(calls):
    q, k, v = (x.double() for x in _inputs())
    with pytest.warns(UserWarning, match=r"own kernels, not pyfa's: q: expected float16") as said:
        out = flex.flex_attention(q, k, v)
    assert out.dtype == torch.float64
    assert [x.filename for x in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex.flex_attention(q[:1], k[:1], v[:1])

    def unknown(score, b, h, q_idx, kv_idx):
        return torch.special.i0(score)

    with (
        pytest.warns(UserWarning, match="score_mod unknown, .*aten.i0") as said,
        flex.activated(),
    ):
        flex_attention(*_inputs(), unknown)
    assert [x.filename for x in said] == [__file__]
    assert not calls


def test_what_pytorch_refuses_is_refused_in_its_words(calls):
    q, k, v = _inputs(heads_k=2)
    sliced = _blocks(_documents)[:, :, :2]
    wrong = (
        (ValueError, "the same number of heads", (q, k, v), {}),
        (ValueError, "created for a smaller length", (q, k, v), {"rows": 64}),
        (RuntimeError, "sliced BlockMask", (q, k, v), {"block_mask": sliced}),
        (ValueError, "return_lse and return_aux", (q, k, v),
         {"return_lse": True, "return_aux": AuxRequest()}),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, message, given, options in wrong:
            rows = options.pop("rows", None)
            if rows:
                options["block_mask"] = _blocks(_documents, rows=rows)
            gqa = "heads" not in message
            with pytest.raises(kind, match=message):
                flex.flex_attention(*given, enable_gqa=gqa, **options)
    assert not calls


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_transformers_model(padded, calls):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 97, (2, 21))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :6] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    # transformers compiles the building of masks, which takes half a minute on a CPU.
    with torch.compiler.set_stance("force_eager"), flex.activated():
        found = model(tokens, attention_mask=mask).logits
        loss = found[mask.bool()].square().mean()
        loss.backward()
    assert len(calls) == 2
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-3)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
