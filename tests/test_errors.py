"""Every bad input gets an error that names the argument, what was expected and what came."""

import math

import pytest
import torch

import pyfa


def tensors(batch=2, sq=5, sk=7, heads=4, heads_k=2, dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(batch, sq, heads, dim, dtype=dtype)
    k = torch.randn(batch, sk, heads_k, dim, dtype=dtype)
    v = torch.randn(batch, sk, heads_k, dim, dtype=dtype)
    return q, k, v


def packed():
    q, k, v = (x[0] for x in tensors())
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    cu_k = torch.tensor([0, 3, 7], dtype=torch.int32)
    return [q, k, v, cu_q, cu_k, 3, 4]


def refused(match, function, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


class TestShapes:
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_dimensions(self, index):
        args = list(tensors())
        args[index] = args[index][0]
        name = "qkv"[index]
        refused(rf"^{name}: expected 4 dimensions .*got shape", pyfa.attention, *args)

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_not_a_tensor(self, index):
        args = list(tensors())
        args[index] = [1.0]
        refused(
            "qkv"[index] + ": expected a tensor; got list", pyfa.attention, *args, error=TypeError
        )

    def test_batch(self):
        q, k, v = tensors()
        refused("^k: expected q's batch size 2", pyfa.attention, q, k[:1], v[:1])

    def test_head_dim(self):
        q, k, v = tensors()
        refused("^k: expected q's head_dim 8", pyfa.attention, q, k[..., :4], v)

    def test_v_rows(self):
        q, k, v = tensors()
        refused("^v: expected k's shape", pyfa.attention, q, k, v[:, :3])

    def test_heads_not_divisible(self):
        q, k, v = tensors(heads=4, heads_k=3)
        refused("divides q's 4; got 3 heads", pyfa.attention, q, k, v)

    @pytest.mark.parametrize("dim", [0, 577])
    def test_head_dim_out_of_range(self, dim):
        refused("^q: expected a head_dim from 1 to 576", pyfa.attention, *tensors(dim=dim))

    def test_head_dim_of_v_out_of_range(self):
        q, k, v = tensors(dim=513)
        refused("^v: expected a head_dim from 1 to 512", pyfa.attention, q, k, v)

    def test_dtypes(self):
        q, k, v = tensors()
        refused("^k: expected q's dtype torch.float32", pyfa.attention, q, k.half(), v)
        refused("^q: expected float16", pyfa.attention, q.double(), k.double(), v.double())
        refused("^q: expected float16", pyfa.attention, q.int(), k.int(), v.int())

    def test_devices(self):
        q, k, v = tensors()
        refused("^v: expected q's device cpu; got .* on meta", pyfa.attention, q, k, v.to("meta"))


class TestOptions:
    @pytest.mark.parametrize("window", ["-2, 0", (1,), (1, 2, 3), 5, (1.5, 0), (True, 0), "ab"])
    def test_window(self, window):
        refused("^window: expected", pyfa.attention, *tensors(), window=window)

    @pytest.mark.parametrize("p", [1.0, 1.5, -0.1, math.nan])
    def test_dropout(self, p):
        refused("^dropout_p: expected", pyfa.attention, *tensors(), dropout_p=p)

    @pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
    def test_scale(self, scale):
        refused("^scale: expected a finite number", pyfa.attention, *tensors(), scale=scale)

    def test_scale_is_a_number(self):
        refused("^scale: expected a number", pyfa.attention, *tensors(), scale="1", error=TypeError)

    @pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan])
    def test_softcap(self, softcap):
        refused("^softcap: expected", pyfa.attention, *tensors(), softcap=softcap)

    def test_bias(self):
        args = tensors()
        refused(r"^bias: expected a shape that broadcasts to \(2, 4, 5, 7\)", pyfa.attention, *args,
                bias=torch.zeros(5, 6))  # fmt: skip
        refused("^bias: expected a floating point dtype", pyfa.attention, *args,
                bias=torch.zeros(5, 7, dtype=torch.int32))  # fmt: skip
        refused("^bias: expected q's device", pyfa.attention, *args,
                bias=torch.zeros(5, 7, device="meta"))  # fmt: skip
        refused("^bias: expected a tensor", pyfa.attention, *args, bias=1.0, error=TypeError)

    def test_slopes_and_sinks(self):
        args = tensors()
        refused(r"^alibi_slopes: expected shape \(4,\) or \(2, 4\)", pyfa.attention, *args,
                alibi_slopes=torch.zeros(3))  # fmt: skip
        refused(r"^sinks: expected shape \(4,\)", pyfa.attention, *args, sinks=torch.zeros(2, 4))
        refused("^alibi_slopes: expected no requires_grad", pyfa.attention, *args,
                alibi_slopes=torch.zeros(4, requires_grad=True))  # fmt: skip

    def test_seed(self):
        args = tensors()
        refused("^seed: expected a number of 64 bits", pyfa.attention, *args, dropout_p=0.1,
                seed=2**64)  # fmt: skip
        refused("^seed: expected one int64", pyfa.attention, *args, dropout_p=0.1,
                seed=torch.zeros(2, dtype=torch.int64))  # fmt: skip
        refused("^seed: expected an int", pyfa.attention, *args, dropout_p=0.1, seed=1.5,
                error=TypeError)  # fmt: skip

    @pytest.mark.usefixtures("fresh_calls")
    @pytest.mark.parametrize("function", [pyfa.attention, pyfa.explain])
    @pytest.mark.parametrize("dropout_p", [0.0, 0.1])
    @pytest.mark.parametrize(
        "seed", [2**64, -(2**63) - 1, torch.tensor([1.5]), torch.zeros(2, dtype=torch.int64),
                 torch.zeros(1, dtype=torch.int64, device="meta")]
    )  # fmt: skip
    def test_seed_with_and_without_dropout(self, function, dropout_p, seed):
        refused("^seed: expected", function, *tensors(), dropout_p=dropout_p, seed=seed)

    def test_a_number_is_refused_after_calls_without_dropout(self):
        args = tensors()
        for _ in range(3):
            pyfa.attention(*args, seed=5)
        refused("^seed: expected a number of 64 bits", pyfa.attention, *args, seed=2**64)
        refused("^seed: expected an int", pyfa.attention, *args, seed=True, error=TypeError)

    def test_float8_arguments(self):
        args = tensors()
        refused("^descale: expected None", pyfa.attention, *args, descale=(1, 1, 1))
        refused("^out_dtype: expected None", pyfa.attention, *args, out_dtype=torch.float16)

    def test_backend(self):
        refused("^backend: expected one of .*; got 'cudnn'", pyfa.attention, *tensors(),
                backend="cudnn")  # fmt: skip
        refused("^backend: expected one of", pyfa.use_backend("fast").__enter__)
        refused("expected at least one", pyfa.use_backend().__enter__)

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("block_table", None),
            ("softmax_scale", "scale"),
            ("window_size", "window"),
            ("is_causal", "causal"),
            ("attn_mask", "bias"),
            ("dropout", "dropout_p"),
            ("causl", "causal"),
        ],
    )
    def test_other_names(self, name, meant):
        hint = f"did you mean '{meant}'" if meant else "unexpected keyword argument 'block_table'$"
        refused(hint, pyfa.attention, *tensors(), error=TypeError, **{name: None})

    def test_page_table_by_its_other_name(self):
        refused("did you mean 'page_table'", pyfa.attention_varlen, *packed(), error=TypeError,
                block_table=None)  # fmt: skip


class TestVarlen:
    def test_offsets_decrease(self):
        args = packed()
        args[3] = torch.tensor([0, 4, 3], dtype=torch.int32)
        args[5] = 5
        refused("^cu_seqlens_q: expected values that do not decrease; got 3 after 4",
                pyfa.attention_varlen, *args)  # fmt: skip

    def test_offsets_too_long(self):
        args = packed()
        args[4] = torch.tensor([0, 3, 9], dtype=torch.int32)
        args[6] = 9
        refused("^cu_seqlens_k: expected at most 7", pyfa.attention_varlen, *args)

    def test_offsets_start(self):
        args = packed()
        args[3] = torch.tensor([1, 2, 5], dtype=torch.int32)
        refused("^cu_seqlens_q: expected 0 as its first", pyfa.attention_varlen, *args)

    def test_beyond_max_seqlen(self):
        args = packed()
        args[6] = 3
        refused("^cu_seqlens_k: expected sequences of at most max_seqlen_k=3; got 4",
                pyfa.attention_varlen, *args)  # fmt: skip

    def test_offsets_dtype_and_shape(self):
        args = packed()
        refused("^cu_seqlens_q: expected dtype int32", pyfa.attention_varlen, *args[:3],
                args[3].long(), *args[4:])  # fmt: skip
        refused(r"^cu_seqlens_k: expected shape \(3,\)", pyfa.attention_varlen, *args[:4],
                args[4][:2], *args[5:])  # fmt: skip
        refused("^cu_seqlens_q: expected shape", pyfa.attention_varlen, *args[:3],
                torch.zeros(0, dtype=torch.int32), *args[4:])  # fmt: skip

    def test_max_seqlen(self):
        args = packed()
        args[5] = torch.tensor(3)
        refused("^max_seqlen_q: expected an int", pyfa.attention_varlen, *args, error=TypeError)
        args[5] = -1
        refused("^max_seqlen_q: expected 0 or more", pyfa.attention_varlen, *args)

    def test_seqused_beyond(self):
        used = torch.tensor([3, 5], dtype=torch.int32)
        refused("^seqused_k: expected values from 0 to 4; got 5", pyfa.attention_varlen, *packed(),
                seqused_k=used)  # fmt: skip
        refused("^seqused_q: expected values from 0 to 2; got 3", pyfa.attention_varlen, *packed(),
                seqused_q=used)  # fmt: skip

    def test_pages_need_lengths(self):
        args = packed()
        args[1] = args[2] = torch.randn(3, 4, 2, 8)
        args[4] = None
        refused("^seqused_k: expected lengths", pyfa.attention_varlen, *args,
                page_table=torch.zeros(2, 1, dtype=torch.int32))  # fmt: skip
        refused("^k: expected 3 dimensions", pyfa.attention_varlen, *args)

    def test_offsets_of_keys_missing(self):
        args = packed()
        args[4] = None
        refused("^cu_seqlens_k: expected offsets", pyfa.attention_varlen, *args)


class TestCache:
    @pytest.fixture
    def cache(self):
        torch.manual_seed(0)
        return torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)

    def test_page_out_of_range(self, cache):
        q, k, v = cache
        table = torch.tensor([[0], [2]], dtype=torch.int32)
        lengths = torch.tensor([3, 3], dtype=torch.int32)
        refused("^page_table: expected pages from 0 to 1; got 2", pyfa.attention_kvcache, q, k, v,
                page_table=table, cache_seqlens=lengths)  # fmt: skip
        # What lies beyond the used pages is nobody's business.
        table = torch.tensor([[0, 99], [1, -1]], dtype=torch.int32)
        pyfa.attention_kvcache(q, k, v, page_table=table, cache_seqlens=lengths)

    def test_lengths(self, cache):
        refused(r"^cache_seqlens: expected lengths from 0 to 16; got \[17, 17\]",
                pyfa.attention_kvcache, *cache, cache_seqlens=17)  # fmt: skip
        refused("^cache_seqlens: expected an int", pyfa.attention_kvcache, *cache,
                cache_seqlens=1.5, error=TypeError)  # fmt: skip
        refused("^cache_leftpad: expected values from 0 to 3; got 4", pyfa.attention_kvcache,
                *cache, cache_seqlens=3,
                cache_leftpad=torch.tensor([0, 4], dtype=torch.int32))  # fmt: skip

    def test_batch_rows(self, cache):
        q, k, v = cache
        refused("^k_cache: expected q's batch size 1", pyfa.attention_kvcache, q[:1], k, v)

    def test_a_cache_is_called_by_its_name(self):
        q, k, v = tensors()
        refused("^k_cache: expected q's dtype", pyfa.attention_kvcache, q, k.half(), v)
        refused("^v_cache: expected q's dtype", pyfa.attention_kvcache, q, k, v.half())
        refused("^k_cache: expected q's head_dim", pyfa.attention_kvcache, q, k[..., :-1], v)
        refused("^v_cache: expected k_cache's shape", pyfa.attention_kvcache, q, k, v[:, :-1])
        index = torch.tensor([2], dtype=torch.int32)
        refused("^cache_batch_idx: expected values from 0 to 1", pyfa.attention_kvcache, q[:1], k,
                v, cache_batch_idx=index)  # fmt: skip

    def test_append(self, cache):
        q, k, v = cache
        new = torch.randn(2, 3, 2, 8)
        refused("^v: expected k and v", pyfa.attention_kvcache, q, k, v, k=new, cache_seqlens=1)
        refused(
            "^cache_seqlens: expected the number", pyfa.attention_kvcache, q, k, v, k=new, v=new
        )
        refused(r"^v: expected shape \(2, new, 2, 8\)", pyfa.attention_kvcache, q, k, v, k=new,
                v=new[..., :4], cache_seqlens=1)  # fmt: skip
        refused(r"^cache_seqlens: expected lengths from 0 to 16 \(with 3 new keys\)",
                pyfa.attention_kvcache, q, k, v, k=new, v=new, cache_seqlens=14)  # fmt: skip

    def test_rotary(self, cache):
        cos = torch.randn(16, 4)
        refused("^rotary_sin: expected rotary_cos and", pyfa.attention_kvcache, *cache,
                rotary_cos=cos)  # fmt: skip
        refused("at most head_dim / 2 = 4 columns", pyfa.attention_kvcache, *cache,
                rotary_cos=torch.randn(16, 5), rotary_sin=torch.randn(16, 5))  # fmt: skip
        refused("a row for each of the cache's 16", pyfa.attention_kvcache, *cache,
                rotary_cos=cos[:8], rotary_sin=cos[:8])  # fmt: skip

    def test_gradients(self, cache):
        q, k, v = cache
        refused("^q: expected no requires_grad", pyfa.attention_kvcache, q.requires_grad_(), k, v)
        with torch.no_grad():
            pyfa.attention_kvcache(q, k, v)

    def test_num_splits(self, cache):
        refused("^num_splits: expected 0 or more", pyfa.attention_kvcache, *cache, num_splits=-1)


class TestUnsupported:
    def test_every_backend_says_why(self):
        q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors())
        with pytest.raises(pyfa.UnsupportedProblem) as caught:
            pyfa.attention(q, k, v, causal=True, backend=("hip", "cuda", "emulator"))
        text = str(caught.value)
        assert text.startswith("no backend can run this attention\n  q (2, 5, 4, 8) float8_e4m3fn")
        assert "causal" in text
        assert "\n  emulator  float8_e4m3fn is not implemented" in text
        assert isinstance(caught.value, NotImplementedError)

    def test_a_named_backend_does_not_fall_back(self):
        with pytest.raises(pyfa.UnsupportedProblem, match="cuda  the device is a CPU"):
            pyfa.attention(*tensors(), backend="cuda")
        with pyfa.use_backend("cuda"), pytest.raises(pyfa.UnsupportedProblem):
            pyfa.attention(*tensors())

    def test_second_derivative(self):
        q, k, v = (x.requires_grad_() for x in tensors())
        out = pyfa.attention(q, k, v)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad.sum().backward()
