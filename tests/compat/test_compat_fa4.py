"""flash-attention 4's functions on the CPU: signatures, layouts, values, refusals."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import pyfa
from pyfa.compat import fa4

SIGNATURES = {
    "flash_attn_func": (
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
        "block_sparse_tensors_bwd=None, return_lse=False"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
        "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False"
    ),
    "flash_attn_combine": (
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
        "virtual_batch_idx=None, return_lse=True"
    ),
    "get_scheduler_metadata": (
        "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
        "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, "
        "seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, "
        "seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None"
    ),
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
# What a caller writes, and what pyfa's own function is given for it.
OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 2)}, {"window": (3, 2)}),
    ({"window_size": (None, 1)}, {"window": (None, 1)}),
    ({"window_size": (3, 5), "causal": True}, {"window": (3, 0), "causal": True}),
    # As theirs: a window that is empty as given is none at all.
    ({"window_size": (-1, -1)}, {}),
    ({"window_size": (-1, -1), "causal": True}, {"causal": True}),
    ({"window_size": (-1, 5), "causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"softcap": None, "num_splits": 3, "pack_gqa": True, "deterministic": True}, {}),
    ({"learnable_sink": SINKS}, {"sinks": SINKS}),
    ({"learnable_sink": SINKS.bfloat16(), "causal": True}, {"sinks": SINKS, "causal": True}),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_it_has_every_function() -> None:
    assert sorted(SIGNATURES) == sorted(set(fa4.__all__) - {"ArgumentError"})


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa4, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(str(p) for p in plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in plain)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_dense_is_pyfas(theirs: dict, ours: dict, return_lse: bool) -> None:
    q, k, v = (torch.randn(2, 9, h, 16, requires_grad=True) for h in (4, 2, 2))
    want = pyfa.attention(q, k, v, return_lse=return_lse, **ours)
    want, want_lse = want if return_lse else (want, None)
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=return_lse, **theirs)
    assert torch.equal(out, want)
    assert lse is want_lse is None or torch.equal(lse, want_lse)
    dout = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("packed_k", [False, True])
@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_varlen_in_every_layout(theirs: dict, ours: dict, packed_q: bool, packed_k: bool) -> None:
    """Padded or packed, against one sequence after the other."""
    used_q, used_k = [4, 0, 9], [11, 5, 3]
    q, k, v = torch.randn(3, 9, 4, 16), *torch.randn(2, 3, 11, 2, 16)
    given = {"seqused_q": ints(*used_q), "seqused_k": ints(*used_k)}
    args = [q, k, v]
    if packed_q:
        args[0] = torch.cat([x[:n] for x, n in zip(q, used_q, strict=True)])
        given["cu_seqlens_q"] = ints(0, 4, 4, 13)
        del given["seqused_q"]
    if packed_k:
        args[1:] = (torch.cat([x[:n] for x, n in zip(y, used_k, strict=True)]) for y in (k, v))
        given["cu_seqlens_k"] = ints(0, 11, 16, 19)
        del given["seqused_k"]
    out, lse = fa4.flash_attn_varlen_func(*args, return_lse=True, **given, **theirs)
    assert out.shape == args[0].shape
    assert lse.shape == ((4, 13) if packed_q else (3, 4, 9))
    for b, (rows, keys) in enumerate(zip(used_q, used_k, strict=True)):
        want, want_lse = pyfa.attention(
            q[b : b + 1, :rows], k[b : b + 1, :keys], v[b : b + 1, :keys], return_lse=True, **ours
        )
        start = sum(used_q[:b])
        have = out[start : start + rows] if packed_q else out[b, :rows]
        have_lse = lse[:, start : start + rows] if packed_q else lse[b, :, :rows]
        torch.testing.assert_close(have, want[0])
        torch.testing.assert_close(have_lse, want_lse[0])
        if not packed_q:
            assert not bool(out[b, rows:].any())
            assert bool((lse[b, :, rows:] == -math.inf).all())


def test_varlen_has_gradients_in_the_layout_given() -> None:
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, requires_grad=True)
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, seqused_k=ints(6, 6), learnable_sink=sink, return_lse=True
    )
    want, want_lse = pyfa.attention(q, k, v, sinks=sink, return_lse=True)
    inputs = (q, k, v, sink)
    have = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
    torch.testing.assert_close(
        have, torch.autograd.grad(want.square().sum() + want_lse.sum(), inputs)
    )


@pytest.mark.parametrize("padded_q", [False, True])
def test_pages(padded_q: bool) -> None:
    pages = torch.randn(2, 6, 4, 2, 16)
    table = ints(5, 0, 3, 1).view(2, 2)
    q = torch.randn(2, 3, 4, 16)
    for used in (ints(7, 2), None):
        want = pyfa.attention_kvcache(q, *pages, cache_seqlens=used, page_table=table, causal=True)
        given = {"page_table": table, "seqused_k": used, "causal": True}
        if padded_q:
            out, _ = fa4.flash_attn_varlen_func(q, *pages, **given)
        else:
            out, _ = fa4.flash_attn_varlen_func(
                q.flatten(0, 1), *pages, cu_seqlens_q=ints(0, 3, 6), **given
            )
            out = out.unflatten(0, (2, 3))
        torch.testing.assert_close(out, want)


def test_parts_combine_padded_and_packed() -> None:
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    weights = lses.softmax(0)[..., None]
    out, lse = fa4.flash_attn_combine(outs, lses, out_dtype=torch.float16)
    torch.testing.assert_close(out.float(), (weights * outs).sum(0), rtol=2**-10, atol=1e-6)
    torch.testing.assert_close(lse, lses.logsumexp(0))
    packed, nothing = fa4.flash_attn_combine(
        outs.flatten(1, 2), lses.flatten(1, 2), out_dtype=torch.float16, return_lse=False
    )
    assert torch.equal(packed, out.flatten(0, 1))
    assert nothing is None


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
@pytest.mark.parametrize(
    "argument",
    [
        "gather_kv_indices",
    ],
)  # fmt: skip
def test_what_is_refused_says_why(name: str, argument: str) -> None:
    if argument not in SIGNATURES[name]:
        pytest.skip("not an argument of this function")
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=rf"^{argument}: .*not implemented"):
        getattr(fa4, name)(q, q, q, **{argument: [q]})


@pytest.mark.parametrize("window", [(-1, None), (5, -1), (None, -2), (-2, 6), (None, -1)])
def test_a_negative_edge_is_a_number(window: tuple[int | None, int | None]) -> None:
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 12, 2, 8)
    found, lse = fa4.flash_attn_func(q, k, k, window_size=window, return_lse=True)
    distance = torch.arange(12) - torch.arange(9)[:, None] - 3
    left, right = (99 if edge is None else edge for edge in window)
    seen = (distance >= -left) & (distance <= right)
    want, want_lse = pyfa.attention(q, k, k, bias=seen, return_lse=True)
    assert torch.allclose(found, want, atol=1e-6)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


def test_a_window_that_is_empty_as_given_is_none() -> None:
    q = torch.randn(1, 9, 2, 8)
    found, _ = fa4.flash_attn_func(q, q, q, window_size=(3, -4))
    assert torch.allclose(found, pyfa.attention(q, q, q), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax_scale": math.nan}, "softmax_scale: expected a finite number"),
        ({"window_size": (1, 2, 3)}, "window_size: expected"),
        ({"learnable_sink": torch.zeros(3)}, "learnable_sink: expected shape"),
        ({"cu_seqlens_k": ints(0, 4), "page_table": ints(0)[None]}, "cu_seqlens_k: expected None"),
        ({"q": torch.randn(4, 2, 8)}, "q: expected .* without cu_seqlens_q"),
        ({"k": torch.randn(4, 2, 8)}, "k: expected .* without cu_seqlens_k"),
    ],
)
def test_wrong_arguments_are_named_as_theirs(change: dict, message: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    for kind in (RuntimeError, fa4.ArgumentError):
        with pytest.raises(kind, match=message):
            fa4.flash_attn_varlen_func(**({"q": q, "k": q, "v": q} | change))


def test_wrong_types_are_named() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"^num_splits: expected an int; got NoneType"):
        fa4.flash_attn_func(q, q, q, num_splits=None)
    message = r"^block_sparse_tensors.mask_block_cnt: expected a tensor; got NoneType"
    with pytest.raises(TypeError, match=message):
        fa4.flash_attn_func(q, q, q, block_sparse_tensors=0)


def test_the_schedulers_metadata_is_taken() -> None:
    q = torch.randn(1, 4, 2, 8)
    metadata = fa4.get_scheduler_metadata(4, 4, 2, 2, 8, 1, seqused_k=ints(4))
    out, _ = fa4.flash_attn_varlen_func(q, q, q, seqused_k=ints(4), scheduler_metadata=metadata)
    torch.testing.assert_close(out, pyfa.attention(q, q, q))
