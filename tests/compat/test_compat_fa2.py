"""flash-attention 2's functions on the CPU: signatures, values against pyfa's API, errors."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import pyfa
from pyfa import reference, request
from pyfa.compat import fa2
from pyfa.conformance.tolerances import judge

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
# What a caller writes, and what pyfa's own function is given for it.
OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 2)}, {"window": (3, 2)}),
    ({"window_size": torch.tensor([4, 0]), "causal": True}, {"window": (4, 0), "causal": True}),
    ({"window_size": (-2, 1)}, {"window": (-1, 1)}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    ({"deterministic": True}, {"deterministic": True}),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_it_has_the_seven_functions() -> None:
    assert sorted(SIGNATURES) == sorted(set(fa2.__all__) - {"ArgumentError"})


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa2, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(str(p) for p in plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in plain)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_dense_functions_are_pyfas(theirs: dict, ours: dict) -> None:
    """Packed and unpacked, values and gradients, to the last bit."""
    q, k, v = (torch.randn(2, 9, 4, 16, requires_grad=True) for _ in range(3))
    out = pyfa.attention(q, k, v, **ours)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    same = fa2.flash_attn_func(q, k, v, **theirs)
    assert torch.equal(same, out)
    for x, y in zip(torch.autograd.grad(same, (q, k, v), dout), grads, strict=True):
        assert torch.equal(x, y)
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    same = fa2.flash_attn_kvpacked_func(q, kv, **theirs)
    assert torch.equal(same, out)
    dq, dkv = torch.autograd.grad(same, (q, kv), dout)
    assert torch.equal(dq, grads[0])
    assert torch.equal(dkv, torch.stack(grads[1:], 2))
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    same = fa2.flash_attn_qkvpacked_func(qkv, **theirs)
    assert torch.equal(same, out)
    assert torch.equal(torch.autograd.grad(same, qkv, dout)[0], torch.stack(grads, 2))


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_varlen_functions_are_pyfas(theirs: dict, ours: dict) -> None:
    starts = ints(0, 5, 5, 14)
    q, k, v = (torch.randn(14, 4, 16, requires_grad=True) for _ in range(3))
    out = pyfa.attention_varlen(q, k, v, starts, starts, 9, 9, **ours)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    same = fa2.flash_attn_varlen_func(q, k, v, starts, starts, 9, torch.tensor(9), **theirs)
    assert torch.equal(same, out)
    for x, y in zip(torch.autograd.grad(same, (q, k, v), dout), grads, strict=True):
        assert torch.equal(x, y)
    kv, qkv = torch.stack([k, v], 1), torch.stack([q, k, v], 1)
    same = fa2.flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 9, 9, **theirs)
    assert torch.equal(same, out)
    assert torch.equal(fa2.flash_attn_varlen_qkvpacked_func(qkv, starts, 9, **theirs), out)


def test_varlen_with_pages() -> None:
    pages = torch.randn(2, 6, 4, 2, 16)
    table, starts_q, starts_k = ints(5, 0, 3, 1).view(2, 2), ints(0, 3, 5), ints(0, 7, 9)
    q = torch.randn(5, 4, 16)
    have = fa2.flash_attn_varlen_func(q, *pages, starts_q, starts_k, 3, 7, block_table=table)
    want = pyfa.attention_varlen(
        q, *pages, starts_q, None, 3, 7, seqused_k=ints(7, 2), page_table=table
    )
    assert torch.equal(have, want)


def test_what_is_returned_beside_the_output() -> None:
    q, k, v = torch.randn(1, 5, 4, 16), *torch.randn(2, 1, 3, 2, 16)
    assert isinstance(fa2.flash_attn_func(q, k, v), torch.Tensor)
    out, lse, nothing = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    want, want_lse = pyfa.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, want)
    assert lse.dtype == torch.float32
    assert lse.shape == (1, 4, 5)
    assert nothing.shape == (0,)
    # The first two queries see nothing.
    assert bool((lse[..., :2] == math.inf).all())
    assert torch.equal(lse[..., 2:], want_lse[..., 2:])
    packed = fa2.flash_attn_varlen_func(
        q[0], k[0], v[0], ints(0, 5), ints(0, 3), 5, 3, causal=True, return_attn_probs=True
    )
    assert torch.equal(packed[1], lse[0])


def test_gradients_flow_through_the_lse() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    _, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    _, want = pyfa.attention(q, k, v, return_lse=True)
    (have,) = torch.autograd.grad(lse.sum(), q)
    assert torch.equal(have, torch.autograd.grad(want.sum(), q)[0])
    assert bool(have.any())


def held(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> str:
    """What the one rule says against ``x`` as the output of attention with ``options``."""
    call = request.dense(q, k, v, request.Shared(**options)).call
    ref, naive = (reference.attention(call, dtype)[0] for dtype in (torch.float64, torch.float32))
    return judge("out", x, ref, naive, softcap=call.softcap > 0.0).message


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_dropped_probabilities_are_negative(
    theirs: dict, ours: dict, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the matrix follows the output: its signs are the very draws of the attention."""
    monkeypatch.setattr("pyfa.validate.seed", lambda value, device: torch.tensor([77]))
    q, k, v = torch.randn(2, 9, 4, 16), *torch.randn(2, 2, 14, 2, 16)
    p = 0.4
    if packed:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, _, matrix = fa2.flash_attn_varlen_func(
            *flat, ints(0, 9, 18), ints(0, 14, 28), 9, 14, p, return_attn_probs=True, **theirs
        )
        out = out.view(2, 9, 4, 16)
    else:
        out, _, matrix = fa2.flash_attn_func(q, k, v, p, return_attn_probs=True, **theirs)
    assert matrix.shape == (2, 4, 128, 128)
    assert not bool(matrix[:, :, 9:].any())
    assert not bool(matrix[..., 14:].any())
    matrix = matrix[:, :, :9, :14]
    assert torch.equal(matrix.abs().amax(-1), torch.ones(2, 4, 9))
    whole = matrix.abs() / matrix.abs().sum(-1, keepdim=True)
    kept = torch.where(torch.signbit(matrix), 0.0, whole) / (1.0 - p)
    values = v.repeat_interleave(2, dim=2)
    for probabilities, dropout in ((whole, {}), (kept, {"dropout_p": p, "seed": 77})):
        made = torch.einsum("bhqk,bkhd->bqhd", probabilities, values)
        assert held(made, q, k, v, **ours, **dropout) == ""
    assert held(out, q, k, v, **ours, dropout_p=p, seed=77) == ""


def test_dropped_probabilities_in_pages_and_half_precision() -> None:
    pages = torch.randn(2, 6, 4, 2, 16, dtype=torch.bfloat16)
    table = ints(5, 0, 3, 1).view(2, 2)
    q = torch.randn(5, 4, 16, dtype=torch.bfloat16)
    where = (ints(0, 3, 5), ints(0, 7, 9), 3, 7)
    torch.manual_seed(1)
    _, _, matrix = fa2.flash_attn_varlen_func(
        q, *pages, *where, 0.5, block_table=table, return_attn_probs=True
    )
    dense = [pages[:, [5, 0]].flatten(1, 2)[:, :7], pages[:, [3, 1]].flatten(1, 2)[:, :2]]
    k, v = (torch.cat([x[i] for x in dense]) for i in range(2))
    torch.manual_seed(1)
    _, _, same = fa2.flash_attn_varlen_func(q, k, v, *where, 0.5, return_attn_probs=True)
    assert matrix.dtype == torch.bfloat16
    assert torch.equal(matrix, same)
    assert bool(torch.signbit(matrix).any())


def test_the_matrix_has_the_bits_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyfa.validate.seed", lambda value, device: torch.tensor([77]))
    q = torch.randn(2, 6, 3, 8)
    _, _, matrix = fa2.flash_attn_func(q, q, q, 0.3, return_attn_probs=True)
    for b in range(2):
        kept = reference.keep_mask(77, 0.3, b, 3, 6, 6)
        assert torch.equal(~torch.signbit(matrix[b, :, :6, :6]), kept)


def test_kvcache_is_pyfas_and_has_no_gradient() -> None:
    q = torch.randn(2, 1, 4, 16, requires_grad=True)
    caches = torch.randn(2, 2, 20, 2, 16)
    ours, theirs = caches.clone(), caches.clone()
    k, v = torch.randn(2, 2, 1, 2, 16)
    angle = torch.rand(20, 4)
    options = {"k": k, "v": v, "causal": True, "cache_seqlens": ints(3, 19),
               "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False,
               "num_splits": 1}  # fmt: skip
    want, want_lse = pyfa.attention_kvcache(q.detach(), *ours, return_lse=True, **options)
    have, lse = fa2.flash_attn_with_kvcache(q, *theirs, return_softmax_lse=True, **options)
    assert torch.equal(have, want)
    assert torch.equal(lse, want_lse)
    assert torch.equal(ours, theirs)
    assert not have.requires_grad
    assert isinstance(fa2.flash_attn_with_kvcache(q, *theirs, cache_seqlens=5), torch.Tensor)


def test_an_empty_cache_gives_their_lse() -> None:
    q, caches = torch.randn(1, 1, 2, 8), torch.randn(2, 1, 4, 2, 8)
    out, lse = fa2.flash_attn_with_kvcache(q, *caches, cache_seqlens=0, return_softmax_lse=True)
    assert not bool(out.any())
    assert bool((lse == math.inf).all())


@pytest.mark.parametrize("lengths", [9, ints(2, 9)])
def test_lengths_beyond_the_block_table(lengths: int | torch.Tensor) -> None:
    caches, q = torch.randn(2, 6, 4, 2, 8), torch.randn(2, 1, 2, 8)
    table = ints(0, 1, 2, 3).view(2, 2)
    with pytest.raises(RuntimeError, match="at most 8 keys, as many as block_table's 2 columns"):
        fa2.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table)
    with pytest.raises(RuntimeError, match="block_table"):
        fa2.flash_attn_with_kvcache(
            q, *caches, k=q, v=q, cache_seqlens=ints(8, 1), block_table=table
        )
    out = fa2.flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(8, 1), block_table=table)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax_scale": math.nan}, "softmax_scale: expected a finite number"),
        ({"window_size": (1, 2, 3)}, "window_size: expected"),
        ({"window_size": 3}, "window_size: expected two integers"),
        ({"window_size": (1.5, 2)}, "window_size: expected two integers"),
        ({"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1"),
        ({"softcap": -1.0}, "softcap: expected"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes: expected shape"),
        ({"v": torch.randn(1, 4, 3, 8)}, "v: expected k's shape"),
    ],
)
def test_wrong_arguments_are_named_as_theirs(change: dict, message: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    arguments = {"q": q, "k": q, "v": q} | change
    for kind in (RuntimeError, ValueError, fa2.ArgumentError):
        with pytest.raises(kind, match=message):
            fa2.flash_attn_func(**arguments)


@pytest.mark.parametrize("name", [name for name in SIGNATURES if "kvcache" not in name])
def test_deterministic_is_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(*args: object, **options: object) -> torch.Tensor:
        seen.append(options)
        return torch.zeros(1)

    for function in ("attention", "attention_varlen"):
        monkeypatch.setattr(pyfa.api, function, record)
    shape = (1, 4, 3 if "qkv" in name else 2, 2, 8)["varlen" in name :]
    required = SIGNATURES[name].split(", dropout_p")[0].split(", ")
    values = [4 if x.startswith("max") else torch.zeros(shape) for x in required]
    for wanted in (True, False):
        getattr(fa2, name)(*values, deterministic=wanted)
    assert [options["deterministic"] for options in seen] == [True, False]


def test_wrong_types_are_named() -> None:
    q, table = torch.randn(2, 1, 2, 8), ints(0, 1, 2, 3).view(2, 2)
    caches = torch.randn(2, 6, 4, 2, 8)
    paged = {"cache_seqlens": 3, "block_table": table}
    with pytest.raises(TypeError, match=r"^k_cache: expected a tensor; got NoneType"):
        fa2.flash_attn_with_kvcache(q, None, caches[1], **paged)
    with pytest.raises(TypeError, match=r"^k: expected a tensor; got int"):
        fa2.flash_attn_with_kvcache(q, *caches, k=1, v=q, **paged)
    with pytest.raises(TypeError, match=r"^cache_seqlens: expected an int; got dict"):
        fa2.flash_attn_with_kvcache(q, *caches, block_table=table, cache_seqlens={})
    with pytest.raises(RuntimeError, match=r"^block_table: expected 2 dimensions"):
        fa2.flash_attn_with_kvcache(q, *caches, block_table=table[0, 0], cache_seqlens=3)
    with pytest.raises(TypeError, match=r"^q: expected a tensor; got NoneType"):
        fa2.flash_attn_func(None, q, q, dropout_p=0.1)
    with pytest.raises(TypeError, match=r"^dropout_p: expected a number; got NoneType"):
        fa2.flash_attn_func(q, q, q, dropout_p=None)


def test_packed_tensors_of_another_shape() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match=r"kv: expected shape \(batch, seqlen, 2, heads"):
        fa2.flash_attn_kvpacked_func(q, torch.randn(1, 4, 3, 2, 8))
    with pytest.raises(RuntimeError, match=r"qkv: expected shape \(total, 3, heads"):
        fa2.flash_attn_varlen_qkvpacked_func(torch.randn(4, 2, 2, 8), ints(0, 4), 4)
    with pytest.raises(TypeError, match="qkv: expected a tensor; got NoneType"):
        fa2.flash_attn_qkvpacked_func(None)


def test_pyfas_names_do_not_show() -> None:
    q, pages = torch.randn(2, 2, 8), torch.randn(3, 4, 2, 8)
    with pytest.raises(RuntimeError, match="block_table: expected pages") as caught:
        fa2.flash_attn_varlen_func(
            q, pages, pages, ints(0, 2), ints(0, 3), 2, 3, block_table=ints(9)[None]
        )
    assert "page_table" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"cache_batch_idx: .* with block_table"):
        fa2.flash_attn_with_kvcache(
            q[:, None], pages, pages, cache_seqlens=1, cache_batch_idx=ints(0, 0),
            block_table=ints(0, 1)[:, None],
        )  # fmt: skip


def test_no_backend_is_said_as_ever() -> None:
    q = torch.randn(1, 4, 2, 8)
    with (
        pyfa.use_backend("cuda"),
        pytest.raises(pyfa.UnsupportedProblem, match="no backend can run"),
    ):
        fa2.flash_attn_func(q, q, q)


def test_it_compiles() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    compiled = torch.compile(fa2.flash_attn_func, fullgraph=True, backend="aot_eager")
    options = {"causal": True, "window_size": (2, 0)}
    assert torch.equal(compiled(q, k, v, **options), fa2.flash_attn_func(q, k, v, **options))
