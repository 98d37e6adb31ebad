"""``attention_latent`` and ``append_latent``: arguments, lists, what reaches a backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pyfa
from pyfa import dispatch, latent
from pyfa.conformance import grid, runner
from pyfa.conformance.build import build
from pyfa.conformance.examine import Expected, examine
from pyfa.problem import FEATURES, Call, features_of

SCALE = 192**-0.5


def tensors(batch: int = 2, rows: int = 1, heads: int = 4, keys: int = 40) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return torch.randn(batch, rows, heads, 576), torch.randn(batch, keys, 1, 576)


def expected(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out (H, 512) and LSE (H,) of one row over ``keys`` (n, 576), in float64."""
    scores = q.double() @ keys.double().T * SCALE
    return scores.softmax(-1) @ keys[:, :512].double(), scores.logsumexp(-1)


def refused(match: str, q: Any, cache: Any, error: type[Exception] = ValueError, **more: Any):
    with pytest.raises(error, match=match):
        pyfa.attention_latent(q, cache, **{"scale": SCALE, **more})


class TestArguments:
    def test_scale_is_required_and_the_message_has_the_formula(self) -> None:
        q, cache = tensors()
        formula = r"^scale: expected a number.*\(qk_nope_head_dim \+ qk_rope_head_dim\) \*\* -0.5"
        with pytest.raises(TypeError, match=formula):
            pyfa.attention_latent(q, cache)

    def test_other_names_are_recognized(self) -> None:
        q, cache = tensors()
        refused("did you mean 'page_table'", q, cache, TypeError, block_table=None)

    def test_shapes(self) -> None:
        q, cache = tensors()
        refused("^cache: expected one head", q, cache.expand(-1, -1, 2, -1))
        refused("^cache: expected a tensor", q, None, TypeError)
        refused("^q: expected the cache's head_dim 576; got 512 elements", q[..., :512], cache)
        refused("^q: expected 4 dimensions", q[0], cache)
        refused("^v_dim: expected 1 to 512", q, cache, v_dim=513)
        refused("^v_dim: expected 1 to 64", q[..., :64], cache[..., :64], v_dim=65)
        refused("^v_dim: expected an int", q, cache, TypeError, v_dim=512.0)
        wide = torch.zeros(2, 3, 1, 584)
        refused("^cache: expected a head_dim from 1 to 576", torch.zeros(2, 1, 4, 584), wide)
        refused("^cache: expected q's batch size 2; got", q, cache[:1])
        refused("^cache: expected q's dtype torch.float32", q, cache.half())
        table = torch.zeros(2, 1, dtype=torch.int32)
        refused("^cache: expected pages of one key or more", q, cache[:, :0], page_table=table)

    def test_a_pair_of_queries(self) -> None:
        q, cache = tensors()
        out = pyfa.attention_latent((q[..., :512], q[..., 512:]), cache, scale=SCALE)
        assert torch.equal(out, pyfa.attention_latent(q, cache, scale=SCALE))
        refused(r"^q\[0\] \(nope\): expected v_dim = 512", (q[..., :500], q[..., 500:]), cache)
        refused(r"^q\[1\] \(rope\)", (q[..., :512], q[:1, ..., 512:]), cache)
        refused("^q: expected a tensor or a pair", (q, q, q), cache)
        scalar = torch.tensor(1.0)
        refused("^q: expected 4 dimensions", (scalar, scalar), cache)
        refused("^q: expected 4 dimensions", scalar, cache)
        refused("^q: expected a dense tensor", torch.nested.nested_tensor([q[0]]), cache)

    def test_lists(self) -> None:
        q, cache = tensors()
        lists = torch.zeros(2, 1, 5, dtype=torch.int32)
        refused("^indices: expected dtype int32", q, cache, indices=lists.long())
        refused(r"^indices: expected shape \(2, 1, topk\)", q, cache, indices=lists[0])
        refused(r"^indices: expected shape \(2, 1, 5\)", q, cache, indices=lists[:1])
        lengths = torch.zeros(2, dtype=torch.int32)
        refused("^topk_lengths: expected None", q, cache, topk_lengths=lengths)
        refused(
            r"^topk_lengths: expected shape \(2,\)", q, cache, indices=lists,
            topk_lengths=lengths[:1],
        )  # fmt: skip

    def test_scales_are_for_float8(self) -> None:
        q, cache = tensors()
        one = torch.ones(())
        refused("^descale: expected two scales", q, cache, descale=(None, one, one))
        refused("^descale: expected None for torch.float32", q, cache, descale=(None, one))

    def test_no_gradient(self) -> None:
        q, cache = tensors()
        why = r" expected no requires_grad \(attention_latent has none"
        refused(f"^q:{why}", q.clone().requires_grad_(), cache)
        pyfa.attention_latent(q, cache, scale=0.1)  # what it binds is not for the next call
        refused(f"^cache:{why}", q, cache.requires_grad_())


class TestLists:
    """Against what the lists say, key by key."""

    @pytest.mark.parametrize("paged", [False, True])
    @pytest.mark.parametrize("gaps", [False, True])
    def test_repeats_none_and_lengths(self, paged: bool, gaps: bool) -> None:
        q, cache = tensors(rows=2)
        if gaps:
            whole = torch.full((2, 43, 1, 584), torch.nan)
            whole[:, :40, :, :576] = cache
            cache = whole[:, :40, :, :576]
        table = None
        if paged:
            # Pages of 8 keys; sequence 1 has those of sequence 0 in another order.
            table = torch.tensor([[4, 2, 0, 1, 3], [1, 0, 3, 2, 4]], dtype=torch.int32)
            cache = cache[0].reshape(5, 8, 1, 576) if not gaps else cache[0].unflatten(0, (5, 8))
        used = torch.tensor([40, 17], dtype=torch.int32)
        lists = torch.tensor(
            [[[3, 3, -1, 39, 40, 7], [-1, -1, -1, -1, -1, -1]],
             [[16, 17, 5, -1, 5, 5], [0, 1, 2, 3, 4, 5]]], dtype=torch.int32
        )  # fmt: skip
        ends = torch.tensor([[6, 6], [5, 2]], dtype=torch.int32)
        out, lse = pyfa.attention_latent(
            q, cache, scale=SCALE, cache_seqlens=used, indices=lists, topk_lengths=ends,
            page_table=table, return_lse=True,
        )  # fmt: skip
        seen = {(0, 0): [3, 3, 39, 7], (1, 0): [16, 5, 5], (1, 1): [0, 1]}
        for (b, i), keys in seen.items():
            stored = cache[b, :, 0] if table is None else cache[table[b].long()].flatten(0, 2)
            want, want_lse = expected(q[b, i], stored[keys])
            torch.testing.assert_close(out[b, i], want.float())
            torch.testing.assert_close(lse[b, :, i], want_lse.float())
        assert (out[0, 1] == 0).all()
        assert (lse[0, :, 1] == -math.inf).all()

    def test_causal_hides_what_lies_behind_a_row(self) -> None:
        q, cache = tensors(batch=1, rows=3)
        lists = torch.arange(40, dtype=torch.int32).expand(1, 3, 40).contiguous()
        out = pyfa.attention_latent(q, cache, scale=SCALE, indices=lists, causal=True)
        want = pyfa.attention_latent(q, cache, scale=SCALE, causal=True)
        torch.testing.assert_close(out, want)

    def test_empty_lists(self) -> None:
        q, cache = tensors()
        lists = torch.zeros(2, 1, 0, dtype=torch.int32)
        out, lse = pyfa.attention_latent(q, cache, scale=SCALE, indices=lists, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_calls_that_come_again_are_bound() -> None:
    q, cache = tensors()
    first = pyfa.attention_latent(q, cache, scale=SCALE, cache_seqlens=None)
    cache.mul_(0.5)
    again = pyfa.attention_latent(q, cache, scale=SCALE, cache_seqlens=None)
    want, _ = expected(q[1, 0], cache[1, :, 0])
    torch.testing.assert_close(again[1, 0], want.float())
    assert not torch.equal(first, again)


class TestAppend:
    @pytest.mark.parametrize("pair", [False, True])
    @pytest.mark.parametrize("dim", [576, 512])
    def test_rows_and_pages(self, pair: bool, dim: int) -> None:
        torch.manual_seed(0)
        new = torch.randn(2, 3, 1, dim)
        given = (new[..., :512], new[..., 512:]) if pair else new
        used = torch.tensor([6, 0], dtype=torch.int32)
        cache = torch.full((2, 10, 1, dim), torch.nan)
        pyfa.append_latent(cache, given, used)
        assert torch.equal(cache[0, 6:9], new[0])
        assert torch.equal(cache[1, :3], new[1])
        assert cache.isnan().sum() == 14 * dim
        pages = torch.full((5, 4, 1, dim), torch.nan)
        table = torch.tensor([[3, 1, 4], [0, 2, 2]], dtype=torch.int32)
        pyfa.append_latent(pages, given, used, page_table=table)
        assert torch.equal(torch.cat((pages[1, 2:], pages[4, :1])), new[0])
        assert torch.equal(pages[0, :3], new[1])
        assert pages.isnan().sum() == 14 * dim

    def test_refusals(self) -> None:
        cache, new = torch.zeros(2, 4, 1, 576), torch.zeros(2, 3, 1, 576)
        used = torch.tensor([2, 0], dtype=torch.int32)
        for match, wrong, lengths in (
            ("^cache_seqlens: expected lengths from 0 to 4", new, used),
            ("^new: expected the cache's dtype", new.half(), 0),
            ("^new: expected the cache's head_dim 576; got 575", new[..., 1:], 0),
            ("^new: expected one head", new.expand(-1, -1, 2, -1), 0),
        ):
            with pytest.raises(ValueError, match=match):
                pyfa.append_latent(cache, wrong, lengths)


class TestBackends:
    def test_a_case_names_the_features_of_its_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The grid's idea of what lists need is the dispatcher's."""
        asked: list[Call] = []
        prepare = dispatch.prepare
        monkeypatch.setattr("pyfa.bound.prepare", lambda call, *who: asked.append(call) or prepare(
            call, *who))  # fmt: skip
        cases = grid.cases("quick", frozenset(FEATURES), ("bfloat16",), ["topk"], 9)
        for case in cases:
            asked.clear()
            examine(Expected(build(case)), "torch", runner.device_of("emulator"))
            assert [features_of(call, False, False) for call in asked[:1]] == [case.features]

    @pytest.mark.parametrize("name", ["MI300X", "H200"])
    @pytest.mark.parametrize(
        ("words", "options"),
        [
            ("dropout", {"dropout_p": 0.1, "seed": 1}),
            ("ALiBi", {"alibi_slopes": torch.ones(16)}),
            ("bias", {"bias": torch.zeros(2, 16, 1, 40)}),
        ],
    )
    def test_what_decode_lacks_is_a_reason(
        self, name: str, words: str, options: dict[str, Any]
    ) -> None:
        q, cache = (x.bfloat16() for x in tensors(heads=16))
        answer = pyfa.explain(q, cache, cache[..., :512], latent=True, device=name, **options)
        assert answer.chosen == "triton"
        assert f"latent attention with {words} is not implemented" in str(answer)

    @pytest.mark.parametrize("name", ["MI300X", "H200", "A100-80GB", "RTX4090"])
    def test_gpus_take_it_by_decode_with_v_in_place(self, name: str) -> None:
        q, cache = (x.bfloat16() for x in tensors(heads=16))
        answer = pyfa.explain(q, cache, cache[..., :512], latent=True, device=name)
        chosen = next(one for one in answer.answers if one.backend == answer.chosen)
        assert chosen.plan is not None
        assert "attn_decode" in chosen.plan.kernel
        assert dict(chosen.plan.constants)["LATENT"] == 1

    def test_a_cache_of_two_heads_is_refused(self) -> None:
        q, cache = tensors(heads=16)
        cache = cache.expand(-1, -1, 2, -1)
        with pytest.raises(ValueError, match=r"^cache: expected one head"):
            pyfa.explain(q, cache, cache[..., :512], latent=True, device="MI300X")

    def test_a_cache_that_is_not_on_16_bytes_goes_to_triton_with_a_reason(self) -> None:
        cache = torch.zeros(2, 8, 1, 580, dtype=torch.bfloat16)[..., :576]
        q = torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16)
        answer = pyfa.explain(q, cache, cache[..., :512], latent=True, device="MI300X")
        assert answer.chosen == "triton"
        assert "multiples of 16 bytes" in str(answer)


class TestAppendRefuses:
    """What ``append_latent`` refuses before it writes anything."""

    def refused(
        self, match: str, cache: torch.Tensor, new: Any, used: Any = 3, **more: Any
    ) -> None:
        before = cache.detach().clone()
        with pytest.raises(ValueError, match=match):
            pyfa.append_latent(cache, new, used, v_dim=16, **more)
        assert torch.equal(cache, before)

    def test_a_gradient(self) -> None:
        """There is none: without this error the cache would become part of a graph."""
        cache, new = torch.zeros(2, 9, 1, 24), torch.ones(2, 1, 1, 24, requires_grad=True)
        self.refused("^new: expected no requires_grad", cache, new)
        pair = new[..., :16].detach(), new[..., 16:]
        self.refused("^new: expected no requires_grad", cache, pair)
        self.refused("^cache: expected no requires_grad", cache.requires_grad_(), new.detach())
        with torch.no_grad():
            pyfa.append_latent(cache, new, 3, v_dim=16)
        assert (cache[:, 3] == 1).all()

    def test_pages_outside_of_the_cache(self) -> None:
        cache, new = torch.zeros(5, 4, 1, 24), torch.ones(2, 2, 1, 24)
        used = torch.tensor([3, 3], dtype=torch.int32)
        for page in (7, -3):
            table = torch.tensor([[1, 0, 2], [4, page, 3]], dtype=torch.int32)
            self.refused(
                f"^page_table: expected pages from 0 to 4; got {page}",
                cache, new, used, page_table=table,
            )  # fmt: skip
            pyfa.append_latent(cache, new[:, :1], used, v_dim=16, page_table=table)  # not in use
            cache.zero_()

    def test_shapes(self) -> None:
        cache, scalar = torch.zeros(2, 9, 1, 24), torch.tensor(1.0)
        for new in (scalar, (scalar, scalar)):
            self.refused("^new: expected 4 dimensions", cache, new)
        flat = torch.ones(2, 1, 24)
        self.refused(r"^new: expected 4 dimensions .*; got shape \(2, 1, 24\)", cache, flat)

    def test_the_batch_is_that_of_new(self) -> None:
        self.refused("^cache: expected new's batch size 3", torch.zeros(2, 9, 1, 24),
                     torch.ones(3, 1, 1, 24))  # fmt: skip


def test_listed_pages_outside_of_the_cache() -> None:
    q, cache = torch.randn(1, 2, 4, 24), torch.randn(5, 4, 1, 24)
    lists = torch.tensor([[[0, 1, -1], [5, 30, 2]]], dtype=torch.int32)
    options = {"v_dim": 16, "scale": 1.0, "indices": lists}
    table = torch.tensor([[1, 3, -9]], dtype=torch.int32)  # no listed key lies in the last page
    pyfa.attention_latent(q, cache, page_table=table, **options)
    table[0, 1] = 5
    # Where pages alternate, the key 0 of a page too many would be the key 1 of the first.
    woven = torch.randn(4, 5, 1, 24).transpose(0, 1)
    for each in (cache, woven):
        with pytest.raises(ValueError, match=r"^page_table: expected pages from 0 to 4; got 5"):
            pyfa.attention_latent(q, each, page_table=table, **options)


def test_lists_of_no_sequence() -> None:
    q, cache = torch.randn(0, 3, 4, 24), torch.randn(0, 9, 1, 24)
    lists = torch.zeros(0, 3, 5, dtype=torch.int32)
    out, lse = pyfa.attention_latent(q, cache, v_dim=16, scale=1.0, indices=lists, return_lse=True)
    assert out.shape == (0, 3, 4, 16)
    assert lse.shape == (0, 4, 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_lists_compile_without_a_break(dynamic: bool) -> None:
    torch.compiler.reset()
    q, cache = torch.randn(2, 3, 4, 24), torch.randn(2, 9, 2, 30)[:, 1:, :1, 3:27]
    lists = torch.randint(-1, 9, (2, 3, 5), dtype=torch.int32)

    def sparse(*args: Any) -> Any:
        return pyfa.attention_latent(*args[:2], indices=args[2], v_dim=16, scale=1.0, causal=True)

    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(q, cache, lists), sparse(q, cache, lists))


def test_pages_of_one_key_are_a_view() -> None:
    """The pages of one key are a view of the cache, whatever its gaps."""
    cache = torch.arange(3 * 5 * 24.0).view(3, 5, 1, 24)[:, 1:4, :, 8:]
    flat, store, key = latent._rows_of(cache)
    for b in range(3):
        for j in range(3):
            assert torch.equal(flat[b * store + j * key, 0], cache[b, j])
    assert flat.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_batch_invariance_is_declined() -> None:
    q, cache = torch.randn(1, 1, 2, 576).half(), torch.randn(1, 5, 1, 576).half()
    with (
        pyfa.use_batch_invariant(),
        pytest.raises(pyfa.UnsupportedProblem, match="the split of its keys"),
    ):
        pyfa.attention_latent(q, cache, scale=192**-0.5)
