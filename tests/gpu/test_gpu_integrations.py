"""PyTorch's own attention, and transformers' models, on pyfa's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as registry
from held import attention_failures
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyfa
from pyfa import dispatch
from pyfa.bench.timing import captured
from pyfa.integrations import torch_sdpa

HALF = {"device": "cuda", "dtype": torch.bfloat16}
CAUSAL_AND_NOT = pytest.mark.parametrize("causal", [False, True])

# What pyfa chooses for itself on a GPU, without the torch backend.
KERNELS = ("hip", "cuda", "triton")


@pytest.fixture
def runs() -> list[str]:
    return []


@pytest.fixture
def active(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's flash attention is pyfa's, and ``runs`` has who ran it."""
    if not hasattr(registry, "restore_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of implementations")
    prepare = dispatch.prepare

    def recorded(*args: Any) -> dispatch.Prepared:
        prepared = prepare(*args)
        runs.append(prepared.backend.NAME)
        return prepared

    monkeypatch.setattr(dispatch, "prepare", recorded)
    torch_sdpa.activate()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch_sdpa.restore()


def inputs(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, **HALF).requires_grad_() for _ in range(3)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    return pyfa.attention(*heads_last, backend=KERNELS, **options).transpose(1, 2)


def equal(out: torch.Tensor, want: torch.Tensor, given: list[torch.Tensor]) -> None:
    """Outputs and gradients, to the last bit but for dQ, whose sum may have another order."""
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    have = torch.autograd.grad(out, given, dout)
    for x, y in zip(have, torch.autograd.grad(want, given, dout), strict=True):
        torch.testing.assert_close(x, y)


@CAUSAL_AND_NOT
@pytest.mark.parametrize("heads_last", [False, True])
def test_scaled_dot_product_attention(
    active: None, runs: list[str], causal: bool, heads_last: bool
) -> None:
    given = inputs(2, 8, 300, 64) if not heads_last else inputs(2, 300, 8, 64)
    q, k, v = (x.transpose(1, 2) if heads_last else x for x in given)
    out = sdpa(q, k, v, is_causal=causal, scale=0.2)
    assert out.stride() == torch.empty_like(q).stride()
    forward = runs.copy()
    want = ours(q, k, v, causal=causal, scale=0.2)
    runs.clear()
    equal(out, want, given)
    assert len(forward) == len(runs) == 1  # runs: PyTorch's backward
    assert {*forward, *runs} <= set(KERNELS)


def test_heads_that_share_and_a_head_dim_that_pytorch_pads(active: None, runs: list[str]) -> None:
    q, (k, v) = torch.randn(1, 8, 200, 60, **HALF), torch.randn(2, 1, 2, 200, 60, **HALF)
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True), ours(q, k, v))
    assert runs


@CAUSAL_AND_NOT
def test_dropout(active: None, causal: bool) -> None:
    given = inputs(2, 4, 257, 64)
    results = []
    for function, option in ((sdpa, "is_causal"), (ours, "causal")):
        torch.manual_seed(5)
        results.append(function(*given, dropout_p=0.3, **{option: causal}))
    equal(*results, given)
    assert not torch.equal(sdpa(*given, dropout_p=0.3, is_causal=causal), results[0])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(active: None, runs: list[str], layout: torch.layout) -> None:
    lengths = (5, 130, 64)
    parts = [[torch.randn(n, 4, 64, **HALF) for n in lengths] for _ in range(3)]
    nested = [torch.nested.nested_tensor(x, layout=layout) for x in parts]
    out = sdpa(*(x.transpose(1, 2) for x in nested)).transpose(1, 2)
    for b, have in enumerate(out.unbind()):
        # A sequence alone has other tiles than in a packed batch, and so other last bits.
        q, k, v = (x[b][None] for x in parts)
        assert attention_failures(q, k, v, {"out": have[None]}, torch.randn_like(q)) == []
    assert runs


@CAUSAL_AND_NOT
def test_varlen_attn(active: None, runs: list[str], causal: bool) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 5, 5, 300], dtype=torch.int32, device="cuda")
    given = inputs(300, 4, 64)
    edges = {"window_size": (-1, 0)} if causal else {}
    if "window_size" not in str(varlen.varlen_attn.__annotations__):
        edges = {"is_causal": causal}
    out = varlen.varlen_attn(*given, offsets, offsets, 295, 295, **edges)
    want = pyfa.attention_varlen(*given, offsets, offsets, 295, 295, causal=causal, backend=KERNELS)
    equal(out, want, given)
    assert runs


def test_compiled(active: None, runs: list[str]) -> None:
    torch.compiler.reset()
    given = inputs(2, 4, 128, 64)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q * 2.0, k, v, is_causal=True) + 1.0

    out = torch.compile(step, fullgraph=True)(*given)
    want = step(*given)
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    have = torch.autograd.grad(out, given, dout)
    torch.testing.assert_close(have, torch.autograd.grad(want, given, dout))
    assert runs


def test_replays_draw_anew(active: None) -> None:
    q, k, v = (x.detach() for x in inputs(1, 2, 128, 64))
    graph, out = captured(lambda: sdpa(q, k, v, dropout_p=0.5))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


def test_pytorch_has_its_own_kernels_back() -> None:
    given = inputs(1, 4, 256, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = sdpa(*given)
        torch_sdpa.activate()
        torch_sdpa.restore()
        assert torch.equal(sdpa(*given), before)
        # And pyfa's torch backend, which calls them, was never in a circle.
        torch_sdpa.activate()
        try:
            q, k, v = (x.transpose(1, 2) for x in given)
            assert bool(pyfa.attention(q, k, v, backend="torch").isfinite().all())
        finally:
            torch_sdpa.restore()


TINY = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 96, "max_position_embeddings": 64,
}  # fmt: skip


def model_of(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    from pyfa.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**TINY, attn_implementation=implementation)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **TINY, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
            rope_scaling=None, attn_implementation=implementation,
            # Their default, grouped, cannot be compiled in float32.
            experts_implementation="batched_mm",
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_transformers_generates_the_same_tokens(kind: str, cache: str) -> None:
    """With a static cache transformers compiles the decoding step and captures it in a graph."""
    ids = torch.randint(2, 96, (2, 12), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    want = model_of(kind, "eager", torch.float32).generate(**given)
    model = model_of(kind, "pyfa", torch.float32)
    assert torch.equal(model.generate(**given, cache_implementation=cache), want)


def gradients(
    kind: str, implementation: str, dtype: torch.dtype, *, compiled: bool = False
) -> list[torch.Tensor]:
    model = model_of(kind, implementation, dtype)
    ids = torch.randint(2, 96, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    run = torch.compile(model, fullgraph=True) if compiled else model
    run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [x.grad.float() for x in model.parameters() if x.grad is not None]


def test_a_compiled_training_step_of_transformers() -> None:
    """The compiled model is as near to float32 as the eager one is, uncompiled."""
    torch.compiler.reset()
    exact = gradients("llama", "eager", torch.float32)
    naive = gradients("llama", "eager", torch.bfloat16)
    found = gradients("llama", "pyfa", torch.bfloat16, compiled=True)
    for truth, x, y in zip(exact, naive, found, strict=True):
        allowed = 2 * float((x - truth).norm()) + 0.01 * float(truth.norm())
        assert float((y - truth).norm()) <= allowed


def test_a_compiled_training_step_with_sinks_and_experts() -> None:
    """In float32: rounded to 16 bits, a token that goes to another expert has other gradients."""
    torch.compiler.reset()
    exact = gradients("gpt_oss", "eager", torch.float32)
    found = gradients("gpt_oss", "pyfa", torch.float32, compiled=True)
    for truth, y in zip(exact, found, strict=True):
        assert float((y - truth).norm()) <= 1e-3 * float(truth.norm())
