"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary: by the formula, in place, packed."""

from __future__ import annotations

import inspect

import pytest
import torch

from pyfa.compat import rotary
from pyfa.compat.rotary import RotaryEmbedding, apply_rotary, apply_rotary_emb


def test_parameters_are_flash_attentions() -> None:
    expected = {
        rotary.apply_rotary: "x cos sin seqlen_offsets cu_seqlens max_seqlen interleaved inplace "
        "conjugate",
        rotary.apply_rotary_emb: "x cos sin interleaved inplace seqlen_offsets cu_seqlens "
        "max_seqlen",
        rotary.apply_rotary_emb_qkv_: "qkv cos sin cos_k sin_k interleaved seqlen_offsets "
        "num_heads_q",
        rotary.apply_rotary_emb_kv_: "kv cos sin interleaved seqlen_offsets",
        RotaryEmbedding: "dim base interleaved scale_base device",
        RotaryEmbedding.forward: "self qkv kv seqlen_offset max_seqlen num_heads_q",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split()


def turned(x: torch.Tensor, angle: torch.Tensor, interleaved: bool, first: int = 0) -> torch.Tensor:
    """x (S, H, D) turned pair by pair in its plane, row s by ``angle[first + s]``."""
    out = x.clone()
    for i in range(angle.shape[1]):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + angle.shape[1])
        turn = angle[first : first + x.shape[0], i, None]
        out[..., a] = x[..., a] * turn.cos() - x[..., b] * turn.sin()
        out[..., b] = x[..., a] * turn.sin() + x[..., b] * turn.cos()
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    """Position by position, the rotation of a plane per pair."""
    x, angle = torch.randn(2, 3, 2, 10), torch.rand(9, 4)
    offsets = torch.tensor([0, 5])
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=offsets)
    for i in range(4):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
        turn = torch.stack([angle[:3, i], angle[5:8, i]])[..., None]
        a, b = x[..., first], x[..., second]
        torch.testing.assert_close(out[..., first], a * turn.cos() - b * turn.sin())
        torch.testing.assert_close(out[..., second], a * turn.sin() + b * turn.cos())
    assert torch.equal(out[..., 8:], x[..., 8:])


@pytest.mark.parametrize("inplace", [False, True])
def test_packed_rows_count_inside_their_sequence(inplace: bool) -> None:
    x, angle = torch.randn(9, 2, 8), torch.rand(12, 3)
    offsets, starts = torch.tensor([0, 2, 2, 9], dtype=torch.int32), torch.tensor([4, 0, 1])
    expected = torch.cat([turned(x[:2], angle, False, 4), turned(x[2:], angle, False, 1)])
    given = x.clone()
    out = apply_rotary(
        given, angle.cos(), angle.sin(), starts, offsets, 7, interleaved=False, inplace=inplace
    )
    torch.testing.assert_close(out, expected)
    assert (out is given) == inplace
    back = apply_rotary(out, angle.cos(), angle.sin(), starts, offsets, 7, conjugate=True)
    torch.testing.assert_close(back, x)


def test_a_position_behind_the_tables_is_not_turned() -> None:
    x, angle = torch.randn(1, 4, 1, 6), torch.rand(3, 3)
    out = apply_rotary(x, angle.cos(), angle.sin(), torch.tensor([1]))
    torch.testing.assert_close(out[0, :2], turned(x[0, :2], angle, False, 1))
    assert torch.equal(out[:, 2:], x[:, 2:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_qkv_in_place_with_its_gradient(together: bool, interleaved: bool) -> None:
    """Also of a leaf that requires a gradient, as flash-attention takes it."""
    angle, angle_k = torch.rand(5, 2), torch.rand(5, 2)
    values = torch.randn(2, 5, 3, 2, 6)
    if together:
        values = torch.randn(2, 5, 4 + 2 * 2, 6)
    tables = angle.cos(), angle.sin(), angle_k.cos(), angle_k.sin()

    def expected(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.split([4, 2, 2], dim=2) if together else x.unbind(2)
        q = torch.stack([turned(row, angle, interleaved) for row in q])
        k = torch.stack([turned(row, angle_k, interleaved) for row in k])
        return torch.cat([q, k, v], dim=2) if together else torch.stack([q, k, v], dim=2)

    leaf, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    heads = 4 if together else None
    out = rotary.apply_rotary_emb_qkv_(leaf, *tables, interleaved, num_heads_q=heads)
    assert out.data_ptr() == leaf.data_ptr()
    wanted = expected(plain)
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(values)
    found = torch.autograd.grad(out, leaf, weight)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, plain, weight))


def test_wrong_shapes() -> None:
    table = torch.zeros(5, 2)
    for function, shape in (
        (rotary.apply_rotary_emb_qkv_, (2, 5, 2, 2, 6)),
        (rotary.apply_rotary_emb_qkv_, (2, 5, 6, 6)),
        (rotary.apply_rotary_emb_kv_, (2, 5, 3, 2, 6)),
        (rotary.apply_rotary, (2, 5, 6)),
        (rotary.apply_rotary, (2, 5, 2, 3)),
    ):
        with pytest.raises(ValueError, match="expected"):
            function(torch.zeros(shape), table, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module(dtype: torch.dtype) -> None:
    """Its tables grow with the length, and are computed in float32 whatever the model's dtype."""
    module = RotaryEmbedding(8, base=100.0).to(dtype)
    angle = torch.arange(40.0)[:, None] * 100.0 ** (-torch.arange(4) / 4)
    for length, offset in ((3, 0), (7, 30), (2, 0)):
        q = torch.randn(1, length, 2, 10, dtype=dtype)
        kv = torch.randn(1, length, 2, 2, 10, dtype=dtype)
        before = q.clone().float(), kv.clone().float()
        out, out_kv = module(q, kv, seqlen_offset=offset)
        near = {"atol": 0.03, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        found = out[0].float(), out_kv[0, :, 0].float()
        for x, y in zip(found, (before[0][0], before[1][0, :, 0]), strict=True):
            torch.testing.assert_close(x, turned(y, angle, False, offset), **near)
        assert torch.equal(out_kv[:, :, 1].float(), before[1][:, :, 1])
    assert module._cos_cached is not None
    assert module._cos_cached.shape == (37, 4)
    assert "inv_freq" not in module.state_dict()
    with pytest.raises(ValueError, match="max_seqlen"):
        RotaryEmbedding(8)(torch.zeros(1, 3, 3, 1, 8), seqlen_offset=torch.tensor([2]))


def test_the_module_with_growing_queries_and_shrinking_keys() -> None:
    """XPos: a score depends on the distance alone, and falls with it."""
    module = RotaryEmbedding(8, scale_base=16.0)
    one = torch.randn(8)
    qkv = one.expand(1, 6, 3, 1, 8).clone()
    q, k, v = module(qkv)[0, :, :, 0].unbind(1)
    score = q @ k.t()
    torch.testing.assert_close(score.diagonal(-2)[0], score.diagonal(-2)[3])
    torch.testing.assert_close(score.diagonal(), one.dot(one).expand(6))
    assert not torch.allclose(score[2, 0], RotaryEmbedding(8)(one.expand(1, 6, 3, 1, 8).clone())
                              [0, 2, 0, 0].dot(one))  # fmt: skip
    assert torch.equal(v, one.expand(6, 8))
