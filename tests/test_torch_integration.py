"""pyfa as a citizen of PyTorch: operators, torch.compile, autograd, autocast, threads, seeds."""

import threading

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import pyfa
from pyfa import request


def tensors(dtype=torch.float32, grad=True, sq=37, sk=61, heads=6, heads_k=3, dim=24):
    torch.manual_seed(0)
    shapes = [(2, sq, heads, dim), (2, sk, heads_k, dim), (2, sk, heads_k, dim)]
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


def forward_arguments(**options):
    q, k, v = tensors()
    asked = request.dense(q, k, v, request.Shared(return_lse=True, **options))
    return (*asked.call, *asked.who)


OPTIONS = {
    "plain": {},
    "everything": {
        "causal": True,
        "window": (20, None),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(6),
        "sinks": torch.randn(6),
        "bias": torch.randn(1, 6, 37, 61),
        "dropout_p": 0.2,
        "seed": 3,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck_forward(options):
    opcheck(torch.ops.pyfa.forward.default, forward_arguments(**options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck_backward(options):
    arguments = forward_arguments(**options)
    out, lse = torch.ops.pyfa.forward(*arguments)
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    opcheck(torch.ops.pyfa.backward.default, tuple(detached))


def test_opcheck_cache_operators():
    cache, new = torch.randn(2, 16, 3, 8), torch.randn(2, 4, 3, 8)
    start = torch.tensor([0, 9], dtype=torch.int32)
    opcheck(torch.ops.pyfa.append_kv.default, (cache, cache.clone(), new, new, start, None, None))
    positions = torch.arange(4).expand(2, 4)
    table = torch.randn(16, 4)
    opcheck(torch.ops.pyfa.rotary.default, (new, table, table, positions, True))


def attend(q, k, v):
    out, lse = pyfa.attention(q, k, v, causal=True, return_lse=True, dropout_p=0.1, seed=3)
    return out.float().square().sum() + lse.exp().sum()


def attend_packed(q, k, v):
    offsets = torch.tensor([0, 10, 37], dtype=torch.int32)
    keys = torch.tensor([0, 30, 61], dtype=torch.int32)
    out = pyfa.attention_varlen(q[0], k[0], v[0], offsets, keys, 27, 31, causal=True)
    return out.float().square().sum()


def attend_inside_context(q, k, v):
    with pyfa.use_backend("torch"):
        return attend(q, k, v)


def attend_inside_two_contexts(q, k, v):
    with pyfa.use_batch_invariant(), pyfa.use_backend("torch"):
        return attend(q, k, v)


@pytest.mark.parametrize(
    "function", [attend, attend_packed, attend_inside_context, attend_inside_two_contexts]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(function, dynamic):
    torch.compiler.reset()
    inputs = tensors()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    eager = torch.autograd.grad(function(*inputs), inputs)
    traced = torch.autograd.grad(compiled(*inputs), inputs)
    for x, y in zip(eager, traced, strict=True):
        assert torch.equal(x, y)


class TestCompiledMods:
    """torch.compile follows no trace of a mod: it takes the trace from eager code, also that of a
    mod that no eager call has had, and finds the tensors of the mod itself."""

    def compiled(self, function, **more):
        torch.compiler.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager", **more)

    @pytest.mark.parametrize("dynamic", [None, False, True])
    def test_without_a_break(self, dynamic):
        def graded(table, number):
            return lambda score, b, h, i, j: score * number + table[h, (i - j) % 9]

        first, second = (graded(torch.randn(6, 9), 1.0 + torch.rand(()).item()) for _ in range(2))
        lengths = torch.tensor([50, 30])
        seen = pyfa.masks.all_of(pyfa.masks.causal(), pyfa.masks.padding(lengths))

        def both(q, k, v):
            out = pyfa.attention(q, k, v, score_mod=first, mask_mod=seen)
            return out + pyfa.attention(q, k, v, score_mod=second)

        inputs = tensors()
        compiled = self.compiled(both, dynamic=dynamic)
        traced = [compiled(*inputs)]
        traced += torch.autograd.grad(traced[0].sum(), inputs)
        eager = [both(*inputs)]
        eager += torch.autograd.grad(eager[0].sum(), inputs)
        for x, y in zip(eager, traced, strict=True):
            assert torch.equal(x, y)

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_what_changes_between_calls(self, dynamic):
        number, table = 2.0, torch.randn(61)
        factor = 3

        def mod(score, b, h, i, j):
            return score * number + table[j] * factor + table.shape[0]

        def attend_to(q, k, v):
            return pyfa.attention(q, k, v, score_mod=mod)

        inputs = tensors(grad=False)
        compiled = self.compiled(attend_to, dynamic=dynamic)
        for change in ((2.0, 3, 61), (2.5, 3, 61), (-0.0, 5, 70), (0.5, 7, 80)):
            number, factor, size = change
            table = torch.randn(size)
            assert torch.equal(compiled(*inputs), attend_to(*inputs))
            table.mul_(2)
            assert torch.equal(compiled(*inputs), attend_to(*inputs))

    def test_a_captured_parameter_gets_its_gradient(self):
        table = torch.nn.Parameter(torch.randn(6, 61))

        def mod(score, b, h, i, j):
            return score + table[h, j] * 0.25

        def with_mod(q, k, v):
            return pyfa.attention(q, k, v, score_mod=mod).square().sum()

        inputs = tensors()
        (traced,) = torch.autograd.grad(self.compiled(with_mod)(*inputs), table)
        (eager,) = torch.autograd.grad(with_mod(*inputs), table)
        assert torch.equal(traced, eager)

    def test_a_mod_made_inside_is_a_break(self):
        """torch.compile cannot hand it to eager code."""

        def attend_inside(q, k, v):
            table = v[0, :, 0, 0] * 2
            return pyfa.attention(
                q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], mask_mod=pyfa.masks.causal()
            )

        inputs = tensors(grad=False)
        torch.compiler.reset()
        compiled = torch.compile(attend_inside, backend="aot_eager")
        assert torch.equal(compiled(*inputs), attend_inside(*inputs))


def test_compile_sees_a_change_of_context():
    torch.compiler.reset()
    inputs = tensors(grad=False)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled(*inputs)
    with pyfa.use_backend("cuda"), pytest.raises(pyfa.UnsupportedProblem):
        compiled(*inputs)


def test_compile_follows_batch_invariance():
    """Contexts may be set outside of what was compiled, and change between its calls."""
    torch.compiler.reset()
    seen = []
    compiled = torch.compile(
        lambda x: x + 1 if pyfa.context.is_batch_invariant() else x - 1,
        fullgraph=True,
        backend="aot_eager",
    )
    for enabled in (False, True, False):
        with pyfa.use_batch_invariant(enabled):
            seen.append(int(compiled(torch.zeros(()))))
    assert seen == [-1, 1, -1]


def test_compile_kvcache():
    torch.compiler.reset()
    q, k, v = tensors(grad=False)
    table = torch.randn(64, 12)

    def decode(q, k_cache, v_cache, k, v, lengths):
        return pyfa.attention_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True,
            rotary_cos=table, rotary_sin=table,
        )  # fmt: skip

    results = []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        caches = [torch.zeros(2, 64, 3, 24), torch.zeros(2, 64, 3, 24)]
        lengths = torch.tensor([5, 9], dtype=torch.int32)
        results.append((function(q[:, :2], *caches, k[:, :2], v[:, :2], lengths), *caches))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_inference_and_training_agree_bitwise():
    """The direct path of inference and the operator are one computation."""
    q, k, v = tensors()
    with torch.no_grad():
        direct = pyfa.attention(q, k, v, causal=True)
    assert torch.equal(direct, pyfa.attention(q, k, v, causal=True).detach())


def test_checkpoint():
    inputs = tensors()
    plain = torch.autograd.grad(attend(*inputs), inputs)
    with pyfa.use_backend("torch"):
        total = checkpoint(attend, *inputs, use_reentrant=False)
    for x, y in zip(plain, torch.autograd.grad(total, inputs), strict=True):
        assert torch.equal(x, y)


def test_backward_keeps_the_backend_of_its_forward(monkeypatch, nothing_bound):
    """Backward runs outside the context, on autograd's thread, and still where forward ran."""
    from pyfa import dispatch
    from pyfa.backends.torch.backend import TorchBackend

    ran = []

    class Recording(TorchBackend):
        NAME = "triton"

        def bind_backward(self, *args):
            bound = super().bind_backward(*args)

            def run(*tensors):
                ran.append(threading.current_thread())
                return bound(*tensors)

            return run

    monkeypatch.setitem(dispatch.BACKENDS, "triton", Recording())
    monkeypatch.setattr(dispatch, "_prepared", {})
    nothing_bound()
    inputs = tensors()
    with pyfa.use_backend("triton"):
        total = attend(*inputs)
    total.backward()
    assert len(ran) == 1
    with pyfa.use_backend("triton"):
        again = attend(*inputs)
    again.backward()
    assert len(ran) == 2


def test_only_the_lse_used():
    q, k, v = tensors()
    _, lse = pyfa.attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 24**-0.5
    expected = torch.autograd.grad(torch.logsumexp(score, -1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)


def test_autocast():
    q, k, v = tensors(grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pyfa.attention(q, k, v).dtype == torch.bfloat16
    assert pyfa.attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": None}, TypeError, "k: expected a tensor; got NoneType"),
        ({"v": 1}, TypeError, "v: expected a tensor; got int"),
        ({"k": torch.int32, "v": torch.int32}, ValueError, "k: expected q's dtype"),
        (dict.fromkeys("qkv", torch.float64), ValueError, "q: expected float16, bfloat16"),
    ],
)
def test_autocast_casts_what_pytorch_casts(change, error, message):
    given = dict(zip("qkv", tensors(grad=False), strict=True))
    for name, x in change.items():
        given[name] = given[name].to(x) if isinstance(x, torch.dtype) else x
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(error, match=f"^{message}"),
    ):
        pyfa.attention(**given)


def test_seeds():
    q, k, v = tensors(grad=False)

    def run(seed):
        return pyfa.attention(q, k, v, dropout_p=0.5, seed=seed)

    assert torch.equal(run(5), run(torch.tensor(5)))
    assert torch.equal(run(2**64 - 1), run(-1))
    assert torch.equal(run(np.int64(5)), run(5))
    assert torch.equal(run(np.uint64(2**64 - 1)), run(-1))
    assert torch.equal(*(pyfa.attention(q, k, v, seed=x) for x in (np.int64(5), None)))
    assert not torch.equal(run(5), run(6))
    torch.manual_seed(1)
    first = run(None)
    assert not torch.equal(first, run(None))
    torch.manual_seed(1)
    assert torch.equal(first, run(None))


def test_threads():
    """Contexts belong to their thread; the cache of prepared calls is shared."""
    q, k, v = tensors(grad=False)
    expected = pyfa.attention(q, k, v, causal=True)
    failures = []

    def work(name):
        with pyfa.use_backend(name):
            for _ in range(20):
                try:
                    same = torch.equal(pyfa.attention(q, k, v, causal=True), expected)
                    if name != "torch" or not same:
                        failures.append(name)
                except pyfa.UnsupportedProblem:
                    if name == "torch":
                        failures.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in ("torch", "cuda") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_transforms_are_refused_not_wrong():
    q, k, v = tensors(grad=False)

    def attend(x):
        return pyfa.attention(x, k, v)

    for transform in (
        lambda: torch.func.jvp(attend, (q,), (q,)),
        lambda: torch.func.grad(lambda x: attend(x).sum())(q),
        lambda: torch.func.vmap(attend)(q[None]),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            transform()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            attend(dual)
        attend(q)


def test_prepared_calls_do_not_grow_with_sizes():
    from pyfa import dispatch

    q, k, v = tensors(grad=False, sq=64, sk=64)
    pyfa.attention(q, k, v)
    before = len(dispatch._prepared)
    # Sizes are rounded in 8 steps from a power of two to the next: 36, 40, … 64.
    for _ in range(2):
        for length in range(33, 65):
            pyfa.attention(q[:, :length], k[:, :length], v[:, :length])
        assert before <= len(dispatch._prepared) <= before + 7


def test_inputs_may_be_views():
    torch.manual_seed(0)
    packed = torch.randn(2, 40, 3, 4, 24)
    q, k, v = packed.unbind(2)
    expected = pyfa.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(pyfa.attention(q, k, v, causal=True), expected)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(pyfa.attention(*swapped, causal=True), expected)
