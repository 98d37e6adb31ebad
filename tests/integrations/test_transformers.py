"""transformers' models on pyfa: the numbers of eager attention, the same tokens, the same masks."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from pyfa.conformance.tolerances import judge  # noqa: E402
from pyfa.integrations import transformers as integration  # noqa: E402

integration.register()


def in_float64(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, s_aux: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The reference. transformers' eager attention takes its softmax in float32."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    score = (query @ key.mT * scaling).masked_fill(~mask[..., : key.shape[2]], -torch.inf)
    if s_aux is not None:
        sinks = s_aux[:, None, None].expand(*score.shape[:3], 1)
        score = torch.cat([score, sinks], -1)
    # A row that sees nothing: all −inf, which has no softmax.
    empty = (score == -torch.inf).all(-1, keepdim=True)
    weights = score.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2), None


def boolean_mask(*args: Any, **options: Any) -> torch.Tensor:
    return sdpa_mask(*args, **(options | {"allow_is_causal_skip": False}))


transformers.AttentionInterface.register("float64", in_float64)
transformers.AttentionMaskInterface.register("float64", boolean_mask)

TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 96, "max_position_embeddings": 64,
}  # fmt: skip
LENGTH = 12
PADDING = {"none": (0, 0), "left": (5, 0), "right": (0, 5)}


def build(kind: str, implementation: str, dtype: torch.dtype, experts: str | None = "eager") -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**TINY, attn_implementation=implementation)
        model = transformers.LlamaForCausalLM(config)
    else:
        # Windows shorter than the input, and sinks.
        config = transformers.GptOssConfig(
            **TINY, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
            rope_scaling=None, experts_implementation=experts, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        # Initial weights are so small that all scores would be alike.
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5)
    return model.to(dtype).eval()


def tokens(padding: str) -> dict[str, torch.Tensor]:
    """Two sequences, the second padded."""
    torch.manual_seed(1)
    ids = torch.randint(2, 96, (2, LENGTH))
    left, right = PADDING[padding]
    if not left + right:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    mask[1, LENGTH - right :] = 0
    return {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask}


def evaluate(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits where there are tokens, and the gradient of every weight."""
    logits = model(**inputs).logits
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    torch.manual_seed(2)
    weights = torch.randn(logits.shape)[real]
    model.zero_grad()
    (logits[real] * weights.to(logits.dtype)).sum().backward()
    named = ((name.removeprefix("_orig_mod."), x.grad) for name, x in model.named_parameters())
    grads = {name: grad for name, grad in named if grad is not None}
    return {"logits": logits[real].detach(), **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_logits_and_gradients_are_eagers(kind: str, padding: str, dtype: torch.dtype) -> None:
    inputs = tokens(padding)
    rounded = build(kind, "eager", dtype)
    reference = build(kind, "float64", torch.float64)
    reference.load_state_dict(rounded.state_dict())
    mine = build(kind, "pyfa", dtype)
    assert mine.config._attn_implementation == "pyfa"
    ref, naive, x = (evaluate(model, inputs) for model in (reference, rounded, mine))
    assert set(x) == set(ref)
    assert kind == "llama" or any("sinks" in name for name in x)
    for name in x:
        check = judge(name, x[name], ref[name], naive[name].double(), gradient=name != "logits")
        assert check.passed, check.message


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_same_tokens(kind: str, padding: str, cache: str) -> None:
    given = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache}
    eager, mine = (
        build(kind, name, torch.float32).generate(**tokens(padding), **given)
        for name in ("eager", "pyfa")
    )
    assert eager.shape == (2, LENGTH + 10)
    assert torch.equal(mine, eager)


def test_no_mask_is_made_where_position_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache is read as far as it is filled, from its first token on."""
    seen: list[tuple[str, int]] = []
    for name in ("attention", "attention_kvcache"):
        function = getattr(integration.api, name)

        def watch(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            bias = options.get("bias")
            seen.append((name, 0 if bias is None else bias.shape[-2]))
            return function(*args, **options)

        monkeypatch.setattr(integration.api, name, watch)
    for padding, cache in itertools.product(("none", "left"), ("dynamic", "static")):
        build("gpt_oss", "pyfa", torch.float32).generate(
            **tokens(padding), max_new_tokens=3, do_sample=False, cache_implementation=cache
        )
    # With a static cache transformers forbids skipping the window's mask of a single query.
    assert set(seen) == {("attention", 0), ("attention", 1), ("attention_kvcache", 0)}
    seen.clear()
    build("llama", "pyfa", torch.float32)(**tokens("right"))
    assert set(seen) == {("attention", 0)}


def test_padding_in_the_middle_and_a_mask_of_ones_own() -> None:
    eager, mine = (build("gpt_oss", name, torch.float32) for name in ("eager", "pyfa"))
    inputs = tokens("none")
    holes = torch.ones(2, LENGTH, dtype=torch.long)
    holes[0, 3] = holes[1, 6:8] = 0
    real = holes.bool()
    want, have = (model(**inputs, attention_mask=holes).logits for model in (eager, mine))
    torch.testing.assert_close(have[real], want[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want[real], eager(**inputs).logits[real], rtol=1e-2)
    own = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    own[:, :, 7:, 2] = False
    added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    want = eager(**inputs, attention_mask=added).logits
    for mask in (own, added):
        torch.testing.assert_close(mine(**inputs, attention_mask=mask).logits, want,
                                   rtol=1e-4, atol=1e-4)  # fmt: skip


# GPT-OSS of transformers does not tell its masks of packed positions.
@pytest.mark.parametrize(("kind", "by"), [("llama", "positions"), ("llama", "offsets"),
                                          ("gpt_oss", "offsets")])  # fmt: skip
def test_packed_sequences_do_not_see_each_other(kind: str, by: str) -> None:
    """By their positions alone, and by offsets, as data collators give them."""
    model = build(kind, "pyfa", torch.float32)
    ids = tokens("none")["input_ids"][:1]
    apart = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    offsets = torch.tensor([0, 5, LENGTH])
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7,
               "max_length_k": torch.tensor(7)}  # fmt: skip
    extra = lengths if by == "offsets" else {}
    packed = model(ids, position_ids=positions, use_cache=False, **extra).logits
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)


def test_softcap_and_dropout_reach_pyfa(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(2, 4, 6, 16), *torch.randn(2, 2, 2, 6, 16)
    out, _ = integration.attention(module, q, k, v, None, scaling=0.2, softcap=3.0)
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    want = integration.api.attention(*heads_last, causal=True, scale=0.2, softcap=3.0)
    assert torch.equal(out, want)
    torch.manual_seed(3)
    out, _ = integration.attention(module, q, k, v, None, dropout=0.5, is_causal=False)
    torch.manual_seed(3)
    assert torch.equal(out, integration.api.attention(*heads_last, dropout_p=0.5))
    assert not torch.equal(out, integration.api.attention(*heads_last))


@pytest.mark.parametrize("mask", ["none", "first keys", "boolean", "added"])
def test_a_position_bias_is_added(mask: str) -> None:
    module = torch.nn.Module()
    module.is_causal = mask in ("none", "first keys")
    q, k, v = torch.randn(3, 2, 4, 6, 16)
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    if mask != "none":
        visible[1, ..., :2] = False
    given = {
        "none": None,
        "first keys": torch.tensor([[0, 6], [2, 6]], dtype=torch.int32)[:, None, None],
        "boolean": visible,
        "added": torch.zeros(visible.shape).masked_fill(~visible, -torch.inf),
    }[mask]
    out, _ = integration.attention(module, q, k, v, given, position_bias=bias)
    score = (q @ k.mT / 4.0 + bias).masked_fill(~visible, -torch.inf)
    want = (score.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    torch.testing.assert_close(out, want)
    # The rows that see nothing are NaN in PyTorch's softmax.
    (dbias,) = torch.autograd.grad(out.square().sum(), bias)
    assert bool(dbias.isfinite().all())
    assert bool(dbias.any())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["position_bias", "dropout"])
def test_rows_of_a_cache_that_are_not_filled(name: str, rows: int, window: int | None) -> None:
    """Without gradients a bias must hide them, where ``attention_kvcache`` has no such option."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, rows, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    filled = torch.tensor([[False, True] + [True] * 8, [True] * 10])
    module = torch.nn.Identity()
    with torch.no_grad():
        mask = integration.make_mask(2, rows, 10, 4, attention_mask=filled)
        assert mask is not None
        assert mask[:, 0, 0].tolist() == [[1, 4 + rows], [0, 4 + rows]]
        # So few probabilities are dropped that none is.
        more = {"dropout": 1e-12} if name == "dropout" else {name: torch.zeros(1, 4, rows, 10)}
        attend = functools.partial(
            integration.attention, module, q, attention_mask=mask, sliding_window=window
        )
        expected, _ = attend(k, v)
        out, _ = attend(k, v, **more)
    torch.testing.assert_close(out, expected)


def test_a_paged_cache_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="cache: continuous batching"):
        integration.attention(torch.nn.Module(), q, q, q, None, cache=object())


SLIDING = SimpleNamespace(sliding_window=4)
CHUNKED = SimpleNamespace(attention_chunk_size=4, sliding_window=4)
# What the mask is made for: (queries, keys, position of the first query, of the first key).
WHERE = {
    "prompt": (7, 7, 0, 0),
    "decode": (1, 9, 8, 0),
    "more of the prompt": (3, 9, 6, 0),
    "sliding cache": (1, 4, 9, 6),
    "static, empty": (7, 12, 0, 0),
    "static, tensor": (7, 12, torch.tensor(0), 0),
    "static, decode": (1, 12, torch.tensor(8), 0),
    "static, more": (3, 12, torch.tensor(5), 0),
}
KINDS = {
    "causal": (causal_mask_function, {}),
    "sliding": (sliding_window_causal_mask_function(4), {"local_size": 4, "config": SLIDING}),
    "bidirectional": (bidirectional_mask_function, {}),
    "both sides": (
        sliding_window_bidirectional_mask_function(4),
        {"local_size": 4, "config": SLIDING, "allow_is_causal_skip": False},
    ),
    "chunked": (
        chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        {"local_size": 4, "config": CHUNKED},
    ),
    "custom": (and_masks(causal_mask_function, lambda b, h, q, k: k != 1), {}),
}
PADDINGS = {
    "none": [[], []],
    "left": [[], [0, 1, 2]],
    "right": [[], [5, 6]],
    "hole": [[3], []],
    "both": [[0], [6]],
}


def visible(mask: torch.Tensor | None, kind: str, window: int | None, where: Any) -> torch.Tensor:
    """(2, queries, keys): what ``attention`` makes of ``mask`` and of the layer's window."""
    rows, keys, _, _ = where
    if mask is not None and mask.dtype == torch.bool:
        return mask.expand(2, 1, rows, keys)[:, 0]
    first, end = torch.zeros(2), torch.full((2,), keys)
    if mask is not None:
        first, end = mask[:, 0, 0].unbind(-1)
    key = torch.arange(keys)
    last = (torch.arange(rows) + end[:, None] - rows)[..., None]
    seen = (key >= first[:, None, None]) & (key < end[:, None, None])
    seen = seen.expand(2, rows, keys)
    if kind != "bidirectional":
        seen = seen & (key <= last)
    return seen if window is None else seen & (key > last - window)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
def test_masks_mean_what_sdpas_do(where: str, kind: str, padding: str, grad: bool) -> None:
    rows, keys, q_offset, kv_offset = WHERE[where]
    function, said = KINDS[kind]
    window = 4 if kind == "sliding" else None
    begin = int(q_offset)
    mask = None
    if padding != "none":
        mask = torch.ones(2, begin + rows, dtype=torch.bool)
        for b, hidden in enumerate(PADDINGS[padding]):
            mask[b, [x for x in hidden if x < begin + rows]] = False
    arguments = {
        "batch_size": 2, "q_length": rows, "kv_length": keys, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function, "attention_mask": mask,
    }  # fmt: skip
    want = sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    with torch.set_grad_enabled(grad):
        made = integration.make_mask(**arguments, **said)
        forced = integration.make_mask(**(arguments | said | {"allow_is_causal_skip": False}))
    if kind != "bidirectional" and not (rows == 1 and isinstance(q_offset, torch.Tensor)):
        assert torch.equal(forced[:, 0], want)
    queries = torch.ones(2, rows, dtype=torch.bool)
    if mask is not None:
        queries = mask[:, begin:]
    have = visible(made, kind, window, WHERE[where])
    if kind == "bidirectional" and begin + rows - kv_offset != keys:
        # Nothing says here which keys of a cache are filled.
        assert torch.equal(have, want)
    assert torch.equal(have[queries], want[queries])
    if grad and made is not None and made.dtype == torch.int32:
        assert begin + rows - kv_offset == keys
    if kind in ("both sides", "chunked", "custom"):
        assert made.dtype == torch.bool
    elif padding in ("none", "left") and kind != "bidirectional" and not grad:
        assert made is None or made.dtype == torch.int32


@pytest.mark.parametrize(
    ("kind", "padding"), [("llama", "none"), ("llama", "left"), ("gpt_oss", "none")]
)
def test_compile_fullgraph(kind: str, padding: str) -> None:
    torch.compiler.reset()
    model = build(kind, "pyfa", torch.float32, experts=None)  # eager ones loop over what was hit
    inputs = tokens(padding)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # The gradient of transformers' experts does not compile on a CPU before 5.23.
    run = evaluate if kind == "llama" else lambda model, inputs: {"logits": model(**inputs).logits}
    with torch.set_grad_enabled(kind == "llama"):
        want, have = run(model, inputs), run(compiled, inputs)
    assert set(have) == set(want)
    for name, x in want.items():
        torch.testing.assert_close(have[name], x)
