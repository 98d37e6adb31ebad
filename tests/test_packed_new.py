"""``attention_kvcache`` with packed new keys, against one sequence after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS, NEW, ROWS = (5, 0, 7, 2), (2, 3, 0, 4), (1, 3, 2, 1)
STARTS_NEW, STARTS_Q = ints(0, 2, 5, 5, 9), ints(0, 1, 4, 6, 7)


def starts(paged: bool) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """k and v caches of 12 keys, where their sequences lie, and the same in order."""
    torch.manual_seed(0)
    if paged:
        pages, table = torch.randn(2, 12, 4, 2, 16), torch.randperm(12).int().view(4, 3)
        return pages, {"page_table": table}, pages[:, table.long()].flatten(2, 3)
    caches, index = torch.randn(2, 6, 12, 2, 16), ints(2, 0, 5, 1)
    return caches, {"cache_batch_idx": index}, caches[:, index.long()]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_each_sequence_has_its_own_number(paged: bool, rotary: bool, backend: str) -> None:
    caches, where, gathered = starts(paged)
    dtype = torch.float32 if backend == "torch" else torch.bfloat16
    caches, gathered = caches.to(dtype), gathered.to(dtype)
    # Three rows of no sequence, as engines leave them that capture graphs.
    k, v = torch.randn(2, 12, 2, 16).to(dtype)
    k[9:], v[9:] = torch.nan, torch.nan
    q = torch.randn(7, 4, 16).to(dtype)
    angle = torch.rand(16, 8)
    options: dict[str, Any] = {"causal": True, "attention_chunk": 6, "return_lse": True}
    if rotary:
        options |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    out, lse = pyfa.attention_kvcache(
        q, *caches, k=k, v=v, cache_seqlens=ints(*LENGTHS), cu_seqlens_q=STARTS_Q, max_seqlen_q=3,
        cu_seqlens_new=STARTS_NEW, backend=backend, **where, **options,
    )  # fmt: skip
    for b in range(4):
        one = gathered[:, b : b + 1].clone()
        mine, news = (slice(*x[b : b + 2].tolist()) for x in (STARTS_Q, STARTS_NEW))
        want, want_lse = pyfa.attention_kvcache(
            q[None, mine], *one, k=k[None, news], v=v[None, news], backend=backend,
            cache_seqlens=ints(LENGTHS[b]), **options,
        )  # fmt: skip
        assert want.shape[1] == ROWS[b]
        torch.testing.assert_close(out[None, mine], want)
        torch.testing.assert_close(lse[None, :, mine], want_lse)
        place = where["page_table"][b].long() if paged else where["cache_batch_idx"][b]
        have = caches[:, place].flatten(1, 2) if paged else caches[:, place]
        # One row's rotary is the same in a batch of any shape, to the last bit or one of them.
        torch.testing.assert_close(have, one[:, 0])
        end = LENGTHS[b] + NEW[b]
        assert torch.equal(have[:, end:], gathered[:, b, end:])


def test_rows_beyond_the_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can ask for the values, as on a GPU: what fits is written, and nothing else."""
    from pyfa import request
    from pyfa.problem import Append, Call

    cache, k = torch.zeros(2, 4, 1, 8), torch.arange(1.0, 7.0)[:, None, None].expand(6, 1, 8)
    q, used = torch.zeros(2, 1, 1, 8), ints(2, 4)
    call = Call(q, cache, cache.clone(), seqused_k=used, max_seqlen_q=1, max_seqlen_k=4)
    request.appended(call, Append(k, k, cu_seqlens=ints(0, 4, 5)))
    assert cache[..., 0, 0].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    request.appended(call, Append(k, k, cu_seqlens=ints(0, 0, 0)))
    assert cache[..., 0, 0].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_new": ints(0, 2)}, "cu_seqlens_new: expected shape"),
        ({"cu_seqlens_new": ints(0, 2, 5)}, r"cu_seqlens_new: expected at most 4"),
        ({"cu_seqlens_new": ints(0, 3, 2)}, "cu_seqlens_new: expected values that do not decrease"),
        ({"cu_seqlens_new": torch.tensor([0, 2, 4])}, "cu_seqlens_new: expected dtype int32"),
        ({"k": torch.ones(2, 2, 2, 8)}, r"k: expected shape \(total_new, 2, 8\)"),
        ({"v": torch.ones(3, 2, 8)}, r"v: expected shape \(total_new, 2, 8\)"),
        ({"v": None}, "v: expected k and v together: a call appends both"),
        ({"k": None, "v": None}, "cu_seqlens_new: expected None without k and v"),
        ({"cache_seqlens": ints(0, 3)}, r"cache_seqlens: expected .* \(with \[2, 2\] new keys\)"),
        ({"cu_seqlens_new": None}, r"k: expected shape \(2, new, 2, 8\)"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    change: dict[str, Any], message: str
) -> None:
    caches, k = torch.zeros(2, 2, 4, 2, 8), torch.ones(4, 2, 8)
    given = {"k": k, "v": k, "cache_seqlens": ints(0, 0), "cu_seqlens_new": ints(0, 2, 4)}
    with pytest.raises(ValueError, match=message):
        pyfa.attention_kvcache(torch.randn(2, 1, 2, 8), *caches, **(given | change))
    assert not bool(caches.any())
