"""flash-attention 3's functions on the CPU: signatures, values against pyfa's API, refusals."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import pyfa
from pyfa.compat import fa3

DESCALE = "q_descale=None, k_descale=None, v_descale=None"
WINDOW = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TAIL = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALE}, {WINDOW}, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALE}, {WINDOW}, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        f"seqused_k=None, {TAIL}"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{DESCALE}, softmax_scale=None, causal=False, {WINDOW}, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0"
    ),
}
# What a caller writes, and what pyfa's own function is given for it.
OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 2)}, {"window": (3, 2)}),
    ({"window_size": torch.tensor([4, 0]), "causal": True}, {"window": (4, 0), "causal": True}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "deterministic": True}, {}),
    ({"k_descale": torch.full((2, 2), 3.0)}, {}),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_it_has_every_function() -> None:
    assert sorted(SIGNATURES) == sorted(set(fa3.__all__) - {"ArgumentError"})


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(str(p) for p in plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in plain)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_dense_functions_are_pyfas(theirs: dict, ours: dict) -> None:
    """Packed and unpacked, values and gradients, to the last bit."""
    q, k, v = torch.randn(2, 9, 4, 16), *torch.randn(2, 2, 9, 2, 16)
    packed = torch.cat([q, k, v], 2).requires_grad_()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = pyfa.attention(q, k, v, return_lse=True, **ours)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    same, same_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    for x, y in zip(torch.autograd.grad(same, (q, k, v), dout), grads, strict=True):
        assert torch.equal(x, y)
    rest = {name: x for name, x in theirs.items() if name not in ("num_splits", "pack_gqa")}
    same = fa3.flash_attn_qkvpacked_func(packed, num_heads_q=4, **rest)
    assert isinstance(same, torch.Tensor)
    # Without the LSE another path of the torch backend may run: equal but for rounding.
    torch.testing.assert_close(same, out)
    (dpacked,) = torch.autograd.grad(same, packed, dout)
    torch.testing.assert_close(dpacked, torch.cat(grads, 2))


def test_three_equal_parts_need_no_number_of_heads() -> None:
    qkv = torch.randn(2, 5, 3, 4, 8)
    out = fa3.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, pyfa.attention(*qkv.unbind(2), causal=True))


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_varlen_is_pyfas(theirs: dict, ours: dict) -> None:
    starts, used = ints(0, 5, 5, 14), ints(3, 0, 9)
    q, k, v = (torch.randn(14, 4, 16, requires_grad=True) for _ in range(3))
    out, lse = pyfa.attention_varlen(
        q, k, v, starts, starts, 9, 9, seqused_q=used, seqused_k=ints(5, 0, 2), return_lse=True,
        **ours,
    )  # fmt: skip
    same, same_lse = fa3.flash_attn_varlen_func(
        q, k, v, starts, starts, 9, torch.tensor(9), used, ints(5, 0, 2), return_attn_probs=True,
        **theirs,
    )  # fmt: skip
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    dout = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(same, (q, k, v), dout),
        torch.autograd.grad(out, (q, k, v), dout),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_a_row_that_sees_nothing_has_lse_minus_infinity() -> None:
    q, k, v = torch.randn(1, 5, 4, 16), *torch.randn(2, 1, 3, 2, 16)
    _, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert bool((lse[..., :2] == -math.inf).all())


@pytest.mark.parametrize("leftpad", [None, ints(1, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_kvcache_is_pyfas(leftpad: torch.Tensor | None, packed: bool) -> None:
    q = torch.randn(2, 3, 4, 16, requires_grad=True)
    theirs = torch.randn(2, 2, 20, 2, 16)
    ours = theirs.clone()
    k, v = torch.randn(2, 2, 3, 2, 16)
    angle = torch.rand(20, 4)
    shared = {"causal": True, "cache_seqlens": ints(3, 17), "cache_leftpad": leftpad,
              "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False,
              "num_splits": 2}  # fmt: skip
    want, want_lse = pyfa.attention_kvcache(
        q.detach(), *ours, k=k, v=v, window=(5, -1), scale=0.2, softcap=3.0, return_lse=True,
        **shared,
    )  # fmt: skip
    starts = ints(0, 3, 6)
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        shared |= {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 3}
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        q, *theirs, k, v, window_size=(5, -1), softmax_scale=0.2, softcap=3.0,
        scheduler_metadata=ints(), return_softmax_lse=True, **shared,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    assert not out.requires_grad
    if packed:
        lse = lse.unflatten(1, (2, 3)).transpose(0, 1)
        out = out.unflatten(0, (2, 3))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_packed_each_sequence_with_its_own_number(paged: bool) -> None:
    """Against sequence after sequence, and the cache beyond them untouched."""
    lengths, new, rows = [5, 0, 7], [2, 3, 0], [1, 3, 2]
    starts_new, starts_q = ints(0, 2, 5, 5), ints(0, 1, 4, 6)
    k, v = torch.randn(2, 5, 2, 16)
    q = torch.randn(6, 4, 16)
    angle = torch.rand(12, 8)
    tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    pages = torch.randn(2, 9, 4, 2, 16)
    table = torch.randperm(9).int().view(3, 3)
    gathered = pages[:, table.long()].flatten(2, 3)
    used, index = ints(*lengths), ints(2, 0, 1)
    if paged:
        caches, where = pages, {"page_table": table}
    else:
        caches, where = torch.empty_like(gathered), {"cache_batch_idx": index}
        caches[:, index.long()] = gathered
    # 20 is more than any sequence has: what is packed is bounded by the offsets.
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=used, cu_seqlens_q=starts_q, max_seqlen_q=3,
        cu_seqlens_k_new=starts_new, causal=True, return_softmax_lse=True, **tables, **where,
    )  # fmt: skip
    for b in range(3):
        one = gathered[:, b : b + 1].clone()
        mine, news = slice(*starts_q[b : b + 2].tolist()), slice(*starts_new[b : b + 2].tolist())
        want, want_lse = pyfa.attention_kvcache(
            q[None, mine], *one, k=k[None, news], v=v[None, news], causal=True,
            cache_seqlens=ints(lengths[b]), return_lse=True, **tables,
        )  # fmt: skip
        assert want.shape[1] == rows[b]
        torch.testing.assert_close(out[None, mine], want)
        torch.testing.assert_close(lse[None, :, mine], want_lse)
        have = caches[:, table[b].long()].flatten(1, 2) if paged else caches[:, index[b]]
        torch.testing.assert_close(have, one[:, 0])
        end = lengths[b] + new[b]
        assert torch.equal(have[:, end:], gathered[:, b, end:])


def test_rows_of_the_page_table_by_index_and_lengths_without_rotary() -> None:
    pages, q = torch.randn(2, 6, 4, 2, 16), torch.randn(2, 1, 4, 16)
    table, used = ints(5, 0, 3, 1, 2, 4).view(3, 2), ints(7, 2)
    out = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=used, page_table=table, cache_batch_idx=ints(2, 0),
        rotary_seqlens=used,
    )  # fmt: skip
    want = pyfa.attention_kvcache(q, *pages, cache_seqlens=used, page_table=table[[2, 0]])
    assert torch.equal(out, want)
    given = {"cache_seqlens": used, "page_table": table}
    for index, message in (
        (ints(2, 3), "cache_batch_idx: expected values from 0 to 2; got 3"),
        (ints(-1, 0), "cache_batch_idx: expected values from 0 to 2; got -1"),
        (ints(2, 0).long(), "cache_batch_idx: expected dtype int32"),
    ):
        with pytest.raises(fa3.ArgumentError, match=message):
            fa3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=index, **given)
    with pytest.raises(TypeError, match=r"^cache_batch_idx: expected a tensor; got int"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=1, **given)


def test_wrong_packed_keys_leave_the_cache_as_it_was() -> None:
    caches, k = torch.zeros(2, 2, 4, 2, 8), torch.ones(4, 2, 8)
    q = torch.randn(2, 1, 2, 8)
    for change, message in (
        ({"cache_seqlens": ints(0, 3)}, "cache_seqlens: expected lengths from 0 to 4"),
        ({"cu_seqlens_k_new": ints(0, 2)}, "cu_seqlens_k_new: expected shape"),
        ({"v": torch.ones(3, 2, 8)}, "v: expected shape"),
        ({"v": None}, "v: expected"),
        ({"softcap": -1.0}, "softcap: expected"),
    ):
        given = {"k": k, "v": k, "cache_seqlens": ints(0, 0), "cu_seqlens_k_new": ints(0, 2, 4)}
        with pytest.raises(RuntimeError, match=message):
            fa3.flash_attn_with_kvcache(q, *caches, **(given | change))
        assert not bool(caches.any())
    given = {"k": k, "v": k, "cache_seqlens": ints(0, 0), "cu_seqlens_k_new": ints(0, 2, 4)}
    with pyfa.use_backend("emulator"), pytest.raises(pyfa.UnsupportedProblem, match="float32"):
        fa3.flash_attn_with_kvcache(q, *caches, **given)
    assert not bool(caches.any())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_combine_to_the_whole(dtype: torch.dtype | None) -> None:
    q, k, v = torch.randn(2, 5, 4, 16), *torch.randn(2, 2, 12, 4, 16)
    want, want_lse = pyfa.attention(q, k, v, return_lse=True)
    parts = [
        pyfa.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 3), (3, 10), (10, 12))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    # A part that saw nothing may hold anything.
    outs = torch.cat([outs, torch.full_like(outs[:1], math.nan)])
    lses = torch.cat([lses, torch.full_like(lses[:1], -math.inf)]).transpose(-1, -2)
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=dtype)
    assert out.dtype == (dtype or torch.float32)
    tolerance = {} if dtype is None else {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(out.float(), want, **tolerance)
    torch.testing.assert_close(lse, want_lse.transpose(1, 2))
    given = torch.empty_like(want, dtype=dtype)
    assert fa3.flash_attn_combine(outs, lses, given, dtype)[0] is given
    assert torch.equal(given, out)
    nothing, lse = fa3.flash_attn_combine(outs[3:], lses[3:])
    assert not bool(nothing.any())
    assert bool((lse == -math.inf).all())


def test_combine_names_what_is_wrong() -> None:
    out, lse = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
    for args, message in (
        ((out.half(), lse), "out_partial: expected float32"),
        ((out, lse.transpose(2, 3)), "lse_partial: expected shape"),
        ((out, lse, None, torch.int32), "out_dtype: expected"),
        ((out, lse, out[0], torch.float16), "out: expected shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fa3.flash_attn_combine(*args)
    with pytest.raises(TypeError, match=r"^out: expected a tensor; got int"):
        fa3.flash_attn_combine(out, lse, 1)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "cache"])
@pytest.mark.parametrize("chunk", [3, 0, -1])
def test_chunks_are_pyfas(name: str, chunk: int) -> None:
    q, k, starts = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8), (ints(0, 5), ints(0, 7))
    want = pyfa.attention(q, k, k, causal=True, attention_chunk=max(chunk, 0))
    options = {"causal": True, "attention_chunk": chunk}
    if name == "flash_attn_func":
        found = fa3.flash_attn_func(q, k, k, **options)
    elif name == "cache":
        found = fa3.flash_attn_with_kvcache(q, k, k, **options)
    else:
        found = fa3.flash_attn_varlen_func(q[0], k[0], k[0], *starts, 5, 7, **options)
    assert torch.allclose(found.reshape(want.shape), want, atol=1e-6)
    assert (chunk == 3) != torch.allclose(want, pyfa.attention(q, k, k, causal=True), atol=1e-3)


def test_scheduler_metadata_is_empty() -> None:
    found = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, ints(3, 4))
    assert found.dtype == torch.int32
    assert found.numel() == 0
    found = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, ints(3, 4), attention_chunk=4)
    assert found.numel() == 0


def test_float8_comes_with_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(pyfa.api, "attention", lambda *args, **options: seen.update(options))
    q = torch.zeros(1, 4, 2, 8, dtype=torch.float8_e4m3fn)
    scale = torch.full((1, 2), 3.0)
    fa3.flash_attn_func(q, q, q, k_descale=scale)
    assert seen["out_dtype"] == torch.bfloat16
    assert [x.tolist() for x in seen["descale"]] == [[[1.0, 1.0]], [[3.0, 3.0]], [[1.0, 1.0]]]
    fa3.flash_attn_func(q.half(), q, q, v_descale=scale, k_descale=scale)
    assert seen["descale"][0] is None
    assert seen["descale"][1] is scale


def test_float8_is_scaled_by_sequence_and_key_head() -> None:
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    x = pyfa.quantize(q, k, v)
    of_q, of_k, of_v = x.descale
    out = fa3.flash_attn_func(x.q, x.k, x.v, q_descale=of_q, k_descale=of_k, v_descale=of_v)
    assert out.dtype == torch.bfloat16
    wanted = pyfa.attention(q, k, v)
    assert (out - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert torch.equal(out, pyfa.attention(x.q, x.k, x.v, descale=x.descale))
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    cached = fa3.flash_attn_with_kvcache(
        x.q[:, :1], x.k, x.v, cache_seqlens=lengths, q_descale=of_q, k_descale=of_k,
        v_descale=of_v,
    )  # fmt: skip
    assert torch.equal(cached[:1], out[:1, :1])


def test_float8_says_in_backward_that_it_has_no_gradient() -> None:
    leaves = [torch.randn(2, 9, 2, 16).to(torch.float8_e4m3fn).requires_grad_() for _ in range(3)]
    q, k, v = (x.detach() for x in leaves)
    out, lse = fa3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True))
    offsets = ints(0, 9, 18)
    packed = [x.flatten(0, 1) for x in leaves]
    of_packed = fa3.flash_attn_varlen_func(*packed, offsets, offsets, 9, 9, causal=True)
    assert torch.equal(of_packed, out.flatten(0, 1))
    for x in (out, lse, of_packed):
        with pytest.raises(NotImplementedError, match="float8 attention has no gradient"):
            x.float().sum().backward()
    with torch.no_grad():
        assert not fa3.flash_attn_func(*leaves).requires_grad
    out = fa3.flash_attn_func(*leaves)
    out += 1.0
    scale = torch.ones(2, 2, requires_grad=True)
    scaled = fa3.flash_attn_func(q, k, v, k_descale=scale)
    with pytest.raises(NotImplementedError, match="float8 attention has no gradient"):
        scaled.float().sum().backward()


@pytest.mark.parametrize(
    ("of_cache", "of_k", "of_v", "name"),
    [
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e4m3fn, "k"),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.uint8, "v"),
        (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16, "k"),
        (torch.float16, torch.float16, torch.float32, "v"),
    ],
    ids=str,
)
def test_packed_new_keys_are_of_the_caches_dtype(
    of_cache: torch.dtype, of_k: torch.dtype, of_v: torch.dtype, name: str
) -> None:
    caches = [torch.zeros(2, 8, 2, 16).to(of_cache) for _ in range(2)]
    k, v = (torch.ones(4, 2, 16).to(dtype) for dtype in (of_k, of_v))
    q = torch.zeros(2, 1, 4, 16).to(of_cache)
    given = {"cache_seqlens": ints(0, 3), "cu_seqlens_k_new": ints(0, 2, 4)}
    with pytest.raises(fa3.ArgumentError, match=rf"^{name}: expected the cache's dtype"):
        fa3.flash_attn_with_kvcache(q, *caches, k, v, **given)
    assert not any(x.float().any() for x in caches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax_scale": math.nan}, "softmax_scale: expected a finite number"),
        ({"window_size": (1, 2, 3)}, "window_size: expected"),
        ({"v": torch.randn(1, 4, 3, 8)}, "v: expected k's shape"),
    ],
)
def test_wrong_arguments_are_named_as_theirs(change: dict, message: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    for kind in (RuntimeError, fa3.ArgumentError):
        with pytest.raises(kind, match=message):
            fa3.flash_attn_func(**({"q": q, "k": q, "v": q} | change))
    for name in ("num_splits", "attention_chunk"):
        with pytest.raises(TypeError, match=f"^{name}: expected an int; got NoneType"):
            fa3.flash_attn_func(q, q, q, **{name: None})
    with pytest.raises(RuntimeError, match=r"qkv: expected shape .* for num_heads_q=3"):
        fa3.flash_attn_qkvpacked_func(torch.randn(1, 4, 8, 8), num_heads_q=3)
