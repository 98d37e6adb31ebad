"""Problems that once went wrong, or could: each with the right answer or a clear error."""

import contextlib
import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import pyfa
from pyfa import conformance, dispatch, reference, request
from pyfa.backends import BACKENDS
from pyfa.backends.torch import sdpa, tiled
from pyfa.conformance import tolerances


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 1, 7, 2, 8).unbind()


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-40, 1e-300, -1e-300, 1e-30])
def test_any_scale_under_a_causal_mask(qkv, scale):
    """PyTorch's kernel scales its −inf, which a scale of 0 or less turns into NaN or +inf."""
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = pyfa.attention(q, k, v, causal=True, scale=scale)
    call = request.dense(*qkv, request.Shared(causal=True, scale=scale)).call
    ref, naive = (
        reference.gradients(call, torch.ones_like(out), dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    (dv,) = torch.autograd.grad(out.sum(), v)
    for name, x in (("out", out.detach()), ("dv", dv)):
        check = tolerances.judge(name, x, ref[name], naive[name], gradient=name != "out")
        assert check.passed, check.message


def test_a_generous_max_seqlen_costs_nothing(monkeypatch):
    """Tiles are cut for the rows that there are, not for those that there might have been."""
    cut, blocks = [], tiled._Grid._blocks
    monkeypatch.setattr(tiled._Grid, "_blocks", lambda *args: cut.append(args[1]) or blocks(*args))
    q = torch.randn(3, 4, 8)
    far = pyfa.attention_varlen(q, q, q, ints(0, 3), ints(0, 3), 10**6, 10**6, causal=True)
    near = pyfa.attention_varlen(q, q, q, ints(0, 3), ints(0, 3), 3, 3, causal=True)
    assert torch.equal(far, near)
    assert set(cut) == {3}


def test_lengths_beyond_the_page_table():
    pages, q = torch.randn(3, 2, 2, 8), torch.randn(3, 4, 8)
    table = ints(0, 1, 2)[None]
    with pytest.raises(
        ValueError, match=r"^seqused_k \(cache_seqlens\): expected values from 0 to 6; got 20"
    ):
        pyfa.attention_varlen(q, pages, pages, ints(0, 3), None, 3, 50, seqused_k=ints(20),
                              page_table=table)  # fmt: skip
    with pytest.raises(ValueError, match="pages of one key or more"):
        pyfa.attention_varlen(q, pages[:, :0], pages[:, :0], ints(0, 3), None, 3, 5,
                              seqused_k=ints(0), page_table=table)  # fmt: skip


def test_packed_rows_of_no_sequence():
    """Rotary and append have positions of each row, also of those that belong to no sequence."""
    cache, q, new = torch.randn(0, 8, 2, 8), torch.randn(2, 4, 8), torch.randn(3, 2, 8)
    angles, none = torch.rand(8, 4), ints(0)
    packed = {"cu_seqlens_q": none, "max_seqlen_q": 0, "cache_seqlens": ints()}
    appended = {"k": new, "v": new, "cu_seqlens_new": none}
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    for more in (appended, rotary, {**appended, **rotary}):
        out = pyfa.attention_kvcache(q, cache, cache.clone(), **packed, **more)
        assert torch.equal(out, torch.zeros(2, 4, 8))


def test_a_cache_with_the_negative_bit():
    """PyTorch cannot hand it to an operator that writes to it."""
    q, new = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    cache, negative = torch.zeros(1, 4, 2, 8), torch._neg_view(torch.zeros(1, 4, 2, 8))
    for name, caches in (("k_cache", (negative, cache)), ("v_cache", (cache, negative))):
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor without the negative"):
            pyfa.attention_kvcache(q, *caches, k=new, v=new, cache_seqlens=1)
        pyfa.attention_kvcache(q, *caches, cache_seqlens=1)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_lengths_without_values(where):
    """On the meta device and in FakeTensorMode there are shapes alone."""
    device = "meta" if where == "meta" else "cpu"
    mode = FakeTensorMode() if where == "fake" else contextlib.nullcontext()
    with mode, torch.device(device):
        q, cache, used = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), ints(3, 4)
        rotary = {"rotary_cos": torch.rand(9, 4), "rotary_sin": torch.rand(9, 4)}
        out, lse = pyfa.attention_kvcache(
            q, cache, cache.clone(), k=cache[:, :3], v=cache[:, :3], cache_seqlens=used,
            cache_leftpad=ints(0, 1), causal=True, return_lse=True, **rotary,
        )  # fmt: skip
        assert out.shape == q.shape
        assert lse.shape == (2, 4, 3)
        table = torch.zeros(2, 3, dtype=torch.int32)
        assert (
            pyfa.attention_kvcache(q, cache, cache, page_table=table, cache_seqlens=3).device
            == q.device
        )
        x = torch.randn(7, 4, 8, requires_grad=True)
        out = pyfa.attention_varlen(x, x, x, ints(0, 3, 7), ints(0, 3, 7), 4, 4, causal=True)
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


class TestNothingIsWrittenByACallThatFails:
    FAULTS = (
        {"backend": "emulator"},
        {"backend": "nobody"},
        {"window": (1,)},
        {"scale": float("nan")},
        {"sinks": torch.zeros(3)},
        {"cache_leftpad": ints(0, 9)},
        {"cache_batch_idx": ints(0, -1)},
        {"cache_batch_idx": ints(0, 9)},
    )

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
    def test_append(self, fault):
        cache, new = torch.zeros(2, 8, 2, 8), torch.ones(2, 1, 2, 8)
        with pytest.raises((ValueError, NotImplementedError)):
            pyfa.attention_kvcache(torch.randn(2, 1, 4, 8), cache, cache.clone(), k=new, v=new,
                                   cache_seqlens=ints(3, 4), **fault)  # fmt: skip
        assert not cache.any()

    @pytest.mark.parametrize("page", [-1, 7])
    def test_append_to_a_page_that_is_not_there(self, page):
        cache, new = torch.zeros(2, 8, 2, 8), torch.ones(2, 1, 2, 8)
        with pytest.raises(ValueError, match=f"page_table: expected pages from 0 to 1; got {page}"):
            pyfa.attention_kvcache(torch.randn(2, 1, 4, 8), cache, cache.clone(), k=new, v=new,
                                   cache_seqlens=ints(3, 4),
                                   page_table=ints(0, page)[:, None])  # fmt: skip
        assert not cache.any()


class TestEmptyStorage:
    EMPTY = torch.zeros(0, 2, 8)

    def seen_nothing(self, out, lse, rows=3):
        assert out.shape == (rows, 4, 8)
        assert not out.any()
        assert (lse == -torch.inf).all()

    def test_no_rows_and_no_keys(self):
        q = torch.zeros(0, 4, 8)
        result = pyfa.attention_varlen(q, self.EMPTY, self.EMPTY, ints(0, 0), ints(0, 0), 5, 5,
                                       return_lse=True)  # fmt: skip
        self.seen_nothing(*result, rows=0)

    def test_no_keys(self):
        q = torch.randn(3, 4, 8, requires_grad=True)
        result = pyfa.attention_varlen(q, self.EMPTY, self.EMPTY, ints(0, 3), ints(0, 0), 5, 5,
                                       return_lse=True)  # fmt: skip
        self.seen_nothing(*result)
        assert not torch.autograd.grad(result[0].sum(), q)[0].any()

    @pytest.mark.parametrize("pages", [0, 2])
    def test_no_pages(self, pages):
        table = torch.zeros(1, 2 - pages, dtype=torch.int32)
        storage = torch.randn(pages, 2, 2, 8)
        result = pyfa.attention_varlen(torch.randn(3, 4, 8), storage, storage, ints(0, 3), None, 3,
                                       4, seqused_k=ints(0), page_table=table,
                                       return_lse=True)  # fmt: skip
        self.seen_nothing(*result)

    def test_no_queries_on_a_cache(self):
        cache = torch.randn(1, 7, 2, 8)
        out = pyfa.attention_kvcache(torch.zeros(0, 4, 8), cache, cache, cache_seqlens=ints(4),
                                     cu_seqlens_q=ints(0, 0), max_seqlen_q=5)  # fmt: skip
        assert out.shape == (0, 4, 8)


def test_errors_travel_between_processes(qkv):
    with pytest.raises(pyfa.UnsupportedProblem) as caught:
        pyfa.attention(*qkv, backend="cuda")
    failed = pyfa.CompileError("attn_fwd does not compile", "line 3: no", "/tmp/attn_fwd.hip")
    for error in (caught.value, failed):
        for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert vars(again) == vars(error)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_the_negative_bit(backend):
    torch.manual_seed(0)
    k = torch.randn(1, 9, 1, 64).half()
    negative = torch._neg_view(torch.randn(1, 9, 1, 64).half())
    expected = pyfa.attention(negative.resolve_neg(), k, k, backend=backend)
    assert torch.equal(pyfa.attention(negative, k, k, backend=backend), expected)


def negative(x):
    """x, of which PyTorch stores −x and a negative bit, as of z.conj().imag."""
    found = torch._neg_view(-x)
    assert found.is_neg()
    return found


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_the_negative_bit_of_score_terms(backend, name):
    torch.manual_seed(0)
    q, k = torch.randn(2, 9, 4, 64).half(), torch.randn(2, 9, 2, 64).half()
    term = torch.rand(9, 9) if name == "bias" else torch.rand(4)
    found, expected = (
        pyfa.attention(q, k, k, backend=backend, **{name: x}) for x in (negative(term), term)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_the_negative_bit_of_what_flows_back(backend, name):
    torch.manual_seed(0)
    q, k = (torch.randn(2, 9, 2, 64).half().requires_grad_() for _ in range(2))
    out, lse = pyfa.attention(q, k, k, backend=backend, return_lse=True)
    result = out if name == "dout" else lse
    grad = torch.randn_like(result)
    found, expected = (
        torch.autograd.grad(result, (q, k), x, retain_graph=True) for x in (negative(grad), grad)
    )
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_the_negative_bit_of_float8_scales(backend):
    torch.manual_seed(0)
    q, k, v, descale = pyfa.quantize(
        *torch.randn(3, 1, 9, 2, 64).half(), dtype=torch.float8_e4m3fnuz
    )
    found, expected = (
        pyfa.attention(q, k, v, descale=scales, backend=backend)
        for scales in (tuple(negative(x) for x in descale), descale)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_the_negative_bit_of_rotary_tables(backend):
    """Turning back: the tables of the conjugate."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 64).half(), torch.randn(2, 9, 2, 64).half()
    cos, sin = torch.rand(2, 9, 16)
    found, expected = (
        pyfa.attention_kvcache(q, k, k, rotary_cos=cos, rotary_sin=x, cache_seqlens=ints(3, 8),
                               backend=backend)
        for x in (negative(sin), sin)
    )  # fmt: skip
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_a_bias_in_any_float(backend, dtype):
    torch.manual_seed(0)
    q, k = torch.randn(2, 9, 4, 64).half(), torch.randn(2, 9, 2, 64).half()
    bias = torch.randn(9, 9).to(dtype)
    found, expected = (
        pyfa.attention(q, k, k, bias=x, backend=backend) for x in (bias, bias.float())
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("page", [-1, 7])
def test_a_page_that_is_not_there_behind_the_first_row(backend, page):
    """Without lengths all pages are in use, of all sequences."""
    q, pages = torch.randn(2, 1, 4, 64).half(), torch.randn(3, 4, 2, 64).half()
    with pytest.raises(ValueError, match=f"page_table: expected pages from 0 to 2; got {page}"):
        pyfa.attention_kvcache(q, pages, pages, page_table=ints(0, 1, 2, page).view(2, 2),
                               backend=backend)  # fmt: skip


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_lengths_of_more_than_32_bits(name):
    q, lengths = torch.randn(3, 4, 64).half(), {"max_seqlen_q": 3, "max_seqlen_k": 3}
    with pytest.raises(ValueError, match=f"{name}: expected at most 2147483647; got {2**31}"):
        pyfa.attention_varlen(q, q, q, ints(0, 3), ints(0, 3), **lengths | {name: 2**31},
                              backend="emulator")  # fmt: skip


def test_a_cache_length_of_more_than_32_bits():
    q = torch.randn(1, 3, 4, 64)
    with pytest.raises(
        ValueError, match=f"cache_seqlens: expected at most 2147483647; got {2**31}"
    ):
        pyfa.attention_kvcache(q, q, q, cache_seqlens=2**31)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_a_gradient_of_rotary_tables_that_would_be_lost(name):
    q, tables = (
        torch.randn(1, 9, 2, 64),
        {x: torch.rand(9, 16) for x in ("rotary_cos", "rotary_sin")},
    )
    tables[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected no requires_grad"):
        pyfa.attention_kvcache(q, q, q, cache_seqlens=5, **tables)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_of_float8_scales_that_would_be_lost(which):
    *tensors, descale = pyfa.quantize(*torch.randn(3, 1, 9, 2, 64))
    descale[which].requires_grad_()
    with pytest.raises(ValueError, match=rf"^descale\[{which}\] .*: expected no requires_grad"):
        pyfa.attention(*tensors, descale=descale)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("dims", [(12, 12), (64, 5)])
def test_rows_in_the_order_of_an_image_with_channels_last(backend, dims):
    """Transposed keys (B, H, D, S), of whose order PyTorch's pad makes its result."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 9, 2, dims[i]).half() for i in (0, 0, 1, 1))
    turned = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (q, k, v, dout)]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in turned)
    results = []
    for *leaves, grad in ((q, k, v, dout), turned):
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = pyfa.attention(*leaves, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_slopes_and_sinks_that_are_parts_of_larger_tensors(backend):
    q, k = torch.randn(2, 9, 4, 64).half(), torch.randn(2, 9, 2, 64).half()
    larger = torch.randn(2, 8)
    for slopes, sinks in (
        (larger[0, ::2], larger[1, ::2]),
        (larger[0, :1].expand(4), larger[1, :1].expand(4)),
        (larger.view(8, 2).T[:, :4], larger.view(8, 2).T[0, :4]),
    ):
        found, expected = (
            pyfa.attention(q, k, k, alibi_slopes=x, sinks=y, backend=backend)
            for x, y in ((slopes, sinks), (slopes.clone(memory_format=torch.contiguous_format),
                                           sinks.clone(memory_format=torch.contiguous_format)))
        )  # fmt: skip
        assert torch.equal(found, expected)


def test_contexts_that_overlap_in_two_threads_leave_nothing_behind():
    entered, left = threading.Event(), threading.Event()

    def first():
        with pyfa.use_backend("torch"):
            entered.set()
            left.wait(5)

    def second():
        entered.wait(5)
        with pyfa.use_backend("triton"):
            left.set()
            one.join(5)

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    two.start()
    two.join()
    assert dispatch._context._traced is None


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"softcap": 1e300}, ValueError, "^softcap: expected a finite number of float32"),
        ({"scale": 10**400}, ValueError, "^scale: expected a finite number of float32"),
        ({"window": {1, 2}}, ValueError, "^window: expected"),
        ({"window": object()}, ValueError, "^window: expected"),
        ({"causal": torch.tensor([True, False])}, TypeError, "^causal: expected True or False"),
        ({"backend": 5}, TypeError, "^backend: expected a name or names; got int"),
        ({"backend": []}, ValueError, "^backend: expected at least one name"),
    ],
)
def test_odd_options(qkv, options, error, match):
    with pytest.raises(error, match=match):
        pyfa.attention(*qkv, **options)


def test_numbers_of_numpy(qkv):
    plain = pyfa.attention(*qkv, window=(2, 1), scale=0.5, causal=False)
    numpy = pyfa.attention(
        *qkv, window=(np.int64(2), np.int32(1)), scale=np.float32(0.5), causal=np.bool_(False)
    )
    assert torch.equal(plain, numpy)
    assert torch.equal(
        pyfa.attention(*qkv, window=(2**70, 1)), pyfa.attention(*qkv, window=(-1, 1))
    )


class TestRotaryPositions:
    @pytest.mark.parametrize("start", [-3, 20])
    def test_outside_the_tables(self, start):
        cache, table = torch.randn(1, 8, 2, 8), torch.randn(8, 4)
        with pytest.raises(ValueError, match="rotary_seqlens: expected positions from 0 to 7"):
            pyfa.attention_kvcache(torch.randn(1, 1, 2, 8), cache, cache, cache_seqlens=4,
                                   rotary_cos=table, rotary_sin=table,
                                   rotary_seqlens=ints(start))  # fmt: skip

    def test_without_tables(self):
        cache = torch.randn(1, 8, 2, 8)
        with pytest.raises(ValueError, match="rotary_seqlens: expected None without"):
            pyfa.attention_kvcache(cache[:, :1], cache, cache, rotary_seqlens=ints(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=str)
def test_meta_tensors_tell_the_outputs_shape(dtype, options):
    q, k, v = (torch.empty(2, rows, 4, 16, device="meta", dtype=dtype) for rows in (5, 7, 7))
    out, lse = pyfa.attention(q, k, v, return_lse=True, **options)
    assert out.device.type == lse.device.type == "meta"
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 5)


def test_a_scale_that_is_no_power_of_two():
    """Scores of 40 in float32: the rule allows for a dQ that is off by 40 times as much."""
    case = conformance.Case(
        dtype="float32", lengths_q=(129,), lengths_k=(129,), head_dim=72, head_dim_v=72,
        recipe="growing", backward=True,
    )  # fmt: skip
    (result,) = conformance.run_cases(BACKENDS["torch"], [case]).results
    (dq,) = (check for check in result.checks if check.name == "dq")
    assert dq.passed
    assert dq.ratio < 0.2


@pytest.mark.parametrize(
    "fields",
    [
        # As many keys as their heads: one may be taken for the other.
        {"lengths_q": (5, 5), "lengths_k": (2, 2), "heads_q": 4, "backward": True},
        # Caches that are full, without lengths, whose tiles all have one size.
        {"kind": "kvcache", "lengths_k": (48, 48), "page_size": 16, "batch_invariant": True},
        {"kind": "kvcache", "lengths_k": (48, 48), "batch_idx": True, "batch_invariant": True},
        # A second tile of rows of one size that the bias ends in, behind its first row.
        {"lengths_q": (40,), "lengths_k": (9,), "bias": "full", "batch_invariant": True},
        # A bias of one row, whose gradient more than one tile of rows adds to.
        {"lengths_q": (300, 300), "bias": "keys", "bias_grad": True, "backward": True},
    ],
    ids=str,
)
def test_sizes_that_may_be_taken_for_another(fields):
    (result,) = conformance.run_cases(BACKENDS["torch"], [conformance.Case(**fields)]).results
    assert result.status == "passed"


@pytest.mark.parametrize("apart", range(3))
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
        lambda x: x.mT.contiguous().mT,
    ],
    ids=["every second one", "heads side by side"],
)
def test_elements_that_are_apart_in_one_tensor_alone(apart, moved):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 2, 16).unbind()
    given = [q, k, v]
    given[apart] = moved(given[apart])
    assert torch.equal(pyfa.attention(*given, backend="torch"), pyfa.attention(q, k, v))


def test_keys_of_as_many_heads_are_not_copied(qkv, monkeypatch):
    forward, read = sdpa._CPU_FORWARD, []

    def watched(q, k, v, *args, **options):
        read.append((k.data_ptr(), v.data_ptr()))
        return forward(q, k, v, *args, **options)

    monkeypatch.setattr(sdpa, "_CPU_FORWARD", watched)
    pyfa.attention(*qkv, backend="torch")
    assert read == [(qkv[1].data_ptr(), qkv[2].data_ptr())]


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_all_are_minus_inf_are_masked(causal):
    """The forward leaves such a call to the tiled path, and so has the backward to."""
    q = torch.full((1, 5, 2, 4), 1e30)
    leaves = [x.clone().requires_grad_() for x in (q, -q, torch.ones_like(q))]
    out = pyfa.attention(*leaves, causal=causal, backend="torch")
    assert not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), leaves))


def test_a_page_that_sequences_share_and_none_beside_it():
    torch.manual_seed(0)
    q, page = torch.randn(2, 1, 2, 8), torch.randn(1, 4, 2, 8)
    found = pyfa.attention_kvcache(q, page, page, cache_seqlens=ints(3, 1), backend="torch",
                                   page_table=ints(0, 0)[:, None])  # fmt: skip
    for row, x, keys in zip(found, q, (3, 1), strict=True):
        expected = pyfa.attention(x[None], page[:, :keys], page[:, :keys])
        torch.testing.assert_close(row[None], expected)


def test_a_block_of_a_larger_problem_with_lengths(qkv):
    """The lengths say no more than the shapes do, and the block lies beside the diagonal."""
    call = request.dense(*qkv, request.Shared(causal=True, alibi_slopes=torch.ones(2))).call
    call = call._replace(q_start=7, k_start=4)
    found = tiled.forward(call._replace(seqused_k=ints(7)))
    for x, expected in zip(found, tiled.forward(call), strict=True):
        torch.testing.assert_close(x, expected)


def test_more_heads_than_a_tile_has_scores():
    """So many that not even one key of each fits into a tile of 32 rows."""
    q, k, v = torch.randn(3, 1, 3, 33000, 4).unbind()
    some = [x[:, :, 32050:32060] for x in (q, k, v)]
    out = pyfa.attention(q, k, v, softcap=2.0, backend="torch")[:, :, 32050:32060]
    torch.testing.assert_close(out, pyfa.attention(*some, softcap=2.0, backend="torch"))


@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_bytes_of_booleans_are_checked_on_request(backend, monkeypatch, nothing_bound):
    """Kernels need not agree on a byte of 2. Without PYFA_CHECK=1 nobody reads a whole mask."""
    monkeypatch.setattr(dispatch, "_check_on_device", True)
    q, k = torch.randn(1, 4, 2, 64).half(), torch.randn(1, 9, 2, 64).half()
    for shape, call, name in (
        ((4, 9), pyfa.attention, "bias"),
        ((2, 4, 9), pyfa.attention_kvcache, "bias"),
        ((4, 4), pyfa.attention_kvcache, "tree_mask"),
    ):
        mask = torch.ones(shape, dtype=torch.bool)
        assert call(q, k, k, **{name: mask}, backend=backend).isfinite().all()
        mask.view(torch.uint8)[..., -1] = 2
        with pytest.raises(ValueError, match=f"^{name}: expected bytes that are 0 or 1; got 2"):
            call(q, k, k, **{name: mask}, backend=backend)
    call = pyfa.attention(q, k, k, bias=torch.full((4, 9), 2.0), backend=backend)
    assert call.isfinite().all()
