"""``pyfa.quantize``: scales, rounding, the rotation, formats; and Triton's kernel, compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import turns

import pyfa
from pyfa.device import DEVICES
from pyfa.quantize import native_dtype, rotate

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


def inputs(rows: int = 70, dim: int = 64, heads: int = 4, heads_k: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, rows, n, dim) for n in (heads, heads_k, heads_k)]


def back(x: torch.Tensor, scale: torch.Tensor, block: int = 0) -> torch.Tensor:
    """Float8 x (B, rows, H, D) times its scales."""
    if block:
        scale = scale.repeat_interleave(block, 2)[..., : x.shape[1]].transpose(1, 2)
    else:
        scale = scale.expand(x.shape[0], -1)[:, None]
    return x.float() * scale.repeat_interleave(x.shape[2] // scale.shape[2], 2)[..., None]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("block", [None, 16, 64, 128])
def test_what_comes_back_is_off_by_a_rounding(block: int | None, dtype: torch.dtype) -> None:
    given = inputs()
    found = pyfa.quantize(*given, block=block, dtype=dtype)
    shape = (2, 2) if block is None else (2, 2, -(-70 // block))
    for x, x8, scale in zip(given, found[:3], found.descale, strict=True):
        assert x8.dtype == dtype
        assert scale.shape == shape
        assert scale.dtype == torch.float32
        # Half of 2⁻³ of the value, or of the least step.
        least = scale.max() * torch.finfo(dtype).tiny / 8
        error = (back(x8, scale, block or 0) - x).abs()
        assert bool((error <= x.abs() / 16 * 1.0001 + least / 2).all())
    top = given[1][1, :16, 0].abs().max() if block == 16 else None
    if top is not None:
        assert found.descale.k[1, 0, 0] == top / LARGEST[dtype]


def test_the_format_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_dtype(torch.device("cpu")) == torch.float8_e4m3fn
    for name, dtype in (("H200", torch.float8_e4m3fn), ("MI300X", torch.float8_e4m3fnuz)):
        monkeypatch.setattr(pyfa.device, "of", lambda where, name=name: DEVICES[name])
        assert native_dtype(torch.device("cuda", 0)) == dtype


def test_query_heads_share_the_scale_of_their_key_head() -> None:
    q, k, v = inputs()
    q[:, :, 1] *= 100.0
    found = pyfa.quantize(q, k, v)
    assert torch.equal(found.descale.q[:, 0], q[:, :, :2].abs().amax((1, 2, 3)) / 448.0)
    assert torch.equal(found.descale.q[:, 1], q[:, :, 2:].abs().amax((1, 2, 3)) / 448.0)


def test_one_scale_for_a_tensor() -> None:
    given = inputs()
    found = pyfa.quantize(*given, per_tensor=True)
    for x, scale in zip(given, found.descale, strict=True):
        assert scale.tolist() == [[x.abs().max() / 448.0]]
    out = pyfa.attention(found.q, found.k, found.v, descale=found.descale)
    assert (out - pyfa.attention(*given)).abs().max() < 0.1


@pytest.mark.parametrize("dim", [8, 16, 40, 64, 80, 96, 128, 192, 256])
def test_the_rotation_keeps_every_product(dim: int) -> None:
    q, k, _ = inputs(dim=dim)
    turned_q, turned_k = rotate(q.double(), 7), rotate(k.double(), 7)
    torch.testing.assert_close(
        torch.einsum("bihd,bjhd->bhij", turned_q[:, :, :2], turned_k),
        torch.einsum("bihd,bjhd->bhij", q[:, :, :2].double(), k.double()),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    one = torch.zeros(dim)
    one[3] = 1.0
    width = dim & -dim
    spread = rotate(one, 7).abs()
    assert torch.allclose(spread[:width], torch.full((width,), width**-0.5))
    assert not spread[width:].any()


def test_rotated_attention_is_the_same_attention_and_less_wrong() -> None:
    given = inputs(rows=256, heads=2)
    for x in given[:2]:
        x[..., 5] *= 30.0
    wanted = pyfa.attention(*given, scale=0.02)
    errors = []
    for hadamard in (False, True):
        x = pyfa.quantize(*given, hadamard=hadamard)
        out = pyfa.attention(x.q, x.k, x.v, descale=x.descale, scale=0.02)
        errors.append(float((out - wanted).square().mean().sqrt()))
    assert errors[1] < 0.7 * errors[0]


def test_a_seed_gives_one_rotation() -> None:
    q, k, v = inputs()
    first, again = (pyfa.quantize(q, k, v, hadamard=True, seed=3) for _ in range(2))
    other = pyfa.quantize(q, k, v, hadamard=True, seed=4)
    free = [pyfa.quantize(q, k, v, hadamard=True) for _ in range(2)]
    assert torch.equal(first.k.view(torch.uint8), again.k.view(torch.uint8))
    assert not torch.equal(first.k.view(torch.uint8), other.k.view(torch.uint8))
    assert not torch.equal(free[0].k.view(torch.uint8), free[1].k.view(torch.uint8))
    # Queries of 16 bits before keys that were turned with the same seed.
    x = pyfa.quantize(None, k, v, hadamard=True, seed=3)
    assert x.q is None
    assert x.descale.q is None
    out = pyfa.attention(rotate(q, 3).half(), x.k, x.v, descale=x.descale)
    assert (out - pyfa.attention(q, k, v)).abs().max() < 0.1


def test_packed_pages_empty_and_zero() -> None:
    q, k, v = (x.flatten(0, 1) for x in inputs())
    found = pyfa.quantize(q, k, v, block=32)
    assert found.descale.q.shape == (1, 2, 5)
    offsets = torch.tensor([0, 50, 140], dtype=torch.int32)
    out = pyfa.attention_varlen(
        found.q, found.k, found.v, offsets, offsets, 90, 90, descale=found.descale
    )
    wanted = pyfa.attention_varlen(q, k, v, offsets, offsets, 90, 90)
    assert (out - wanted).abs().max() < 0.1 * wanted.abs().max()
    for block in (None, 16):
        none = pyfa.quantize(q[:0], k[:0], v[:0], block=block)
        assert none.k.shape == (0, 2, 64)
        assert none.descale.k.shape == ((1, 2) if block is None else (1, 2, 0))
    zero = pyfa.quantize(*(torch.zeros_like(x) for x in inputs()), block=16)
    assert zero.descale.k.unique().tolist() == [1.0]
    assert not zero.k.float().any()
    tiny = pyfa.quantize(*(x * 1e-30 for x in inputs()))
    assert tiny.descale.k.unique().tolist() == [2.0**-63]


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_of_a_scale_becomes_the_largest_there_is(dtype: torch.dtype) -> None:
    """max · (1 / (max / 448)) is 448 give or take a rounding, which must not lead beyond it."""
    torch.manual_seed(0)
    top = (1.0 + torch.rand(4096)) * 2.0 ** torch.arange(-48, 80).repeat(32)
    x = (top[:, None] * torch.tensor([1.0, -1.0]).repeat(8)).reshape(1, -1, 1, 1)
    found = pyfa.quantize(None, x, x, block=16, dtype=dtype)
    assert torch.equal(found.descale.k[0, 0], top / LARGEST[dtype])
    assert torch.equal(found.k.float().abs(), torch.full_like(x, LARGEST[dtype]))


def test_to_the_other_format_and_back() -> None:
    fn, fnuz = LARGEST
    every = torch.arange(256, dtype=torch.uint8).view(fn)
    given = every[~every.float().isnan()].reshape(1, -1, 1, 2)
    one = torch.ones(1, 1)
    x = pyfa.Quantized(given, given, given, pyfa.quantize(*inputs()).descale._make((one,) * 3))
    turned = x.to(fnuz)
    assert turned.k.dtype == fnuz
    assert torch.equal(turned.k.float() * 2.0, given.float())
    assert turned.descale.v.item() == 2.0
    assert turned.to(fnuz) is turned
    nan = x._replace(k=every.reshape(1, -1, 1, 2)).to(fnuz).k
    assert torch.equal(nan.float().isnan().flatten(), every.float().isnan())
    # Every number of fnuz down to its step, which is half of fn's.
    all_fnuz = torch.arange(256, dtype=torch.uint8).view(fnuz)
    all_fnuz = all_fnuz[~all_fnuz.float().isnan()].reshape(1, -1, 1, 1)
    back = pyfa.Quantized(None, all_fnuz, all_fnuz, x.descale._replace(q=None)).to(fn)
    error = (back.k.float() - all_fnuz.float()).abs()
    assert float(error.max()) == 2.0**-10
    assert not error[all_fnuz.float().abs() >= 2.0**-6].any()
    with pytest.raises(ValueError, match=r"^dtype: expected float8_e4m3fn or float8_e4m3fnuz"):
        x.to(torch.float16)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block": 100}, r"^block: expected a power of two from 16, or None; got 100"),
        ({"block": 8}, r"^block: expected a power of two from 16"),
        ({"block": True}, r"^block: expected a power of two"),
        ({"block": 16, "per_tensor": True}, r"^per_tensor: expected False with block"),
        ({"seed": 1}, r"^seed: expected None without hadamard"),
        ({"dtype": torch.float8_e5m2}, r"^dtype: expected float8_e4m3fn or float8_e4m3fnuz"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pyfa.quantize(*inputs(), **options)


@pytest.mark.parametrize("name", ["per_tensor", "hadamard"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected True or False; got str"):
        pyfa.quantize(*inputs(), **{name: "no"})


@pytest.mark.parametrize("seed", ["x", True, 1.5, [1], torch.tensor(1)])
def test_a_seed_is_an_int(seed: Any) -> None:
    q, k, v = inputs()
    message = f"^seed: expected an int; got {type(seed).__name__}"
    with pytest.raises(TypeError, match=message):
        pyfa.quantize(q, k, v, hadamard=True, seed=seed)
    with pytest.raises(TypeError, match=message):
        rotate(q, seed)
    assert torch.equal(rotate(q, np.int64(3)), rotate(q, 3))


def test_a_block_larger_than_all_rows() -> None:
    """It is not padded to its size."""
    large, small = (pyfa.quantize(*inputs(), block=block) for block in (2**40, 128))
    for x, y in zip((*large[:3], *large.descale), (*small[:3], *small.descale), strict=True):
        assert torch.equal(x.float(), y.float())


def test_wrong_tensors_are_refused() -> None:
    q, k, v = inputs(dim=20)
    with pytest.raises(ValueError, match=r"^hadamard: expected a head_dim that is a multiple of 8"):
        pyfa.quantize(q, k, v, hadamard=True)
    with pytest.raises(ValueError, match=r"^x: expected a head_dim that is a multiple of 8"):
        rotate(q, 0)
    for x in (torch.tensor(1.0), torch.ones(3, 8, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"^x: expected floating point \(…, head_dim\)"):
            rotate(x, 0)
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^seed: expected an int with hadamard and no q"):
        pyfa.quantize(None, k, v, hadamard=True)
    with pytest.raises(ValueError, match=r"^k: expected \(batch, rows, heads, head_dim\) or"):
        pyfa.quantize(q, k[0, 0], v)
    with pytest.raises(TypeError, match=r"^k: expected a tensor; got list"):
        pyfa.quantize(q, [1.0], v)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^v: expected k's shape"):
        pyfa.quantize(q, k, v[:, :3])
    x = pyfa.quantize(q, k, v)
    with pytest.raises(ValueError, match=r"^q: expected float16, bfloat16 or float32"):
        pyfa.quantize(x.q, x.k, x.v)


@pytest.mark.long
def test_the_kernel_interpreted_is_pytorchs_rounding() -> None:
    code = os.path.join(os.path.dirname(__file__), "triton", "quantize_interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    pytest.importorskip("triton")
    # Four that follow one another differ in whether values are rotated, and in the blocks of keys,
    # or of the whole tensor, that share a scale.
    wanted = turns.some(range(40), 8, kind=lambda index: index // 8, name=str)
    ended = subprocess.run(
        [sys.executable, code, *map(str, wanted)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_error_is_what_the_guide_says() -> None:
    """In its example: normally distributed bfloat16 inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 128).bfloat16() for heads in (8, 2, 2))
    wanted = pyfa.attention(q.float(), k.float(), v.float(), causal=True)

    def error(out: torch.Tensor) -> float:
        return float((out - wanted).norm() / wanted.norm())

    x = pyfa.quantize(q, k, v, block=128, hadamard=True)
    cache = pyfa.quantize(None, k, v)
    out = pyfa.attention(x.q, x.k, x.v, descale=x.descale, causal=True)
    assert round(error(out), 2) == 0.04
    out = pyfa.attention(q, cache.k, cache.v, descale=cache.descale, causal=True)
    assert round(error(out), 3) == 0.035
    assert round(error(pyfa.attention(q, k, v, causal=True)), 3) == 0.002
