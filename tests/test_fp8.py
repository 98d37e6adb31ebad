"""Float8 through the public functions: scales, the output's dtype, caches, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa import reference, request
from pyfa.compat.rotary import apply_rotary_emb
from pyfa.problem import rows_per_scale

FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def inputs(dtype: torch.dtype = FORMATS[0], rows: int = 40, keys: int = 70) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, rows, 4, 32), (2, keys, 2, 32), (2, keys, 2, 48))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def scales(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand(shape) + 0.5 for shape in shapes)


KINDS = {
    "tensor": ((), (), ()),
    "one": ((1,), (1,), (1,)),
    "head": ((2, 2), (2, 2), (2, 2)),
    "head of all": ((1, 2), (1, 2), (1, 2)),
    "blocks": ((2, 2, 3), (2, 2, 5), (2, 2, 5)),
    "one block": ((2, 2, 1), (2, 2, 1), (2, 2, 1)),
}


def expanded(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of each row and head, by hand: blocks are of 16 rows, or of all."""
    if scale.dim() < 2:
        return scale.reshape(1, 1, 1, 1)
    if scale.dim() == 2:
        each = scale[:, None, :, None]
    else:
        size = 16 if scale.shape[2] > 1 else 128
        each = scale.repeat_interleave(size, 2)[..., : x.shape[1]].transpose(1, 2)[..., None]
    return each.repeat_interleave(x.shape[2] // scale.shape[1], 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_scales(kind: str, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    descale = scales(*KINDS[kind])
    out = pyfa.attention(*given, causal=True, descale=descale, out_dtype=torch.float16)
    plain = [x.float() * expanded(s, x) for x, s in zip(given, descale, strict=True)]
    wanted = pyfa.attention(*plain, causal=True)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), wanted, rtol=2e-3, atol=1e-3)
    exact, _ = reference.attention(
        request.dense(*given, request.Shared(causal=True, descale=descale)).call
    )
    torch.testing.assert_close(wanted.double(), exact, rtol=1e-4, atol=1e-5)


def test_without_scales_they_are_one_and_the_output_is_bfloat16() -> None:
    given = inputs()
    out = pyfa.attention(*given)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, pyfa.attention(*given, descale=(torch.ones(()),) * 3))


def test_the_size_of_a_block_follows_from_how_many_there_are() -> None:
    for rows in range(1, 300):
        for size in (1, 2, 16, 64, 128, 512):
            blocks = -(-rows // size)
            found = rows_per_scale(blocks, rows)
            assert found == size if blocks > 1 else found >= rows
    assert rows_per_scale(4, 70) == 0
    assert rows_per_scale(0, 0) == 1


def test_packed_scales_lie_as_the_packed_tensor() -> None:
    q, k, v = (x.flatten(0, 1) for x in inputs(keys=40))
    offsets = torch.tensor([0, 33, 80], dtype=torch.int32)
    descale = scales((1, 2, 5), (1, 2, 5), (1, 2, 5))
    out = pyfa.attention_varlen(q, k, v, offsets, offsets, 47, 47, descale=descale)
    plain = [
        (x[None].float() * expanded(s, x[None]))[0] for x, s in zip((q, k, v), descale, strict=True)
    ]
    wanted = pyfa.attention_varlen(*plain, offsets, offsets, 47, 47)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FORMATS])
def test_a_cache_of_float8_under_queries_of(dtype: torch.dtype) -> None:
    q, k, v = inputs()
    k, v = (x.to(dtype) if dtype in FORMATS else x for x in (k, v))
    q = q[:, :1].to(dtype)
    descale: Any = scales((2, 2), (2, 2), (2, 2))
    if dtype not in FORMATS:
        descale = (None, *descale[1:])
    used = torch.tensor([64, 17], dtype=torch.int32)
    new = [torch.randn(2, 3, 2, x.shape[-1]).to(k.dtype) for x in (k, v)]
    out = pyfa.attention_kvcache(
        q, k, v, k=new[0], v=new[1], cache_seqlens=used, causal=True, descale=descale
    )
    assert torch.equal(k[1, 17:20].view(torch.uint8), new[0][1].view(torch.uint8))
    assert out.dtype == (torch.bfloat16 if dtype in FORMATS else dtype)
    plain = [x.float() for x in (q, k, v)]
    for x, s in zip(plain, descale, strict=True):
        if s is not None:
            x *= expanded(s, x)
    wanted = pyfa.attention_kvcache(*plain, cache_seqlens=used + 3, causal=True)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=1e-2)


def test_compiled_and_under_autocast() -> None:
    given = inputs()
    descale = scales(*KINDS["blocks"])
    wanted = pyfa.attention(*given, descale=descale)
    compiled = torch.compile(
        lambda *args: pyfa.attention(*args, descale=descale), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(*given), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pyfa.attention(*given, descale=descale), wanted)
        q, k, v = given
        assert pyfa.attention(q.half(), k, v).dtype == torch.bfloat16


def test_explain_names_both_dtypes() -> None:
    q, k, v = inputs()
    text = str(pyfa.explain(q.half(), k, v))
    assert "float16, k (2, 70, 2, 32), v (2, 70, 2, 48) float8_e4m3fn" in text


def refused(match: str, *given: torch.Tensor, error: type = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        pyfa.attention(*given, **options)


def test_wrong_scales_are_refused() -> None:
    given = inputs()
    one = torch.ones(())
    refused(r"^descale: expected three scales \(q, k, v\)", *given, descale=(one, one))
    refused(r"^descale\[1\] \(k\): expected a tensor; got float", *given, descale=(one, 1.0, one),
            error=TypeError)  # fmt: skip
    refused(r"^descale\[0\] \(q\): expected a tensor; got NoneType", *given,
            descale=(None, one, one), error=TypeError)  # fmt: skip
    refused(r"^descale\[2\] \(v\): expected dtype float32", *given, descale=(one, one, one.half()))
    refused(r"^descale\[1\] \(k\): expected q's device", *given,
            descale=(one, one.to("meta"), one))  # fmt: skip
    refused(r"^descale\[0\] \(q\): expected shape \(\) per tensor, \(2, 2\) per sequence and key "
            r"head, or \(2, 2, blocks\) per block of rows; got shape \(2, 4\)", *given,
            descale=scales((2, 4), (2, 2), (2, 2)))  # fmt: skip
    refused(r"^descale\[1\] \(k\): expected ⌈70 / block⌉ scales along the rows, the block a power",
            *given, descale=scales((2, 2, 3), (2, 2, 4), (2, 2, 4)))  # fmt: skip
    refused(r"^descale\[2\] \(v\): expected the same blocks as k, \(2, 2, 5\)", *given,
            descale=scales((2, 2, 3), (2, 2, 5), (2, 2, 3)))  # fmt: skip
    refused(r"^descale\[0\] \(q\): expected one kind of scale for all: k's is per block of rows; "
            "got per sequence and head", *given,
            descale=scales((), (2, 2, 5), (2, 2, 5)))  # fmt: skip


def test_wrong_dtypes_are_refused() -> None:
    q, k, v = inputs()
    refused("^out_dtype: expected bfloat16 or float16 for float8 queries", q, k, v,
            out_dtype=torch.float32)  # fmt: skip
    refused("^out_dtype: expected None or torch.float16, that of the queries", q.half(), k, v,
            out_dtype=torch.bfloat16)  # fmt: skip
    refused(r"^descale\[0\] \(q\): expected None for queries of torch.float16", q.half(), k, v,
            descale=(torch.ones(()),) * 3)  # fmt: skip
    refused("^k: expected q's dtype torch.float32", q.float(), k, v)
    refused("^k: expected q's dtype torch.float8_e4m3fn", q, k.half(), v.half())
    refused("^v: expected k's dtype torch.float8_e4m3fn", q.half(), k, v.half())
    refused("^k: expected q's dtype torch.float16 or float8_e4m3", q.half(), k.float(), v.float())


def test_a_gradient_is_refused() -> None:
    q, k, v = inputs()
    half = q.half().requires_grad_()
    refused("^q: expected no requires_grad .float8 attention has none", half, k, v)
    sinks = torch.zeros(4, requires_grad=True)
    refused("^sinks: expected no requires_grad .float8", q, k, v, sinks=sinks)
    with torch.no_grad():
        assert pyfa.attention(half, k, v).shape == (2, 40, 4, 48)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rounds_again(interleaved: bool, dtype: torch.dtype) -> None:
    """Queries and new keys are turned in float32; what becomes too large becomes the largest."""
    q, k, v = inputs(dtype)
    most = torch.finfo(dtype).max
    q[0, 0, 0, :16] = most
    angle = torch.linspace(0, 3, 80 * 8).reshape(80, 8)
    turn = (angle.cos(), angle.sin())
    where = {"cache_seqlens": torch.tensor([3, 60], dtype=torch.int32), "causal": True}
    options = {"rotary_cos": turn[0], "rotary_sin": turn[1], "rotary_interleaved": interleaved}
    cache = k.clone(), v.clone()
    new = k[:, 5:9].clone(), v[:, 5:9].clone()
    out = pyfa.attention_kvcache(q[:, :4], *cache, k=new[0], v=new[1], **options, **where)

    def turned(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        there = apply_rotary_emb(x.float(), *turn, interleaved, seqlen_offsets=start)
        return there.clamp(-most, most).to(x.dtype)

    start = where["cache_seqlens"]
    theirs = k.clone(), v.clone()
    wanted = pyfa.attention_kvcache(
        turned(q[:, :4], start), *theirs, k=turned(new[0], start), v=new[1], **where
    )
    assert torch.equal(out, wanted)
    for x, y in zip(cache, theirs, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert out.isfinite().all()


def test_a_cache_takes_its_own_dtype() -> None:
    q, k, v = inputs()
    tables = {name: torch.ones(80, 8) for name in ("rotary_cos", "rotary_sin")}
    with pytest.raises(ValueError, match=r"^k: expected the cache's dtype torch.float8_e4m3fn"):
        pyfa.attention_kvcache(
            q.half(), k, v, k=k[:, :1].half(), v=v[:, :1].half(), cache_seqlens=3
        )
    assert pyfa.attention_kvcache(q.half(), k, v, **tables).shape == (2, 40, 4, 48)
