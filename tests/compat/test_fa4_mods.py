"""flash-attention 4's score_mod, mask_mod, aux_tensors and block_sparse_tensors."""

import functools
import math
import types
from typing import NamedTuple

import pytest
import torch

import pyfa
from pyfa import mods
from pyfa.compat import fa4, fa4_blocks, fa4_interface
from pyfa.mods.captured import dependencies_of

B, ROWS, KEYS, H, D = 2, 40, 70, 4, 16
DOCUMENT = torch.arange(KEYS).expand(B, H, KEYS) // 30


class BlockSparseTensors(NamedTuple):
    """The fields of theirs."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def _inputs(heads_k=2):
    generator = torch.Generator().manual_seed(4)
    shapes = ((B, ROWS, H, D), *2 * ((B, KEYS, heads_k, D),))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def causal_mask(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    return n_idx <= m_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)


def document_mask(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    return aux_tensors[0][batch, head, m_idx] == aux_tensors[0][batch, head, n_idx]


def limited_mask(batch, head, m_idx, n_idx, seqlen_info, aux_tensors, aux_scalars):
    return n_idx < aux_scalars[0]


def biased(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + aux_tensors[1][h] * (q_idx - kv_idx).abs()


def _dense(seen):
    return torch.tensor([[[[seen(b, h, i, j) for j in range(KEYS)] for i in range(ROWS)]
                          for h in range(H)] for b in range(B)])  # fmt: skip


def _bias(value):
    b, h, i, j = (torch.arange(n) for n in (B, H, ROWS, KEYS))
    given = b[:, None, None, None], h[:, None, None], i[:, None], j
    return value(*given).expand(B, H, ROWS, KEYS).float()


def test_masks_and_scores_as_a_dense_bias():
    q, k, v = _inputs()
    slopes = torch.linspace(-0.1, 0.1, H)
    out, lse = fa4.flash_attn_func(
        q, k, v, causal=True, window_size=(3, 3), score_mod=biased, mask_mod=document_mask,
        aux_tensors=[DOCUMENT, slopes], return_lse=True,
    )  # fmt: skip
    bias = _bias(lambda b, h, i, j: slopes[h] * (i - j).abs())
    hidden = _dense(lambda b, h, i, j: DOCUMENT[b, h, i] != DOCUMENT[b, h, j])
    expected = pyfa.attention(q, k, v, bias=bias.masked_fill(hidden, -math.inf), return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    # Their own shift is that of the bottom right, where causal stands.
    out, _ = fa4.flash_attn_func(q, k, v, mask_mod=causal_mask)
    torch.testing.assert_close(out, fa4.flash_attn_func(q, k, v, causal=True)[0])
    out, _ = fa4.flash_attn_func(q, k, v, mask_mod=limited_mask, aux_scalars=(9,))
    torch.testing.assert_close(out, fa4.flash_attn_func(q, k[:, :9], v[:, :9])[0])


def test_gradients_without_a_backward_of_theirs():
    q, k, v = (x.requires_grad_() for x in _inputs())
    slopes = torch.linspace(-0.1, 0.1, H, requires_grad=True)
    out, _ = fa4.flash_attn_func(
        q,
        k,
        v,
        score_mod=biased,
        score_mod_bwd=lambda *given: given,
        aux_tensors=[DOCUMENT, slopes],
    )
    found = torch.autograd.grad(out.square().sum(), (q, k, v, slopes))
    again = slopes.detach().requires_grad_()
    bias = _bias(lambda b, h, i, j: again[h] * (i - j).abs())
    out = pyfa.attention(q, k, v, bias=bias)
    for x, y in zip(found, torch.autograd.grad(out.square().sum(), (q, k, v, again)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_packed_sequences_know_their_lengths_and_where_they_begin():
    q, k, v = (x[0] for x in _inputs())
    offsets_q = torch.tensor([0, 12, ROWS], dtype=torch.int32)
    offsets_k = torch.tensor([0, 30, KEYS], dtype=torch.int32)
    gain = torch.linspace(0.5, 2.0, KEYS)

    def of_place(score, b, h, q_idx, kv_idx, info, aux):
        return score * aux[0][kv_idx + info.offset_k] + aux[0][q_idx + info.offset_q]

    out, _ = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, score_mod=of_place,
        mask_mod=causal_mask, aux_tensors=[gain],
    )  # fmt: skip
    for (a, b), (c, d) in (((0, 12), (0, 30)), ((12, ROWS), (30, KEYS))):
        mine = [x[None] for x in (q[a:b], k[c:d], v[c:d])]
        expected = pyfa.attention(
            *mine,
            causal=True,
            score_mod=lambda s, _, h, i, j, c=c, a=a: s * gain[j + c] + gain[i + a],
        )
        torch.testing.assert_close(out[a:b], expected[0])
    used = torch.tensor([10, 20], dtype=torch.int32)
    out, _ = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, seqused_k=used,
        mask_mod=causal_mask,
    )  # fmt: skip
    expected, _ = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, seqused_k=used, causal=True
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("size", [(16, 32), None])
def test_blocks(size):
    q, k, v = _inputs()
    rows, keys = size or (40, 128)  # inferred from the one block of rows, and their tile
    m, n = -(-ROWS // rows), -(-KEYS // keys)
    generator = torch.Generator().manual_seed(1)
    state = torch.randint(0, 3, (B, 1, m, n), generator=generator) if n > 1 else torch.ones(
        B, 1, m, n, dtype=torch.int64
    )  # fmt: skip
    state[0, 0, 0, 0], state[1, 0, -1, 0] = 2, 1

    def listed(kind):
        there = state == kind
        order = torch.argsort((~there).int(), dim=-1, stable=True)
        return there.sum(-1).int(), order.int()

    tensors = BlockSparseTensors(*listed(1), *listed(2), block_size=size)
    out, _ = fa4.flash_attn_func(
        q, k, v, mask_mod=document_mask, aux_tensors=[DOCUMENT], block_sparse_tensors=tensors
    )
    seen = _dense(
        lambda b, h, i, j: bool(
            state[b, 0, i // rows, j // keys] == 2
            or (state[b, 0, i // rows, j // keys] == 1 and DOCUMENT[b, h, i] == DOCUMENT[b, h, j])
        )
    )
    torch.testing.assert_close(out, pyfa.attention(q, k, v, bias=seen))


def test_what_is_refused():
    q, k, v = _inputs()
    cute = types.ModuleType("cutlass.cute")
    known = {"cute": cute, "__name__": "theirs"}
    exec(
        "def score_mod_times_two(s, b, h, q, kv, info, aux):\n    return cute.full_like(s, 2)\n",
        known,
    )
    plain = known["score_mod_times_two"]

    @functools.wraps(plain)
    def jitted(*given):
        return plain(*given)

    for mod in (plain, jitted):
        with pytest.raises(NotImplementedError, match=r"score_mod_times_two, .*:1: .*CuTe DSL"):
            fa4.flash_attn_func(q, k, v, score_mod=mod)
    with pytest.raises(fa4.ArgumentError, match="softcap: expected 0 with a score_mod"):
        fa4.flash_attn_func(q, k, v, softcap=2.0, score_mod=biased)
    with pytest.raises(TypeError, match="mask_mod: expected a function; got int"):
        fa4.flash_attn_func(q, k, v, mask_mod=1)
    with pytest.raises(TypeError, match=r"aux_tensors\[0\]: expected a tensor"):
        fa4.flash_attn_func(q, k, v, mask_mod=document_mask, aux_tensors=[3])
    one = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 1, dtype=torch.int32)
    with pytest.raises(fa4.ArgumentError, match=r"expected a block_size, .* may have 14 to 19"):
        fa4.flash_attn_func(q, k, v, block_sparse_tensors=BlockSparseTensors(*one))
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_sparse_tensors: not implemented with qv"):
        fa4.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, block_sparse_tensors=one
        )
    with pytest.raises(NotImplementedError, match="score_mod: its gradient flows through"):
        fa4_interface._flash_attn_bwd(
            q, k, v, q, q, q, score_mod=biased, seqused_k=torch.tensor([KEYS] * B)
        )


def test_the_private_functions_take_mods_and_blocks_of_either_direction():
    q, k, v = (x.requires_grad_() for x in _inputs())
    aux = [DOCUMENT, torch.linspace(-0.1, 0.1, H)]
    given = {"score_mod": biased, "mask_mod": document_mask, "aux_tensors": aux}
    blocks = fa4_blocks.compute_block_sparsity(8, 10, B, H, ROWS, KEYS, document_mask, aux, "cpu")
    assert blocks.full_block_cnt.sum()
    assert blocks.mask_block_cnt.sum()
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True, **given)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v = (x.detach() for x in (q, k, v))
    found = fa4_interface._flash_attn_fwd(
        q, k, v, return_lse=True, block_sparse_tensors=blocks, **given
    )
    torch.testing.assert_close(found[:2], (out.detach(), lse.detach()))
    by_keys = fa4_blocks.transposed(blocks)
    assert by_keys.mask_block_idx.shape == (B, H, 7, 5)
    grads = fa4_interface._flash_attn_bwd(
        q, k, v, *found[:1], dout, found[1], block_sparse_tensors=by_keys, **given
    )
    for x, y in zip(grads, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("full", [True, False])
def test_block_sparsity_of_dense_and_packed_sequences(full):
    lengths = [(40, 70), (17, 30)]
    offsets = [torch.tensor([0, *torch.tensor(x).cumsum(0)]) for x in zip(*lengths, strict=True)]
    packed = fa4_blocks.compute_block_sparsity(
        16, 32, 2, 1, 40, 70, causal_mask, None, "cpu", compute_full_blocks=full,
        cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
    )  # fmt: skip
    begin, at = 0, 0
    for rows, keys in lengths:
        dense = fa4_blocks.compute_block_sparsity(
            16, 32, 1, 1, rows, keys, causal_mask, None, "cpu", compute_full_blocks=full
        )
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        seen = j <= i + keys - rows
        for m, of_rows in enumerate(seen.split(16)):
            states = [(x.any() and not x.all(), x.all()) for x in of_rows.split(32, dim=1)]
            width = len(states)
            for which in range(1 + full):
                expected = [n for n, state in enumerate(states) if state[which]]
                counts, indices = dense[2 * which : 2 * which + 2]
                count = int(counts[0, 0, m])
                assert indices[0, 0, m, :count].tolist() == expected
                counts, indices = packed[2 * which : 2 * which + 2]
                assert int(counts[0, begin + m]) == count
                place = at + m * width
                assert indices[0, place : place + count].tolist() == expected
        assert full or dense.full_block_cnt is None
        begin, at = begin + -(-rows // 16), at + -(-rows // 16) * -(-keys // 32)


def test_another_call_is_not_traced_again():
    # A new table of the same kind, as every batch has one.
    q = _inputs()[0]
    digests = set()
    for seed in range(2):
        slopes = torch.randn(H, generator=torch.Generator().manual_seed(seed))
        made = fa4.pyfas_mods(biased, None, [DOCUMENT, slopes], None, fa4.Lengths(ROWS, KEYS))
        assert dependencies_of(made["score_mod"]) is not None
        digests.add(mods.resolve(made["score_mod"], None, q.device)[0])
    assert len(digests) == 1
