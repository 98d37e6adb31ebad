"""PyTorch's flash-attention operators on pyfa: registration, and their functions on the CPU.

What the operators do inside PyTorch is in tests/gpu/test_gpu_integrations.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as registry

import pyfa
from pyfa.integrations import torch_sdpa

pytestmark = pytest.mark.skipif(
    not hasattr(registry, "restore_flash_attention_impl"), reason="no registry in this PyTorch"
)
OPERATORS = {
    name: function
    for name, function in torch_sdpa._OPERATORS.items()
    if hasattr(torch.ops.aten, name) and "inplace" not in name
}


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """The operators themselves, for CPU tensors, for which PyTorch gives them no kernel."""
    handle = torch_sdpa._override("CPU")
    yield
    handle.remove()


def overridden() -> set[str]:
    # On the CPU's build of PyTorch nobody else has a kernel for this key.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in OPERATORS if has(f"aten::{name}", "CUDA")}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch has kernels of its own here")
def test_it_is_opt_in_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # it warns where this is not so
    before = overridden()
    assert before == set()
    torch_sdpa.register()
    assert torch_sdpa.NAME in registry.list_flash_attention_impls()
    assert overridden() == before
    for _ in range(2):
        torch_sdpa.activate()
        assert registry.current_flash_attention_impl() == torch_sdpa.NAME
        assert overridden() == set(OPERATORS)
        # Once more, as a program may that does not know.
        torch_sdpa.activate()
        torch_sdpa.restore()
        assert registry.current_flash_attention_impl() is None
        assert overridden() == before


def test_without_a_gpu_it_says_that_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, warned in ((False, 1), (True, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch_sdpa.activate()
        torch_sdpa.restore()
        assert len([each for each in seen if "finds no GPU" in str(each.message)]) == warned


def test_another_implementation_is_not_restored_away() -> None:
    class Handle:
        removed = False

        def remove(self) -> None:
            self.removed = True

    handle = Handle()
    registry.register_flash_attention_impl("ANOTHER", register_fn=lambda: handle)
    registry.activate_flash_attention_impl("ANOTHER")
    torch_sdpa.restore()
    assert registry.current_flash_attention_impl() == "ANOTHER"
    assert not handle.removed
    registry.restore_flash_attention_impl()


def test_without_a_registry_it_says_what_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registry, "restore_flash_attention_impl")
    for function in (torch_sdpa.register, torch_sdpa.activate, torch_sdpa.restore):
        with pytest.raises(RuntimeError, match=r"it needs 2\.11 or newer"):
            function()


@pytest.mark.parametrize("name", OPERATORS)
def test_arguments_are_the_operators(name: str) -> None:
    """By name, by position or keyword, and with its defaults."""
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = inspect.signature(OPERATORS[name]).parameters
    for argument in schema.arguments:
        mine = parameters[argument.name]
        assert (mine.kind is mine.KEYWORD_ONLY) == argument.kwarg_only
        if argument.has_default_value():
            assert mine.default == argument.default_value
    position = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert position == [x.name for x in schema.arguments if not x.kwarg_only]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_pytorchs(causal: bool, heads_last: bool) -> None:
    """Output, LSE, gradients, and the strides that PyTorch's fakes promise."""
    q, k, v, dout = (torch.randn(2, 4, 9, 16) for _ in range(4))
    if heads_last:
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    out, lse, cu_q, cu_k, max_q, max_k, state, unused, mask = torch_sdpa.sdpa_forward(
        q, k, v, 0.0, causal, scale=0.3
    )
    assert (cu_q, cu_k, max_q, max_k) == (None, None, 9, 9)
    assert mask.numel() == 0
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, want)
    score = (q @ k.mT * 0.3).masked_fill(~torch.ones(9, 9).tril().bool() & causal, -torch.inf)
    torch.testing.assert_close(lse, score.logsumexp(-1))
    grads = torch_sdpa.sdpa_backward(
        dout, q, k, v, out, lse, None, None, 9, 9, 0.0, causal, state, unused, scale=0.3
    )
    torch.testing.assert_close(grads, torch.autograd.grad(want, inputs, dout))
    for x, like in zip((out, *grads), (q, q, k, v), strict=True):
        assert x.stride() == torch.empty_like(like).stride()
    with torch.device("meta"):
        fakes = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in inputs))
    real = (out, lse, cu_q, cu_k, max_q, max_k, state, unused, mask)
    for x, fake in zip(real, fakes, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.dtype) == (fake.shape, fake.dtype)


def call(**given: Any) -> dict[str, Any]:
    """A packed call's arguments."""
    torch.manual_seed(4)
    q, k, v = torch.randn(14, 4, 16), *torch.randn(2, 12, 2, 16)
    shared = {"query": q, "key": k, "value": v, "cum_seq_q": ints(0, 5, 5, 14),
              "cum_seq_k": ints(0, 3, 4, 12), "max_q": 9, "max_k": 8, "dropout_p": 0.0,
              "is_causal": False}  # fmt: skip
    return shared | given


OPTIONS = [
    ({}, {}),
    ({"is_causal": True}, {"causal": True}),
    ({"window_size_left": 3, "window_size_right": 0}, {"window": (3, 0)}),
    ({"window_size_left": 2, "window_size_right": -1}, {"window": (2, -1)}),
    ({"scale": 0.2}, {"scale": 0.2}),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_packed_is_pyfas(theirs: dict, ours: dict, grad: bool) -> None:
    given = call(**theirs)
    inputs = [given[name].clone().requires_grad_() for name in ("query", "key", "value")]
    where = [given[name] for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k")]
    want, want_lse = pyfa.attention_varlen(*inputs, *where, return_lse=True, **ours)
    if grad:
        given |= dict(zip(("query", "key", "value"), inputs, strict=True))
    # An operator's kernel runs below autograd, and its inputs still say that they need a gradient.
    with torch._C._AutoDispatchBelowAutograd():
        out, lse, state, unused, _ = torch_sdpa.flash_forward(**given, return_debug_mask=False)
    assert not out.requires_grad
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    dout = torch.randn_like(out)
    with torch.no_grad():
        grads = torch_sdpa.flash_backward(
            dout, out=out, logsumexp=lse, rng_state=state, unused=unused, **given
        )
    torch.testing.assert_close(grads, torch.autograd.grad(want, inputs, dout))


def test_pages_lengths_and_slopes() -> None:
    pages = torch.randn(2, 6, 4, 2, 16)
    table, used, slopes = ints(5, 0, 3, 1).view(2, 2), ints(7, 2), torch.rand(4)
    q, starts = torch.randn(5, 4, 16), ints(0, 3, 5)
    out, lse, *_ = torch_sdpa.flash_forward(
        q, *pages, starts, None, 3, 8, 0.0, True, False, seqused_k=used, alibi_slopes=slopes,
        block_table=table, num_splits=2,
    )  # fmt: skip
    want, want_lse = pyfa.attention_varlen(
        q, *pages, starts, None, 3, 8, seqused_k=used, page_table=table, causal=True,
        alibi_slopes=slopes, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    given = torch.empty_like(out)
    again = torch_sdpa.flash_forward_inplace(
        given, q, *pages, starts, None, 3, 8, 0.0, True, False, seqused_k=used,
        alibi_slopes=slopes, block_table=table,
    )  # fmt: skip
    assert torch.equal(given, out)
    assert torch.equal(again, lse)


@pytest.mark.parametrize("name", ["seqused_k", "alibi_slopes"])
def test_what_backward_would_not_know_is_refused(name: str) -> None:
    given = call(**{name: {"seqused_k": ints(1, 1, 1), "alibi_slopes": torch.ones(4)}[name]})
    torch_sdpa.flash_forward(**given, return_debug_mask=False)
    given["key"] = given["key"].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: PyTorch does not pass it"):
        torch_sdpa.flash_forward(**given, return_debug_mask=False)


def test_dropout_hands_its_seed_to_backward() -> None:
    q, k, v, dout = (torch.randn(2, 9, 4, 16) for _ in range(4))
    shared = (None, None, 9, 9, 0.4, True)
    out, lse, state, unused, mask = torch_sdpa.flash_forward(q, k, v, *shared, True)
    assert state.dtype == torch.uint64
    seed = state.view(torch.int64)[0].clone()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = pyfa.attention(*inputs, causal=True, dropout_p=0.4, seed=seed)
    torch.testing.assert_close(out, want)
    grads = torch_sdpa.flash_backward(dout, q, k, v, out, lse, *shared, state, unused)
    torch.testing.assert_close(grads, torch.autograd.grad(want, inputs, dout))
    # The debug mask is that of these very draws.
    assert mask.shape == (2, 4, 128, 128)
    matrix = mask[:, :, :9, :9]
    whole = matrix.abs() / matrix.abs().sum(-1, keepdim=True)
    kept = torch.where(torch.signbit(matrix), 0.0, whole) / 0.6
    made = torch.einsum("bhqk,bkhd->bqhd", kept, v)
    torch.testing.assert_close(made, out)
    again, _, other, *_ = torch_sdpa.flash_forward(q, k, v, *shared, False)
    assert not torch.equal(other, state)
    assert not torch.equal(again, out)


def test_who_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context and the environment are heard; on a GPU never the torch backend."""
    q = torch.randn(1, 4, 2, 8)
    assert torch_sdpa._candidates(q) == ("torch",)
    with pyfa.use_backend("triton", "torch"):
        assert torch_sdpa._candidates(q) == ("triton", "torch")
    monkeypatch.setenv("PYFA_BACKEND", "hip,torch")
    assert torch_sdpa._candidates(q) == ("hip", "torch")

    class OnGpu:
        is_cuda = True
        device = torch.device("cpu")

    assert torch_sdpa._candidates(OnGpu()) == ("hip",)
    with pyfa.use_backend("torch"), pytest.raises(ValueError, match="cannot stand in"):
        torch_sdpa._candidates(OnGpu())


def through_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_pytorchs_autograd_runs_it(on_the_cpu: None, dropout_p: float, heads_last: bool) -> None:
    """Forward, saved state and backward through the dispatcher, and again for a second backward."""
    inputs = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]
    given = [x.transpose(1, 2) for x in inputs]
    q, k, v = given if heads_last else inputs
    torch.manual_seed(6)
    out = through_operator(q, k, v, dropout_p=dropout_p, is_causal=True)
    torch.manual_seed(6)
    ours = given if not heads_last else inputs
    want = pyfa.attention(*ours, dropout_p=dropout_p, causal=True).transpose(1, 2)
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    have = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.testing.assert_close(have, torch.autograd.grad(want, inputs, dout))
    for x, y in zip(have, torch.autograd.grad(out, inputs, dout), strict=True):
        assert torch.equal(x, y)


def test_pytorchs_autograd_runs_packed_ones(on_the_cpu: None) -> None:
    given = call()
    inputs = [given[name].requires_grad_() for name in ("query", "key", "value")]
    packed = [given[name] for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k")]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, *packed, 0.0, True, False, window_size_left=3
    )
    want, want_lse = pyfa.attention_varlen(
        *inputs, *packed, causal=True, window=(3, 0), return_lse=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    dout = torch.randn_like(out)
    have = torch.autograd.grad(out, inputs, dout)
    torch.testing.assert_close(have, torch.autograd.grad(want, inputs, dout))


def test_pytorchs_compiler_traces_it(on_the_cpu: None) -> None:
    torch.compiler.reset()
    inputs = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return through_operator(q * 2.0, k, v, is_causal=True).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    have = torch.autograd.grad(compiled(*inputs), inputs)
    torch.testing.assert_close(have, torch.autograd.grad(step(*inputs), inputs))
